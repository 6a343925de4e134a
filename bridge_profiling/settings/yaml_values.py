"""Conversion of values given as text or YAML to the annotated type of a dataclass field.

OmegaConf's typed nodes convert the plain types; unions, literals, enums, lists and `torch.dtype` are handled here.
Never imports torch: a class with a dtype field has loaded it already.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import yaml
from omegaconf import BooleanNode, FloatNode, IntegerNode, OmegaConf, PathNode, StringNode
from omegaconf.errors import ValidationError

from bridge_profiling.common.errors import ProfilingConfigError, require

_SCALARS: dict[object, Any] = {bool: BooleanNode, int: IntegerNode, float: FloatNode, str: StringNode, Path: PathNode}
_LISTS = (list, tuple, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)
_LONGEST = 200
_NULLS = ("null", "Null", "NULL", "~")


#: Numbers whose text means the same to everyone. YAML also reads 010 as 8, 0x10 as 16 and 1:30 as 90.
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
_FLOAT = re.compile(rf"{_INTEGER.pattern}(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|[+-]?\.[0-9]+(?:[eE][+-]?[0-9]+)?")


@dataclasses.dataclass(frozen=True)
class Given:
    """A parsed value, its text if it was typed, and the reason why the text cannot be parsed, if any.

    `parts` are the items of a list, or the values of a mapping in its order, if they were typed.
    """

    value: Any
    text: str | None = None
    problem: str = ""
    parts: tuple[Given, ...] = ()

    def __str__(self) -> str:
        return f"{self.typed} ({kind(self.value)})" if self.typed else "nothing"

    @property
    def typed(self) -> str:
        """The value as typed, shortened to a line's length."""
        typed = str(self.value) if self.text is None else self.text
        return typed if len(typed) <= _LONGEST else f"{typed[:_LONGEST]}… ({len(typed)} characters)"

    def items(self) -> list[Given]:
        """The items of a list, or the values of a mapping."""
        values = self.value.values() if isinstance(self.value, Mapping) else self.value
        return list(self.parts) or [Given(item) for item in values]


def convert(given: Given, hint: object, dotted: str) -> Any:
    """Convert a value to the annotated type (`hint`) of a field; ProfilingConfigError names the field's path, `dotted`."""
    if given.value is None and (type(None) in members(hint) or hint is Any) and given.text in (None, *_NULLS):
        return None
    wanted = [member for member in members(hint) if member is not type(None)]
    if given.problem and given.text is not None:
        if wanted == [str]:
            return given.text
        for choices in map(_choices, wanted):
            if given.text in choices:
                return choices[given.text]
    require(
        not given.problem or hint is Any,
        f"{dotted}={given.typed} cannot be parsed",
        why=f"{given.problem}; expected {describe(hint)}",
        instead=f"Type it in another way, or quote it if it is text: {dotted}='…'",
    )
    require(
        any(map(_is_settable, wanted)),
        f"{dotted} cannot be set by an override",
        why=f"its type is {describe(hint)}, which text cannot express",
        instead="Set it in the recipe's Python code",
    )
    for member in wanted:
        if len(wanted) == 1 or _fits(given.value, member):
            try:
                return _convert_to(given, member, dotted)
            except ValidationError:
                continue
    names = [str(name) for member in members(hint) for name in _choices(member)]
    nearest = difflib.get_close_matches(str(given.value), names, n=1)
    raise ProfilingConfigError(
        f"{dotted}={given.typed} {'is not among its choices' if names else 'has the wrong type'}",
        why=f"expected {describe(hint)}, got {given}",
        instead=f"Type for example {dotted}={nearest[0] if nearest else _example(given.value, hint)}",
    )


def _convert_to(given: Given, member: Any, dotted: str) -> Any:
    """The value as one alternative of a union; raises ValidationError if it does not fit."""
    value, origin = given.value, typing.get_origin(member) or member
    if member is Any:
        return value
    if choices := _choices(member):
        # `no` is a boolean in YAML, and may be one of the names.
        named = given.text is not None and any(given.text == choice for choice in choices)
        return _choose(given.text if named else value, choices)
    if _is_dtype(member):
        dtype = getattr(sys.modules["torch"], str(value).removeprefix("torch."), None)
        if isinstance(dtype, member):
            return dtype
        raise ValidationError
    if origin in _LISTS:
        return _convert_list(given, member, origin, dotted)
    # A text field takes the typed text unchanged: there `007` is text, not the number 7.
    reads_as_text = given.text not in _NULLS and (value is None or isinstance(value, int | float))
    if origin is str and given.text is not None and reads_as_text:
        return given.text
    not_boolean = origin is bool and not isinstance(value, bool | str) and value not in (0, 1)
    if not_boolean or value is None or isinstance(value, list | Mapping) or origin not in _SCALARS:
        raise ValidationError
    if isinstance(value, str) and origin in (int, float, bool) and not value.isascii():
        raise ValidationError  # Python reads digits of every script
    return _SCALARS[origin]().validate_and_convert(value)


def read_scalar(node: yaml.ScalarNode, typed: str) -> Given:
    """A scalar and its text; a problem where YAML reads something else than what is there."""
    tag, quote = node.tag.rpartition(":")[2], node.style
    if "${" in typed:
        return Given(OmegaConf.create({"value": node.value})["value"], typed)
    # Not YAML's own value, which folds lines.
    if quote == "'" and typed[0] == typed[-1] == quote:
        return Given(typed[1:-1].replace("''", "'"), typed)
    if quote == '"' and typed[0] == typed[-1] == quote:
        return Given(yaml.safe_load(typed.replace("\n", "\\n")), typed)
    if quote is not None or node.value != typed or tag == "merge":
        return Given(typed, typed, f"YAML reads only {node.value[:100]!r} of it")
    if _FLOAT.fullmatch(typed):
        number = int(typed) if _INTEGER.fullmatch(typed) else float(typed)
        return Given(number, typed) if abs(number) != math.inf else Given(typed, typed, "it is beyond the largest number")
    value = typed if tag in ("str", "timestamp") else yaml.safe_load(typed)
    is_number = tag in ("int", "float") and any(character.isdigit() for character in typed)
    return Given(typed, typed, f"YAML reads it as the number {value}") if is_number else Given(value, typed)


def _convert_list(given: Given, member: Any, origin: Any, dotted: str) -> Any:
    value = given.value
    hints = typing.get_args(member) or (Any,)
    fixed = origin is tuple and Ellipsis not in hints
    if not isinstance(value, list | tuple) or (fixed and len(hints) != len(value)):
        raise ValidationError
    if not fixed:
        hints = (hints[0],) * len(value)
    try:
        items = [convert(item, hint, dotted) for item, hint in zip(given.items(), hints, strict=True)]
    except ProfilingConfigError:
        raise ValidationError from None
    return tuple(items) if origin is tuple else items


def _choices(member: Any) -> dict[Any, Any]:
    """The values of a Literal or an enum by their names; empty for other types."""
    if typing.get_origin(member) is typing.Literal:
        return {value: value for value in typing.get_args(member)}
    return dict(member.__members__) if isinstance(member, type) and issubclass(member, enum.Enum) else {}


def _choose(value: Any, choices: Mapping[Any, Any]) -> Any:
    for name, choice in choices.items():
        names = (name, f"{type(choice).__name__}.{name}", choice.value) if isinstance(choice, enum.Enum) else (name,)
        # `1 == True` holds in Python, but 1 does not mean Literal[True].
        if any(value == typed and type(value) is type(typed) for typed in names):
            return choice
    raise ValidationError


def _fits(value: Any, member: Any) -> bool:
    """Whether a parsed value already has this type: in a union, `0` is an int and never the text '0'."""
    origin = typing.get_origin(member) or member
    if origin in _LISTS:
        return isinstance(value, list | tuple)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin in (int, bool, str):
        return type(value) is origin
    return _is_settable(member)


def _is_settable(member: Any) -> bool:
    origin = typing.get_origin(member) or member
    return origin in _SCALARS or origin in (*_LISTS, *_MAPPINGS, Any) or _is_dtype(member) or bool(_choices(member))


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, NoneType included, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_mapping(hint: object) -> bool:
    """Whether a field of this type may hold a mapping; its entries are then set as `field.key`."""
    return any((typing.get_origin(member) or member) in _MAPPINGS for member in members(hint))


def _is_dtype(member: Any) -> bool:
    return getattr(member, "__module__", "") == "torch" and getattr(member, "__name__", "") == "dtype"


def _example(value: Any, hint: object) -> str:
    """A value of this type as typed, as near to the given one as possible."""
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
    return str(next(iter(_choices(member)), examples.get(origin, "bfloat16" if _is_dtype(member) else "null")))


def describe(hint: object) -> str:
    """A type's description for the user who types the value."""
    if len(members(hint)) > 1:
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
    """The name of a value's type in YAML terms."""
    return "null" if value is None else type(value).__name__
