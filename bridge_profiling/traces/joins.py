"""Joins that every profiler's events need: a device event to its launch, and an event to its iteration. Reads no files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

#: Stands for null in integer columns.
NULL = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Iterations:
    """The host ranges of one rank's iterations, ascending and apart.

    Args:
        number: iteration numbers.
        start_ns: where each begins.
        end_ns: where each ends.
    """

    number: Integers
    start_ns: Integers
    end_ns: Integers

    def containing(self, time_ns: Integers) -> Integers:
        """Number of the iteration that contains each time; NULL where none does."""
        if not len(self.number):
            return np.full(len(time_ns), NULL)
        place = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        inside = (place >= 0) & (time_ns <= self.end_ns[np.maximum(place, 0)])
        return np.where(inside, self.number[np.maximum(place, 0)], NULL)


def rows_by_key(keys: Integers, wanted: Integers) -> Integers:
    """The first row that has each wanted key; -1 where none has it, or where the wanted key is NULL or 0.

    Correlations are such keys. CUPTI gives 0 to what has none.

    Args:
        keys: a key per row; NULL for none.
        wanted: keys to look up.
    """
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    ascending = keys[order]
    place = np.minimum(np.searchsorted(ascending, wanted), len(keys) - 1)
    found = (ascending[place] == wanted) & (wanted != NULL) & (wanted != 0)
    return np.where(found, order[place], -1)


def taken(values: Integers, rows: Integers) -> Integers:
    """`values[rows]`, NULL where a row is -1."""
    if not len(values):
        return np.full(len(rows), NULL)
    return np.where(rows >= 0, values[np.maximum(rows, 0)], NULL)


def sequence_in_group(group: Integers, order_key: Integers) -> Integers:
    """Position of each row among the rows of its group, from 0, in the order of a key.

    Args:
        group: number of each row's group.
        order_key: what a group's rows are ordered by; ties keep the rows' order.
    """
    order = np.lexsort((order_key, group))
    ordered = group[order]
    first = np.ones(len(group), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    begins = np.flatnonzero(first)
    position = np.arange(len(group)) - np.repeat(begins, np.diff(np.append(begins, len(group))))
    sequence = np.empty(len(group), dtype=np.int64)
    sequence[order] = position
    return sequence
