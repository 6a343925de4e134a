"""Lists of JSON values as numpy columns: numbered names, integers, exact nanoseconds."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal, DecimalException
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.tables import NULL, Integers

#: Below it, consecutive floats are less than 1 ns apart, so each time in µs with three decimals has its own float.
_EXACT_BELOW_US = float(1 << 43)

#: Later starts, with a base, would overflow 64 bits of nanoseconds: the year 2096. No event is longer than a day.
_MAX_START_US, _MAX_DURATION_US = 4e15, 1e11
_MAX_INTEGER = (1 << 63) - 1
_MAX_EXPONENT = 18

#: Values that are not all numbers.
_NOT_ALL = (TypeError, ValueError, OverflowError)

_DIGITS = re.compile(r"\d+")


class InexactTimes(Exception):
    """Times of this file have more digits than a float holds: it must be read with `exact=True`."""


class _Numbered(dict[Any, int]):
    """Numbers each key that is looked up, in order of appearance; texts count by their first `longest` characters."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self._longest = longest

    def __missing__(self, value: Any) -> int:
        if isinstance(value, str) and len(value) > self._longest:
            return self[value[: self._longest]]
        return self.setdefault(value, len(self))


class Codes:
    """Values numbered in order of appearance: `values` has each value's number. Texts are cut to `longest` characters."""

    def __init__(self, longest: int = sys.maxsize) -> None:
        self.values: dict[Any, int] = _Numbered(longest)

    def encode(self, values: Sequence[Hashable]) -> NDArray[np.int32]:
        """The number of each value."""
        if values and values[0] is None and values.count(None) == len(values):  # such as stacks that were not recorded
            return np.full(len(values), self.values[None], np.int32)
        return np.fromiter(map(self.values.__getitem__, values), np.int32, len(values))


class Names:
    """The file's names, and what each says, determined once per name."""

    def __init__(self, names: list[str]) -> None:
        self.all = names

    def say(self, codes: NDArray[np.int32], what: Callable[[str], Any]) -> tuple[list[Any], NDArray[np.int32]]:
        """`what` of the names that a column uses, and each row's place among them."""
        used = np.flatnonzero(np.bincount(codes, minlength=len(self.all))) if len(codes) else np.empty(0, np.int64)
        place = np.zeros(len(self.all), np.int32)
        place[used] = np.arange(len(used))
        return [what(self.all[code]) for code in used.tolist()], place[codes]

    def which(self, codes: NDArray[np.int32], what: Callable[[str], bool]) -> NDArray[np.bool_]:
        """The rows of a column for whose name `what` is true."""
        said, place = self.say(codes, what)
        return np.array(said, bool)[place]


def _array(values: Sequence[Any], kind: type[np.int64 | np.float64]) -> NDArray[Any]:
    """Numbers as an array.

    Raises:
        TypeError: or another one of `_NOT_ALL`: some are not numbers.
    """
    found = np.empty(len(values), kind)
    try:
        struct.pack_into(f"{len(values)}{found.dtype.char}", found, 0, *values)  # half the time of `fromiter`
    except struct.error:
        return np.fromiter(values, kind, len(values))
    return found


class Identifiers:
    """Numbers of threads, processes and streams, which some versions write as text: 17, "17", "stream 17"."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, values: Sequence[Any]) -> Integers:
        """The number in each value. NULL stands for None, and a negative number of its own for each text without digits."""
        try:
            return _array(values, np.int64)
        except _NOT_ALL:
            return np.fromiter(map(self._number, values), np.int64, len(values))

    def _number(self, value: Any) -> int:
        if isinstance(value, int) and abs(value) <= _MAX_INTEGER:
            return value
        if value is None:
            return NULL
        text = str(value)
        if text not in self._known:
            found = _DIGITS.search(text)
            number = integer(found[0]) if found else NULL
            self._known[text] = -1 - len(self._known) if number == NULL else number
        return self._known[text]


def integers(values: list[Any]) -> Integers:
    """Values as integers; NULL where one is missing or not an integer."""
    try:
        return _array(values, np.int64)
    except _NOT_ALL:
        return np.fromiter(map(integer, values), np.int64, len(values))


def integer(value: Any) -> int:
    """The integer that a value is or spells; NULL for anything else, booleans too, and beyond 64 bits."""
    if isinstance(value, bool):
        return NULL
    try:
        number = int(value, 0) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        return NULL
    return number if abs(number) <= _MAX_INTEGER else NULL


def starts_ns(values: list[Any], *, exact: bool) -> Integers:
    """Times in microseconds (as JSON text when `exact`) as nanoseconds; NULL where one is not a time.

    Raises:
        InexactTimes: there are floats too large to be exact.
    """
    if exact:
        return _exactly(values, _MAX_START_US)
    try:
        microseconds = _array(values, np.float64)
    except _NOT_ALL:
        if any(isinstance(value, float) and abs(value) >= _EXACT_BELOW_US for value in values):
            raise InexactTimes from None
        return _exactly(values, _MAX_START_US)
    if not len(values) or np.abs(microseconds).max() < _EXACT_BELOW_US:
        return _nanoseconds(microseconds, _MAX_START_US)
    if set(map(type, values)) != {int}:
        raise InexactTimes
    return _exactly(values, _MAX_START_US)


def durations_ns(values: list[Any]) -> Integers:
    """Durations in microseconds as nanoseconds; NULL where one is not a duration."""
    try:
        return _nanoseconds(_array(values, np.float64), _MAX_DURATION_US)
    except _NOT_ALL:
        return _exactly(values, _MAX_DURATION_US)


def _nanoseconds(microseconds: NDArray[np.float64], limit: float) -> Integers:
    usable = np.abs(microseconds) < limit  # false for NaN
    if not usable.all():
        microseconds = np.where(usable, microseconds, 0.0)
    whole = np.floor(microseconds)
    nanoseconds = whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
    return nanoseconds if usable.all() else np.where(usable, nanoseconds, NULL)


def _exactly(values: list[Any], limit: float) -> Integers:
    def nanoseconds(value: Any) -> int:
        try:
            found = exact_ns(value)
        except (TypeError, ValueError):
            return NULL
        return found if abs(found) < limit * 1000 else NULL

    return np.fromiter(map(nanoseconds, values), np.int64, len(values))


def exact_ns(microseconds: object) -> int:
    """Nanoseconds of a decimal number of microseconds or its text, in quotes or not, without a float's rounding.

    Raises:
        ValueError: it is not a number.
    """
    if type(microseconds) is int:
        return microseconds * 1000
    text = bytes(microseconds).decode() if isinstance(microseconds, (msgspec.Raw, bytes)) else str(microseconds)
    whole, _, fraction = text.partition(".")
    if len(fraction) <= 3 and (not fraction or fraction.isdecimal()) and whole.isdecimal() and len(whole) <= _MAX_EXPONENT:
        return int(whole + fraction.ljust(3, "0"))
    try:
        number = Decimal(text.strip('"'))
        if number.adjusted() > _MAX_EXPONENT:  # 1e999990 as an integer takes 25 s
            raise ValueError(f"{text[:50]} is not a time")
        return int((number * 1000).to_integral_value())
    except (DecimalException, ValueError, OverflowError) as error:
        raise ValueError(f"{text[:50]} is not a time") from error
