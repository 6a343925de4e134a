"""What a recipe says in the settings that `bridge-profiling doctor` reads: it imports no recipe, so it has to be told."""

from __future__ import annotations

import dataclasses

from bridge_profiling.doctor.request import Model, Train
from bridge_profiling.overrides import format_override
from recipes.config import ConfigContainer


def known_settings(config: ConfigContainer) -> list[str]:
    """Those settings as overrides, `model.num_layers=12`, the sections' defaults included.

    Args:
        config: a configuration, finalized or not.
    """
    return [
        format_override(f"{section}.{field.name}", getattr(getattr(config, section), field.name))
        for section, owner in (("model", Model), ("train", Train))
        for field in dataclasses.fields(owner)
    ]
