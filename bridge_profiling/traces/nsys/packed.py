"""Columns of integers in a half to an eighth of the memory: a report of 1 GB has ten million rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.tables import NULL, Integers

#: Rows that are unpacked at a time.
PART_ROWS = 1 << 17

_Type = np.dtype[np.signedinteger[Any]]

_SMALL: tuple[_Type, ...] = (np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32))
_WHOLE: _Type = np.dtype(np.int64)

#: An array of so many integers grows to its expected length: one that grew in steps would leave freed memory behind.
_LARGE = 1 << 17
_GROWTH = 1 / 8


class Packed:
    """Integers that are appended in parts. Indexing by rows unpacks them.

    Each is kept as its difference from the least of the first part, in the smallest type that fits all; the type's own least
    number stands for NULL. Where 32 bits do not fit, the integers themselves are kept.
    """

    def __init__(self, parts: Iterable[Integers] = (), expected: int = 0) -> None:
        """`expected` is as in `append`."""
        self._kept: NDArray[np.signedinteger[Any]] = np.empty(0, _SMALL[0])
        self._rows = 0
        self._base: int | None = None
        for part in parts:
            self.append(part, expected)

    def __len__(self) -> int:
        return self._rows

    @property
    def kept(self) -> NDArray[np.signedinteger[Any]]:
        """The integers as they are kept: in the same order as their values."""
        return self._kept[: self._rows]

    @property
    def has_values(self) -> bool:
        """Whether one of them is not NULL."""
        return self._base is not None

    def __getitem__(self, rows: slice | Integers) -> Integers:
        return self._unpacked(self.kept[rows])

    def parts(self) -> Iterator[Integers]:
        """The integers, some rows at a time."""
        return (self[begin : begin + PART_ROWS] for begin in range(0, self._rows, PART_ROWS))

    def append(self, values: Integers, expected: int = 0) -> None:
        """Add integers at the end.

        Args:
            expected: about how many there will be in all; where that is unknown, 0 or how many there are so far.
        """
        rows = self._rows + len(values)
        self._make_room(values, rows, expected)
        self._put(slice(self._rows, rows), values)
        self._rows = rows

    def replace(self, rows: Integers, values: Integers) -> None:
        """Set the integers of some rows."""
        self._make_room(values, self._rows)
        self._put(rows, values)

    def select(self, rows: slice | Integers) -> Packed:
        """The integers of some rows, in their order."""
        found = Packed()
        found._kept, found._base = self.kept[rows], self._base
        found._rows = len(found._kept)
        return found

    def _put(self, rows: slice | Integers, values: Integers) -> None:
        if self._kept.dtype == _WHOLE:
            self._kept[rows] = values
            return
        kept = (values - (self._base or 0)).astype(self._kept.dtype)
        if len(values) and values.min() == NULL:
            kept[values == NULL] = np.iinfo(self._kept.dtype).min
        self._kept[rows] = kept

    def _unpacked(self, kept: NDArray[np.signedinteger[Any]]) -> Integers:
        if kept.dtype == _WHOLE:
            return kept
        missing = kept == np.iinfo(kept.dtype).min
        found = kept.astype(np.int64)
        found += self._base or 0
        if missing.any():
            found[missing] = NULL
        return found

    def _make_room(self, values: Integers, rows: int, expected: int = 0) -> None:
        """Make the array long enough for some rows, and its type large enough for some values."""
        needed = max(self._kept.dtype, self._type_of(values))
        if needed != self._kept.dtype:
            wide = self[:] if needed == _WHOLE else self.kept.astype(needed)
            if needed != _WHOLE:
                wide[self.kept == np.iinfo(self._kept.dtype).min] = np.iinfo(needed).min
            self._kept = wide
        if rows > len(self._kept):
            grown = int(rows * (1 + _GROWTH)) if rows < _LARGE or rows > expected else expected
            self._kept.resize(grown, refcheck=False)

    def _type_of(self, values: Integers) -> _Type:
        known = values
        if len(values) and values.min() == NULL:
            known = values[values != NULL]
        if not len(known):
            return _SMALL[0]
        least, most = int(known.min()), int(known.max())
        if self._base is None:
            self._base = least
        fits = (kind for kind in _SMALL if np.iinfo(kind).min < least - self._base and most - self._base <= np.iinfo(kind).max)
        return next(fits, _WHOLE)


def where(values: Packed, holds: Callable[[Integers], NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Which integers meet a condition."""
    return np.concatenate([np.empty(0, bool), *map(holds, values.parts())])


def durations(start: Packed, end: Packed) -> Packed:
    """Ends less starts; NULL where one of them is."""
    pairs = zip(start.parts(), end.parts(), strict=True)
    return Packed((difference(begin, last) for begin, last in pairs), len(start))


def difference(start: Integers, end: Integers) -> Integers:
    """End less start; NULL where one of them is, and -1 where it is negative: times of damaged rows exceed 64 bits together."""
    return np.where((start == NULL) | (end == NULL), NULL, np.where(end < start, -1, end - start))
