"""Converts a dataclass tree to NeMo-Run's `run.Config` tree, which can be edited, serialized and sent to a job.

Submit host only. Recipes themselves do not use NeMo-Run, since ranks import them too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import nemo_run as run


def as_config(instance: Any) -> run.Config:
    """A dataclass instance as a `run.Config` tree that builds an equal one.

    Sections stay Configs, so that every setting can be edited; only fields that differ from their defaults are kept.

    Args:
        instance: a dataclass whose fields are values or further dataclasses.
    """
    given: dict[str, Any] = {}
    for field in dataclasses.fields(instance):
        value, default = getattr(instance, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            given[field.name] = as_config(value)
        elif field.init and (type(value) is not type(default) or value != default):
            given[field.name] = value
    return run.Config(type(instance), **given)


def training_config(config: Any) -> run.Config:
    """`as_config` of a ConfigContainer, always with the training's length and batch sizes.

    `bridge-profiling doctor` reads an experiment without our classes, so it does not know their defaults.
    """
    task_config = as_config(config)
    for name in ("train_iters", "micro_batch_size", "global_batch_size"):
        setattr(task_config.train, name, getattr(config.train, name))
    return task_config
