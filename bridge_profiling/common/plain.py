"""Values of a training as plain ones: numbers, names and facts that NumPy, torch or a framework made. Standard library only.

A training passes what it has: a NumPy number, a tensor, a path, an object of its own. JSON, Kineto and Prometheus take none of
them, and an error there would cost a capture.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import unicodedata
from collections.abc import Mapping, Set

from bridge_profiling.common.errors import contained, is_contained, text_of
from bridge_profiling.common.printable import printable

#: Longer names are cut: no viewer shows them, and Kineto copies a range's name into every event.
_MAX_NAME = 1000

#: Larger arrays do not belong in a manifest.
_MAX_ITEMS = 10_000

#: Deeper structures contain themselves, or JSON readers refuse them.
_MAX_DEPTH = 20

#: Kineto writes names into JSON unescaped in some releases, and drops backslashes in others.
_UNSAFE = {ord('"'): "'", ord("\\"): "/", 0x7F: " ", **dict.fromkeys(range(0x20), " ")}


def whole_number(value: object) -> int:
    """An integer of 64 bits from any type of number; raises ValueError for everything else."""
    number: int | None = None
    with contained():
        number = operator.index(value)  # type: ignore[arg-type]
    if number is None and not isinstance(value, str | bytes | bytearray):
        with contained():
            number = int(exact) if (exact := float(value)).is_integer() else None
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{shown(value)} is not a whole number of at most 64 bits")
    return number


def safe_name(value: object) -> str:
    """A name that every format can hold: ASCII without quotes, backslashes and control characters.

    Accents are left out, and other characters become `U+0436`: Kineto calls a range with one of them `unknown`.
    """
    text = (value if type(value) is str else text_of(value, _MAX_NAME))[:_MAX_NAME].translate(_UNSAFE)
    if text.isascii():
        return text
    decomposed = (one for one in unicodedata.normalize("NFKD", text) if not unicodedata.combining(one))
    return "".join(one if one.isascii() else f"U+{ord(one):04X}" for one in decomposed)[:_MAX_NAME]


def whole_text(value: object) -> str:
    """Text without halves of characters, which no file and no network protocol can hold."""
    text = value if type(value) is str else text_of(value, _MAX_NAME)
    return text if text.isascii() else text.encode(errors="replace").decode()


def is_set(value: object) -> bool:
    """Whether a flag is on. Text is not, nor is a value without a truth, such as a tensor of several elements."""
    with contained():
        return not isinstance(value, str) and bool(value)
    return False


def shown(value: object) -> str:
    """The beginning of a value's text, on one line and without what a terminal or a log file cannot hold."""
    return printable(text_of(value, 100))


def plain(value: object, depth: int = 0) -> object:
    """The value in types that JSON has; a NumPy number or a tensor as a number, a path or another object as its text.

    Numbers that JSON lacks (NaN, infinity, integers of thousands of digits) become text.
    """
    try:
        return _plain(value, depth + 1)
    except BaseException as error:
        if not is_contained(error):
            raise
        # Another thread may change it, and any method of a class of the user's may raise or exit.
        return text_of(value)


def _plain(value: object, depth: int) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if -(1 << 1000) < value < 1 << 1000 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {key if type(key) is str else text_of(key): plain(item, depth) for key, item in dict(value).items()}
    if isinstance(value, list | tuple | Set):
        return [plain(item, depth) for item in list(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), depth) for field in dataclasses.fields(value)}
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    size = getattr(value, "numel", None) or getattr(value, "size", None)
    items = size() if callable(size) else size
    if isinstance(items, int) and items <= _MAX_ITEMS and hasattr(value, "tolist"):
        return plain(value.tolist(), depth)
    return text_of(value)


def setting(value: object) -> object:
    """A value for a setting: NumPy's numbers and arrays as Python's, and paths as text, also in a list; else itself."""
    if isinstance(value, list | tuple):
        return [setting(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        with contained():
            return value.tolist()
    return value
