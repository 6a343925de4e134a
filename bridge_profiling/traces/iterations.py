"""The iterations of one rank: ranges number them, or else they lie between the steps of its optimizers. Reads no files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.layout import number_ranges
from bridge_profiling.traces.joins import FEW, places
from bridge_profiling.traces.tables import NULL, Integers, build
from bridge_profiling.traces.types import Caveat, caveat

#: Iterations as profilers and Megatron name them; where there are none, as other loops do.
_NUMBERED = (
    re.compile(r"(?:ProfilerStep\s*#|iteration[_ #-]?)\s?(\d{1,18})$", re.IGNORECASE),
    re.compile(r"(?:train(?:ing)?[_ -])?(?:iter|step)[_ #:-]?\s?(\d{1,18})$", re.IGNORECASE),
)
_MAX_ITERATION = (1 << 31) - 1

#: Iterations that take less of the time from the first to the last are not the loop's, but marks without a length.
_SMALLEST_SHARE = 0.001

#: Profilers that write whole microseconds round starts and durations apart.
_ROUNDED_NS = 1_000

#: torch opens these ranges for every optimizer, whether or not the loop calls the profiler's `step`. A compiled step has none.
_LAST = ("Optimizer.step#", "Optimizer.zero_grad#")

#: Two iterations launch about as much work as one another: a larger share of difference has another reason.
_ALIKE = 0.1

#: Several steps make one iteration if that leaves this share of the differences between single steps.
_BETTER = 0.25

#: An optimizer for each parameter, which steps in the backward pass, steps so often in an iteration.
_MOST_STEPS = 1024


@dataclass(frozen=True)
class Iterations:
    """One rank's iterations as ranges of the host's time, ascending, and the rows of ranges that they were made from."""

    number: Integers
    start_ns: Integers
    end_ns: Integers
    rows: Integers

    def containing(self, time_ns: Integers) -> Integers:
        """Number of the iteration that contains each time; NULL where none does."""
        if not len(self.number):
            return np.full(len(time_ns), NULL)
        place = places(self.start_ns, time_ns, "right") - 1
        inside = (place >= 0) & (time_ns <= self.end_ns[np.maximum(place, 0)])
        return np.where(inside, self.number[np.maximum(place, 0)], NULL)

    def overlapping(self, start_ns: Integers, end_ns: Integers) -> NDArray[np.bool_]:
        """Which iterations overlap any of a few spans of time."""
        found = np.zeros(len(self.number), bool)
        for start, end in zip(start_ns.tolist(), end_ns.tolist(), strict=True):
            found |= (self.start_ns < end) & (start < self.end_ns)
        return found

    def complete(self, launched_ns: Integers, unrecorded_ns: Integers) -> tuple[Iterations, list[Caveat], int]:
        """Those whose kernels were recorded, a caveat about the others, and how many launched kernels are missing otherwise.

        What was not recorded is not idle: what the device did in the others is unknown.

        Args:
            launched_ns: when kernels were launched, ascending.
            unrecorded_ns: those of them of which there is no record, ascending.
        """
        launched, missing = (
            places(times, self.end_ns, "right") - places(times, self.start_ns) for times in (launched_ns, unrecorded_ns)
        )
        whole = missing <= FEW * launched
        if whole.all() or not whole.any():
            return self, [], len(unrecorded_ns)
        lost = caveat(
            "kernels_unrecorded",
            numbers=number_ranges(self.number[~whole].tolist()),
            missing=int(missing[~whole].sum()),
            launched=int(launched[~whole].sum()),
        )
        rows = self.rows[whole] if len(self.rows) else self.rows
        kept = Iterations(self.number[whole], self.start_ns[whole], self.end_ns[whole], rows)
        return kept, [lost], len(unrecorded_ns) - int(missing[~whole].sum())

    def table(self, rank: int, boundary: NDArray[np.bool_], base_ns: int = 0) -> pa.Table:
        """The table `iterations`."""
        columns = {"iteration": self.number, "start_ns": self.start_ns, "end_ns": self.end_ns, "boundary": boundary}
        return build("iterations", rank, columns, base_ns)


NO_ITERATIONS = Iterations(*[np.empty(0, np.int64)] * 4)


def can_mark(name: str) -> bool:
    """Whether `find_iterations` reads ranges of that name."""
    return name.startswith(_LAST) or any(pattern.match(name) for pattern in _NUMBERED)


def find_iterations(
    names: Sequence[str], name: NDArray[np.int32], start_ns: Integers, end_ns: Integers, launched_ns: Integers, begin_ns: int
) -> tuple[Iterations, list[Caveat]]:
    """The iterations that ranges number; where none does, those that end with a step of the optimizer.

    None, and a caveat, where ranges number them and have no usable length.

    Ranges that number micro-batches make one iteration up to each that has a step of the optimizer.

    Args:
        names: of ranges.
        name: index of `names` by range, by start.
        start_ns: of the ranges.
        end_ns: of the ranges.
        launched_ns: when kernels were launched, ascending: they show whether iterations are whole.
        begin_ns: when the capture began.

    Raises:
        ValueError: a later iteration has a smaller number.
    """
    of_profilers, of_loops = _NUMBERED
    number = _numbers(of_profilers, names, name)
    if not (number != NULL).any():
        number = _numbers(of_loops, names, name)
        # Steps that begin again are those inside of an iteration, such as a sampler's.
        if (np.diff(number[number != NULL]) < 0).any():
            number[:] = NULL
    if (number != NULL).any():
        found, caveats = _numbered(number, start_ns, end_ns)
        if not len(found.number):
            return found, caveats
        steps_ns = start_ns[_rows_of(_LAST[0], names, name)]
        # Places of the iterations that have a step of the optimizer.
        ends = np.unique(places(found.start_ns, steps_ns[found.containing(steps_ns) != NULL], "right") - 1)
        together = _micro_batches(ends, found.number)
        if together > 1:
            return _joined(found, ends, together), [*caveats, caveat("micro_batches_numbered", count=together)]
        return found, caveats
    for last in _LAST:
        rows = _rows_of(last, names, name)
        # Of optimizers around optimizers, the outer one's.
        rows = rows[start_ns[rows] >= np.maximum.accumulate(np.append(begin_ns, end_ns[rows]))[:-1]]
        found = _between(rows, name[rows], end_ns[rows], launched_ns, begin_ns)
        if len(found.number):
            return found, [caveat("iterations_inferred.optimizer", name=names[name[found.rows[0]]])]
    return NO_ITERATIONS, []


def _numbers(pattern: re.Pattern[str], names: Sequence[str], name: NDArray[np.int32]) -> Integers:
    """The iteration that each range's name gives; NULL for other ranges, and for times of day."""
    found = [NULL if match is None else int(match[1]) for match in map(pattern.match, names)]
    numbers = np.array([number if number <= _MAX_ITERATION else NULL for number in found], np.int64)
    return numbers[name] if len(name) else np.empty(0, np.int64)


def _numbered(number: Integers, start_ns: Integers, end_ns: Integers) -> tuple[Iterations, list[Caveat]]:
    marked = np.flatnonzero(number != NULL)
    length_ns, span_ns = end_ns[marked] - start_ns[marked], int(np.ptp(start_ns[marked]))
    usable = marked[(length_ns > 0) & (length_ns.sum() >= _SMALLEST_SHARE * span_ns)]
    caveats = []
    if short := len(marked) - len(usable):
        caveats.append(caveat("iterations_unusable", short=short, marked=len(marked)))
    # The same range can be on several threads; the first is the loop's.
    _, first, place = np.unique(number[usable], return_index=True, return_inverse=True)
    if repeated := len(np.unique(place[start_ns[usable] > end_ns[usable[first]][place]])):
        caveats.append(caveat("iterations_repeated", repeated=repeated))
    rows = np.sort(usable[first])
    found = Iterations(number[rows], start_ns[rows], end_ns[rows], rows)
    if (np.diff(found.number) < 0).any():
        raise ValueError("its iterations do not follow one another in time: the clock went backwards")
    if (found.end_ns[:-1] - found.start_ns[1:] > _ROUNDED_NS).any():
        caveats.append(caveat("iterations_overlap"))
    return found, caveats


def _rows_of(prefix: str, names: Sequence[str], name: NDArray[np.int32]) -> Integers:
    """The ranges whose name begins so."""
    return np.flatnonzero(np.isin(name, [code for code, each in enumerate(names) if each.startswith(prefix)]))


def _micro_batches(ends: Integers, number: Integers) -> int:
    """How many numbered ranges make an iteration: those that end one, with a step of the optimizer, are as many apart.

    A single one shows it if it is the last, and if the numbers end with a multiple of how many there are.
    """
    if not len(ends):
        return 1
    apart = np.diff(ends)
    if not len(apart):
        count = int(ends[0]) + 1
        return count if count == len(number) and (number[-1] + 1) % count == 0 else 1
    count = int(apart[0])
    # An iteration without a step, such as one whose gradients overflowed, is none of these.
    complete = ends[0] < count and len(number) - 1 - ends[-1] < count
    return count if complete and (apart == count).all() else 1


def _joined(found: Iterations, ends: Integers, count: int) -> Iterations:
    """One iteration for each `count` ranges up to one that ends it; others, at either end, are in none."""
    last = ends[ends >= count - 1]
    number = found.number[last] // count
    return Iterations(number, found.start_ns[last - count + 1], found.end_ns[last], found.rows[last])


def _between(
    rows: Integers, optimizer: NDArray[np.int32], end_ns: Integers, launched_ns: Integers, begin_ns: int
) -> Iterations:
    """Iterations of equal numbers of ranges. One range alone does not tell where its iteration begins."""
    edges = np.append(begin_ns, end_ns)
    launches = np.diff(places(launched_ns, edges))
    steps = _steps_of_iteration(optimizer, launches) if len(rows) > 1 else len(rows) + 1
    last = np.arange(steps - 1, len(rows), steps)
    first = 0
    if len(last) > 1:
        total = np.add.reduceat(launches[: last[-1] + 1], last - steps + 1)
        # The capture may begin inside of an iteration, or with what comes before the first. Without launches, nothing shows it.
        whole = (1 - _ALIKE) * total[1:].min() <= total[0] <= (1 + _ALIKE) * total[1:].max()
        first = int(not whole or not total.any())
    number, last = np.arange(first, len(last)), last[first:]
    return Iterations(number, edges[last - steps + 1], edges[last + 1], rows[last])


def _steps_of_iteration(optimizer: NDArray[np.int32], launches: Integers) -> int:
    """How many steps make an iteration: after so many the optimizers repeat, and what is launched between their steps does.

    More than there are if they do not repeat.
    """
    found, one = len(optimizer) + 1, np.inf
    for steps in range(1, min(len(optimizer) // 2, _MOST_STEPS) + 1):
        if (optimizer[steps:] != optimizer[:-steps]).any():
            continue
        # The first may have begun before the capture.
        before, after = launches[1 : len(launches) - steps], launches[1 + steps :]
        differs = float(np.mean(np.abs(after - before) / np.maximum(np.maximum(after, before), 1))) if len(after) else 0.0
        if found > len(optimizer):
            found, one = steps, differs
            if one <= _ALIKE:
                break
        elif len(after) >= steps and differs < _BETTER * one:
            return steps
    return found
