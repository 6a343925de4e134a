"""Reads decoded JSON as an annotated type: dataclasses, lists, objects and plain values, strictly checked.

Whole numbers have at most 64 bits, others are finite, and texts are Unicode (or bytes of a file's name): nothing that passes
makes code fail that computes with it or prints it.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")

_hints = cache(typing.get_type_hints)

#: Whole numbers are smaller, and not smaller than its negative.
_NUMBERS = 1 << 63

#: Lists and objects in each other where the type does not limit them.
_MAX_DEPTH = 32


def read_typed(content: object, as_type: type[T], name: str) -> T:
    """Convert decoded JSON to `as_type`, a dataclass of typed fields; an object's unknown keys are ignored.

    Raises ValueError, with `name`, if a required key is missing, a value has another type or is out of bounds. `true` is not
    a number.
    """
    return _read(content, as_type, name)


def _read(value: Any, hint: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        _check_plain(value, name, _MAX_DEPTH)
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
        # A manifest has a thousand durations.
        if arguments[0] is int and set(map(type, value)) == {int} and max(map(abs, value)) < _NUMBERS:
            return value
        return [_read(item, arguments[0], f"{name}[{index}]") for index, item in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, dict), name, "an object", value)
        _check_plain(list(value), name, _MAX_DEPTH)
        return {key: _read(item, arguments[1], f"{name}.{key}") for key, item in value.items()}
    wanted = (int, float) if hint is float else hint
    _expect(
        isinstance(value, wanted) and (hint is bool or not isinstance(value, bool)), name, f"of type {hint.__name__}", value
    )
    if hint is float:
        _expect(abs(value) <= sys.float_info.max, name, "a finite number", value)
    else:
        _check_plain(value, name, 0)
    return value


def _check_plain(value: object, name: str, depth: int) -> None:
    """Check the bounds of decoded JSON of any type."""
    if isinstance(value, str):
        try:
            value.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            raise ValueError(f"{name} is {ascii(value)[:50]}, not text") from None
    elif isinstance(value, int):
        _expect(-_NUMBERS <= value < _NUMBERS, name, "a number of 64 bits", value)
    elif isinstance(value, (list, dict)):
        if not depth:
            raise ValueError(f"{name} is nested more than {_MAX_DEPTH} times")
        for item in value:
            _check_plain(item, name, depth - 1)
            if isinstance(value, dict):
                _check_plain(value[item], name, depth - 1)


def _expect(condition: bool, name: str, expected: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} is {str(value)[:50]!r}, not {expected}")
