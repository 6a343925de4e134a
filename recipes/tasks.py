"""Converts a dataclass tree to NeMo-Run's `run.Config` tree, which can be edited, serialized and sent to a job.

Submit host only. Recipes themselves do not use NeMo-Run, since ranks import them too.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import nemo_run as run


def as_config(instance: Any) -> run.Config:
    """A dataclass instance as a `run.Config` tree that builds an equal one.

    Sections stay Configs, so that every setting can be edited; only fields that differ from their defaults are kept. Fields
    that `__post_init__` derives are left out, so that they are derived again after later edits.

    Args:
        instance: a dataclass whose fields are values or further dataclasses.
    """
    given = {name: value for name, value in _init_values(instance).items() if not _is_default(instance, name, value)}
    if hasattr(instance, "__post_init__"):
        for name in [name for name, value in given.items() if not dataclasses.is_dataclass(value)]:
            others = {key: value for key, value in given.items() if key != name}
            if _builds_equal(others, instance):
                given = others
    return run.Config(
        type(instance), **{name: as_config(value) if _is_section(value) else value for name, value in given.items()}
    )


def training_config(config: Any) -> run.Config:
    """`as_config` of a ConfigContainer, always with the training's length and batch sizes.

    `bridge-profiling doctor` reads an experiment without our classes, so it does not know their defaults.
    """
    task_config = as_config(config)
    for name in ("train_iters", "micro_batch_size", "global_batch_size"):
        setattr(task_config.train, name, getattr(config.train, name))
    return task_config


def _is_section(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _init_values(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance) if field.init}


def _is_default(instance: Any, name: str, value: object) -> bool:
    field = instance.__dataclass_fields__[name]
    if _is_section(value):
        return False
    if field.default_factory is not dataclasses.MISSING:
        return _same(value, field.default_factory())
    return field.default is not dataclasses.MISSING and _same(value, field.default)


def _builds_equal(values: dict[str, Any], instance: Any) -> bool:
    try:
        other = type(instance)(**values)
    except Exception:  # the field left out was needed
        return False
    others = _init_values(other)
    return all(_same(value, others[name]) for name, value in _init_values(instance).items())


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):  # megatron-core's initializers, created by every __post_init__
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    return bool(one == other)
