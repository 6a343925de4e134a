"""A built dataclass tree as NeMo-Run's `run.Config` tree, that can be edited, serialized and sent to a job.

Submit host only. Recipes themselves know nothing of NeMo-Run, since they run in the ranks too.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import nemo_run as run


def as_config(instance: Any) -> run.Config:
    """A dataclass instance as a `run.Config` tree that builds an equal one.

    Sections stay Configs, so that every setting can be edited; of their fields only those that differ from the defaults
    are kept. What `__post_init__` derived is left out, to be derived again from what is edited later.

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
    """A ConfigContainer as `as_config` has it, with the lengths and batch sizes of the training stated in any case.

    An experiment is read without our classes by `bridge-profiling doctor`, which knows no defaults of theirs.
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
    if isinstance(one, functools.partial):  # megatron-core's initializers, made anew by every __post_init__
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    return bool(one == other)
