"""Values given as text or YAML, brought into the type that a dataclass field declares, or refused with what was expected.

OmegaConf's typed nodes convert the plain types; unions, literals, enums, lists and `torch.dtype` are handled here.
Never imports torch: a field that holds a dtype has loaded it already.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

from omegaconf import BooleanNode, FloatNode, IntegerNode, PathNode, StringNode
from omegaconf.errors import ValidationError

from bridge_profiling.errors import ProfilingConfigError

_SCALARS: dict[object, Any] = {bool: BooleanNode, int: IntegerNode, float: FloatNode, str: StringNode, Path: PathNode}
_LISTS = (list, tuple, collections.abc.Sequence)
_NULLS = ("null", "Null", "NULL", "~")


@dataclasses.dataclass(frozen=True)
class Given:
    """A value as it was given: parsed, and as text where it was typed; `problem` says why the text cannot be parsed."""

    value: Any
    text: str | None = None
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.typed} ({kind(self.value)})" if self.typed else "nothing"

    @property
    def typed(self) -> str:
        """The value in the form in which it is typed."""
        return str(self.value) if self.text is None else self.text


def convert(given: Given, hint: object, dotted: str) -> Any:
    """The value in the type a field declares.

    Args:
        given: the value as it came.
        hint: the field's resolved annotation.
        dotted: the field's path, for messages.

    Raises:
        ProfilingConfigError: the value is not of that type, or text cannot express it (a callable, say).
    """
    if given.value is None and (type(None) in members(hint) or hint is Any) and given.text in (None, *_NULLS):
        return None
    wanted = [member for member in members(hint) if member is not type(None)]
    if given.problem and wanted != [str]:
        raise ProfilingConfigError(
            f"{dotted}={given.text} cannot be parsed",
            why=f"{given.problem}; expected {describe(hint)}",
            instead=f"Quote it if it is text: {dotted}='…'",
        )
    if not any(map(_settable, wanted)):
        raise ProfilingConfigError(
            f"{dotted} cannot be set by an override",
            why=f"its type is {describe(hint)}, which text cannot express",
            instead="Set it in the recipe's Python code",
        )
    for member in wanted:
        if len(wanted) == 1 or _fits(given.value, member):
            try:
                return _convert_to(given, member, dotted)
            except (ValidationError, _Unfit):
                continue
    raise _wrong_type(given, hint, dotted)


class _Unfit(Exception):
    """A value that the type at hand cannot hold."""


def _convert_to(given: Given, member: Any, dotted: str) -> Any:
    value, origin = given.value, typing.get_origin(member) or member
    if member is Any:
        return value
    if origin is typing.Literal:
        return _one_of(value, dict(zip(typing.get_args(member), typing.get_args(member), strict=True)))
    if isinstance(member, type) and issubclass(member, enum.Enum):
        name = str(value).removeprefix(f"{member.__name__}.")
        return _one_of(name, dict(member.__members__)) if name in member.__members__ else _by_value(member, value)
    if _is_dtype(member):
        dtype = getattr(sys.modules["torch"], str(value).removeprefix("torch."), None)
        return dtype if isinstance(dtype, member) else _refuse()
    if origin in _LISTS:
        return _convert_list(value, member, origin, dotted)
    if origin is bool and not isinstance(value, bool | str) and value not in (0, 1):
        _refuse()
    if origin is str and given.text is not None and _reads_as_text(given):
        return given.text
    if value is None or isinstance(value, list | Mapping) or origin not in _SCALARS:
        _refuse()
    return _SCALARS[origin]().validate_and_convert(value)


def _reads_as_text(given: Given) -> bool:
    """Whether a text field takes what was typed as it stands: `007` is a name there, not the number 7."""
    if given.problem:
        return True
    return given.text not in _NULLS and (given.value is None or isinstance(given.value, int | float))


def _convert_list(value: Any, member: Any, origin: Any, dotted: str) -> Any:
    if not isinstance(value, list | tuple):
        _refuse()
    hints = typing.get_args(member) or (Any,)
    if origin is tuple and Ellipsis not in hints:
        if len(hints) != len(value):
            _refuse()
    else:
        hints = (hints[0],) * len(value)
    try:
        items = [convert(Given(item), hint, dotted) for item, hint in zip(value, hints, strict=True)]
    except ProfilingConfigError:
        raise _Unfit from None
    return tuple(items) if origin is tuple else items


def _one_of(value: Any, choices: Mapping[Any, Any]) -> Any:
    # `1 in {True: …}` holds in Python, but 1 is not what a Literal[True] means.
    for choice, result in choices.items():
        if value == choice and type(value) is type(choice):
            return result
    return _refuse()


def _by_value(member: type[enum.Enum], value: Any) -> enum.Enum:
    return next((item for item in member if item.value == value), None) or _refuse()


def _refuse() -> typing.NoReturn:
    raise _Unfit


def _fits(value: Any, member: Any) -> bool:
    """Whether a value, as it was parsed, is one of this type: in a union `0` is an int, never the text '0'."""
    origin = typing.get_origin(member) or member
    if origin in _LISTS:
        return isinstance(value, list | tuple)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin in (int, bool, str):
        return type(value) is origin
    return _settable(member)


def _settable(member: Any) -> bool:
    origin = typing.get_origin(member) or member
    known = origin in _SCALARS or origin in _LISTS or origin in (typing.Literal, Any, dict, collections.abc.Mapping)
    return known or _is_dtype(member) or (isinstance(member, type) and issubclass(member, enum.Enum))


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union (NoneType among them, if null is allowed), or the one type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_mapping(hint: object) -> bool:
    """Whether a field of this type may hold a mapping, whose entries are then addressed as `field.key`."""
    return any((typing.get_origin(m) or m) in (dict, collections.abc.Mapping) for m in members(hint))


def _is_dtype(member: Any) -> bool:
    return getattr(member, "__module__", "") == "torch" and getattr(member, "__name__", "") == "dtype"


def _wrong_type(given: Given, hint: object, dotted: str) -> ProfilingConfigError:
    choices = [str(choice) for choice in _choices(hint)]
    nearest = difflib.get_close_matches(str(given.value), choices, n=1)
    example = nearest[0] if nearest else _example(given.value, hint)
    return ProfilingConfigError(
        f"{dotted}={given.typed} {'is not among its choices' if choices else 'has the wrong type'}",
        why=f"expected {describe(hint)}, got {given}",
        instead=f"Type for example {dotted}={example}",
    )


def _choices(hint: object) -> list[Any]:
    choices: list[Any] = []
    for member in members(hint):
        if typing.get_origin(member) is typing.Literal:
            choices += typing.get_args(member)
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            choices += member.__members__
    return choices


def _example(value: Any, hint: object) -> str:
    member = next(m for m in members(hint) if m is not type(None))
    origin = typing.get_origin(member) or member
    if origin in _LISTS:
        inner = [m for m in typing.get_args(member) if m is not Ellipsis] or [str]
        items = value if isinstance(value, list) else [value]
        ready = all(_fits(item, inner[0]) for item in items) and origin is not tuple
        return f"[{','.join(map(str, items) if ready else (_example(None, m) for m in inner))}]"
    if origin is int and isinstance(value, float) and value.is_integer():
        return str(int(value))
    examples = {bool: "true", int: "10", float: "0.1", str: "text", Path: "/path", dict: "{key: value}"}
    choices = _choices(hint)
    return str(choices[0]) if choices else examples.get(origin, "bfloat16" if _is_dtype(member) else "null")


def describe(hint: object) -> str:
    """A type in the words of someone who types it."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(member) for member in members(hint))
    if choices := _choices(hint):
        return f"one of {', '.join(map(str, choices))}"
    if _is_dtype(hint):
        return "the name of a torch dtype (float32, bfloat16, float16)"
    names = {bool: "true or false", type(None): "null"}
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return names.get(hint, hint.__name__)
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def kind(value: object) -> str:
    """The name of a value's type, as someone who writes YAML calls it."""
    return "null" if value is None else type(value).__name__
