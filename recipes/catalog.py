"""The recipes by name, the number of ranks each is meant for, and the settings that `bridge-profiling doctor` reads.

Importing this module loads no megatron-core: a submit host may not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from bridge_profiling.common.errors import ProfilingConfigError, did_you_mean
from bridge_profiling.settings.overrides import format_override

if TYPE_CHECKING:
    from recipes.config import ConfigContainer

#: The functions of `recipes.models`, and the ranks that each is meant for, one per GPU (gpt_tiny: one per CPU core); multiples
#: of them add data parallelism.
RANKS = {"gpt_tiny": 1, "gpt_125m": 1, "llama32_1b": 1, "llama3_8b": 8, "qwen3_30b_a3b": 16}


def get_recipe(name: str) -> Callable[[], ConfigContainer]:
    """The recipe of that name.

    Raises:
        ProfilingConfigError: no recipe has it; the message names the nearest.
    """
    if name not in RANKS:
        raise ProfilingConfigError(
            f"unknown recipe {name!r}", why=f"the recipes are {', '.join(RANKS)}", instead=did_you_mean(name, RANKS)
        )
    from recipes import models

    return getattr(models, name)


def known_settings(config: ConfigContainer) -> list[str]:
    """The settings that `bridge-profiling doctor` reads, as overrides (`model.num_layers=12`); it imports no recipe.

    Args:
        config: a configuration, finalized or not; the sections' defaults are included.
    """
    # Imported late: ranks take recipes from this module, and do not need the doctor.
    from bridge_profiling.doctor.request import LOOKUPS

    return [format_override(key, attrgetter(key)(config)) for key in LOOKUPS]
