"""A recipe's settings for `bridge-profiling doctor`, which imports no recipe."""

from __future__ import annotations

from operator import attrgetter

from bridge_profiling.doctor.request import LOOKUPS
from bridge_profiling.overrides import format_override
from recipes.config import ConfigContainer


def known_settings(config: ConfigContainer) -> list[str]:
    """The settings that doctor reads as overrides, such as `model.num_layers=12`, including the sections' defaults.

    Args:
        config: a configuration, finalized or not.
    """
    return [format_override(key, attrgetter(key)(config)) for key in LOOKUPS]
