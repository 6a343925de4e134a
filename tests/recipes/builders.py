"""Configurations of recipes: `recipe("gpt_125m", "train.train_iters=8 model.bf16=false")`."""

from bridge_profiling.settings.overrides import apply_overrides
from recipes.catalog import RANKS, get_recipe
from recipes.config import ConfigContainer
from recipes.finalize import finalize


def recipe(name: str, overrides: str = "") -> ConfigContainer:
    config = get_recipe(name)()
    apply_overrides(config, overrides.split())
    return config


def tiny(overrides: str = "") -> ConfigContainer:
    return recipe("gpt_tiny", overrides)


def finalized(name: str, overrides: str = "", ranks: int | None = None) -> ConfigContainer:
    """Finalized for that many ranks, by default for those that the recipe was laid out for."""
    config = recipe(name, overrides)
    finalize(config, ranks or RANKS[name])
    return config
