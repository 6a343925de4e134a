"""Configurations of recipes with overrides applied."""

from __future__ import annotations

from bridge_profiling.overrides import apply_overrides
from recipes.catalog import get_recipe
from recipes.config import ConfigContainer


def recipe(name: str, *overrides: str) -> ConfigContainer:
    config = get_recipe(name)()
    apply_overrides(config, overrides)
    return config


def tiny(*overrides: str) -> ConfigContainer:
    return recipe("gpt_tiny", *overrides)
