"""The recipes by the names under which a command line finds them, and the GPUs each was laid out for."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from bridge_profiling.errors import ProfilingConfigError
from recipes.config import ConfigContainer
from recipes.gpt import gpt_125m, gpt_tiny
from recipes.llama import llama3_8b, llama32_1b
from recipes.qwen import qwen3_30b_a3b

RECIPES: dict[str, Callable[[], ConfigContainer]] = {
    "gpt_tiny": gpt_tiny,
    "gpt_125m": gpt_125m,
    "llama32_1b": llama32_1b,
    "llama3_8b": llama3_8b,
    "qwen3_30b_a3b": qwen3_30b_a3b,
}

#: Ranks a recipe is meant for, one a GPU (gpt_tiny: one a CPU core); multiples of them add data parallelism.
RANKS = {"gpt_tiny": 1, "gpt_125m": 1, "llama32_1b": 1, "llama3_8b": 8, "qwen3_30b_a3b": 16}


def get_recipe(name: str) -> Callable[[], ConfigContainer]:
    """The recipe of that name.

    Raises:
        ProfilingConfigError: there is none; the message names the nearest.
    """
    if name in RECIPES:
        return RECIPES[name]
    nearest = difflib.get_close_matches(name, RECIPES, n=1)
    raise ProfilingConfigError(
        f"there is no recipe {name!r}",
        why=f"the recipes are {', '.join(RECIPES)}",
        instead=f"Type {nearest[0] if nearest else next(iter(RECIPES))}",
    )
