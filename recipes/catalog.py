"""The recipes by name, the number of ranks each is meant for, and the settings that `bridge-profiling doctor` reads."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from bridge_profiling.common.errors import ProfilingConfigError, did_you_mean
from bridge_profiling.settings.overrides import format_override
from recipes import models
from recipes.config import ConfigContainer

RECIPES: dict[str, Callable[[], ConfigContainer]] = {
    "gpt_tiny": models.gpt_tiny,
    "gpt_125m": models.gpt_125m,
    "llama32_1b": models.llama32_1b,
    "llama3_8b": models.llama3_8b,
    "qwen3_30b_a3b": models.qwen3_30b_a3b,
}

#: Ranks a recipe is meant for, one per GPU (gpt_tiny: one per CPU core); multiples of them add data parallelism.
RANKS = {"gpt_tiny": 1, "gpt_125m": 1, "llama32_1b": 1, "llama3_8b": 8, "qwen3_30b_a3b": 16}


def get_recipe(name: str) -> Callable[[], ConfigContainer]:
    """The recipe of that name.

    Raises:
        ProfilingConfigError: no recipe has it; the message names the nearest.
    """
    if name in RECIPES:
        return RECIPES[name]
    raise ProfilingConfigError(
        f"unknown recipe {name!r}", why=f"the recipes are {', '.join(RECIPES)}", instead=did_you_mean(name, RECIPES)
    )


def known_settings(config: ConfigContainer) -> list[str]:
    """The settings that `bridge-profiling doctor` reads, as overrides (`model.num_layers=12`); it imports no recipe.

    Args:
        config: a configuration, finalized or not; the sections' defaults are included.
    """
    # Imported late: ranks take recipes from this module, and do not need the doctor.
    from bridge_profiling.doctor.request import LOOKUPS

    return [format_override(key, attrgetter(key)(config)) for key in LOOKUPS]
