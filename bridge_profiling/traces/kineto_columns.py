"""Lists of JSON values as numpy columns: numbered names, integers, exact nanoseconds. Knows nothing of what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.kineto_events import AnyEvent, exact_ns
from bridge_profiling.traces.tables import NULL, Integers

#: Below it, consecutive floats are less than 1 ns apart, so every time in µs with three decimals is a float of its own.
_EXACT_BELOW_US = float(1 << 43)

#: Longer ones, with a base, would overflow 64 bits of nanoseconds; they are the year 2096, and 31 years.
_MAX_START_US, _MAX_DURATION_US = 4e15, 1e15
_MAX_INTEGER = (1 << 63) - 1

_FIRST_ROWS = 1 << 12

_DIGITS = re.compile(r"\d+")


class InexactTimes(Exception):
    """Times of this file have more digits than a float holds: it must be read with `exact=True`."""


class Codes:
    """Values numbered in the order in which they come.

    Attributes:
        values: each value's number.
    """

    def __init__(self) -> None:
        self.values: dict[Any, int] = {}

    def encode(self, values: Sequence[Hashable]) -> NDArray[np.int32]:
        """The number of each value."""
        known = self.values
        try:
            return np.fromiter(map(known.__getitem__, values), np.int32, len(values))
        except KeyError:
            for value in values:
                known.setdefault(value, len(known))
            return np.fromiter(map(known.__getitem__, values), np.int32, len(values))


class Columns:
    """Columns of one kind of events, growing piece by piece.

    Each is one array that grows in place: many small ones would leave the heap in holes when they are put together, and half
    of what reading a file costs in memory would be holes.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}
        self._rows = 0

    def add(self, **columns: NDArray[Any]) -> None:
        """Append one piece of every column."""
        first = self._rows
        for name, values in columns.items():
            self._rows = first + len(values)
            if name not in self._buffers:
                self._buffers[name] = np.empty(max(_FIRST_ROWS, self._rows), values.dtype)
            buffer = self._buffers[name]
            if len(buffer) < self._rows:
                buffer.resize(max(len(buffer) * 5 // 4, self._rows), refcheck=False)
            buffer[first : self._rows] = values

    def take(self, name: str, rows: NDArray[Any] | slice = slice(None)) -> NDArray[Any]:
        """One column's rows, in the order given. The column is gone then: columns are most of what reading a file costs."""
        buffer = self._buffers.pop(name, None)
        return np.empty(0, np.int64)[rows] if buffer is None else buffer[: self._rows][rows]

    def __len__(self) -> int:
        return self._rows


class Identifiers:
    """Numbers of threads, processes and streams, which some versions write as text: 17, "17", "stream 17"."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, values: Sequence[Any]) -> Integers:
        """The number in each value; NULL where there is none, and negative ones, all different, for texts without a number."""
        try:
            return np.fromiter(values, np.int64, len(values))
        except (TypeError, ValueError, OverflowError):
            return np.fromiter(map(self._number, values), np.int64, len(values))

    def _number(self, value: Any) -> int:
        if isinstance(value, int) and abs(value) <= _MAX_INTEGER:
            return value
        if value is None:
            return NULL
        text = str(value)
        if text not in self._known:
            found = _DIGITS.search(text)
            number = int(found[0]) if found else -1 - len(self._known)
            self._known[text] = number if number <= _MAX_INTEGER else -1 - len(self._known)
        return self._known[text]


def integers(values: Iterable[Any], count: int, *, again: Callable[[], Iterable[Any]]) -> Integers:
    """A column of integers; NULL for what is none.

    Args:
        values: mostly integers, or numbers as text.
        count: how many.
        again: gives the values once more.
    """
    try:
        return np.fromiter(values, np.int64, count)
    except (TypeError, ValueError, OverflowError):
        return np.fromiter(map(integer, again()), np.int64, count)


def arguments(args: Sequence[Any], name: str) -> Integers:
    """One argument of every event as integers; NULL where it is missing or none."""
    getter = attrgetter(name)
    return integers(map(getter, args), len(args), again=lambda: map(getter, args))


def integer(value: Any) -> int:
    """The integer that a value is or spells; NULL when it is none, or beyond 64 bits."""
    try:
        number = int(value, 0) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        return NULL
    return number if abs(number) <= _MAX_INTEGER else NULL


def times_ns(events: Sequence[AnyEvent], *, exact: bool) -> tuple[Integers, Integers]:
    """Start and duration of every event, in nanoseconds; NULL where a time is none.

    Args:
        events: events that have a duration.
        exact: whether their starts are text.

    Raises:
        InexactTimes: starts are floats too large to be exact.
    """
    durations = _durations_ns([event.dur for event in events])
    starts: list[Any] = [event.ts for event in events]
    return (exact_starts_ns(starts) if exact else starts_ns(starts)), durations


def starts_ns(values: list[Any]) -> Integers:
    """Times in microseconds, integers or floats, as nanoseconds; NULL where one is none.

    Raises:
        InexactTimes: there are floats too large to be exact.
    """
    try:
        microseconds = np.fromiter(values, np.float64, len(values))
    except (TypeError, ValueError, OverflowError):
        if any(isinstance(value, float) and abs(value) >= _EXACT_BELOW_US for value in values):
            raise InexactTimes from None
        return exact_starts_ns(values)
    if not len(values) or np.abs(microseconds).max() < _EXACT_BELOW_US:
        return _nanoseconds(microseconds, _MAX_START_US)
    if set(map(type, values)) != {int}:
        raise InexactTimes
    return exact_starts_ns(values)


def exact_starts_ns(values: list[Any]) -> Integers:
    """Times in microseconds, as integers or text, as nanoseconds; NULL where one is none."""
    return np.fromiter((_exact_ns(value, _MAX_START_US) for value in values), np.int64, len(values))


def _durations_ns(values: list[Any]) -> Integers:
    try:
        return _nanoseconds(np.fromiter(values, np.float64, len(values)), _MAX_DURATION_US)
    except (TypeError, ValueError, OverflowError):
        return np.fromiter((_exact_ns(value, _MAX_DURATION_US) for value in values), np.int64, len(values))


def _nanoseconds(microseconds: NDArray[np.float64], limit: float) -> Integers:
    usable = np.abs(microseconds) < limit  # false for NaN
    if not usable.all():
        microseconds = np.where(usable, microseconds, 0.0)
    whole = np.floor(microseconds)
    nanoseconds = whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
    return nanoseconds if usable.all() else np.where(usable, nanoseconds, NULL)


def _exact_ns(value: Any, limit: float) -> int:
    try:
        nanoseconds = exact_ns(value)
    except (TypeError, ValueError):
        return NULL
    return nanoseconds if abs(nanoseconds) < limit * 1000 else NULL
