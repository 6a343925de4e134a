"""Reads decoded JSON as an annotated type: dataclasses, lists, objects and plain values, strictly checked."""

from __future__ import annotations

import dataclasses
import types
import typing
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")

_hints = cache(typing.get_type_hints)


def read_typed(content: object, as_type: type[T], name: str) -> T:
    """Convert decoded JSON to `as_type`, a dataclass of typed fields; an object's unknown keys are ignored.

    Raises ValueError, with `name`, if a required key is missing or a value has another type. `true` is not a number.
    """
    return _read(content, as_type, name)


def _read(value: Any, hint: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        _expect(isinstance(value, dict), name, "an object", value)
        hints, given = _hints(hint), {}  # type: ignore[arg-type]
        for field in dataclasses.fields(hint):
            if field.name in value:
                given[field.name] = _read(value[field.name], hints[field.name], f"{name}.{field.name}")
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ValueError(f"{name} has no {field.name!r}")
        return hint(**given)  # type: ignore[operator]
    if origin is types.UnionType:
        if value is None and types.NoneType in arguments:
            return None
        *others, last = (argument for argument in arguments if argument is not types.NoneType)
        for other in others:
            with suppress(ValueError):
                return _read(value, other, name)
        return _read(value, last, name)
    if origin is Literal:
        _expect(value in arguments, name, f"one of {', '.join(arguments)}", value)
        return value
    if origin is list:
        _expect(isinstance(value, list), name, "a list", value)
        return [_read(item, arguments[0], f"{name}[{index}]") for index, item in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, dict), name, "an object", value)
        return {key: _read(item, arguments[1], f"{name}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return value
    _expect(isinstance(value, hint) and (hint is bool or not isinstance(value, bool)), name, f"of type {hint.__name__}", value)
    return value


def _expect(condition: bool, name: str, expected: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} is {str(value)[:50]!r}, not {expected}")
