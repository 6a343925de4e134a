"""The iterations of a rank that has no ranges of them, from the period in which its kernels repeat. Reads no files.

In most loops each iteration launches the same kernels. Those that run once an iteration, such as the loss, are equally far
apart, counted in kernels. Those of layers are not: forward, backward and optimizer lie between the last layer and the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.iterations import NO_ITERATIONS, Iterations
from bridge_profiling.traces.joins import DeviceTimes, distinct, places, taken, waits_for_device
from bridge_profiling.traces.tables import NULL, Integers
from bridge_profiling.traces.types import Caveat, caveat

#: Kernels of optimizers. Where there are none, those that visit many parameters at once: optimizers do, also compiled ones.
_OPTIMIZERS = (
    re.compile(r"adam|sgd|lamb(?!da)|adagrad|rmsprop|optimizer|addcdiv", re.IGNORECASE),
    re.compile(r"multi_?tensor|foreach|triton_for_fused", re.IGNORECASE),
)

#: Periods differ by at most this share of their kernels, and by this share in the kernels of each name.
_EQUAL, _ALIKE = 0.03, 0.1

#: Shares of kernels that have the name of the one a period later: with fewer, two distances are equal by chance; with so
#: many, one name shows the period.
_REPEATED, _ALL_REPEATED = 0.6, 0.95

#: Names that must agree on a period otherwise, and distances that are not equal by chance.
_NAMES, _DISTANCES = 3, 3

#: Share of the kernels that whole periods hold: programs initialize before them. Layers of one pass hold less.
_COVERED = 0.7

#: Layers have fewer kernels, and parameters of an optimizer that updates one after the other.
_LARGE, _LEAST = 64, 4

#: Names that are looked at, candidates, those of most names, and pairs of consecutive periods that are compared.
_MOST_NAMES, _CANDIDATES, _COMPARED = 1024, 16, 32


def find_periods(
    work: DeviceTimes,
    names: Sequence[str],
    name: NDArray[np.int32],
    compute: NDArray[np.bool_],
    copied: NDArray[np.bool_],
    begin_ns: int,
) -> tuple[Iterations, list[Caveat]]:
    """Iterations that end with the launch of a period's last kernel; none where kernels do not repeat.

    About 40 bytes a kernel are held meanwhile.

    Args:
        work: on the device.
        names: of device events.
        name: index of `names` by device event, by start.
        compute: which of them are kernels that compute.
        copied: which of them copy from or to the host.
        begin_ns: when the capture of the host began.
    """
    launches = work.launches
    rows = _of_busiest_stream(np.flatnonzero(compute & (launches.issued_ns != NULL)), (work.device, work.stream))
    sequence = name[rows]
    launched_ns = work.launched_ns(rows)
    # The host meets the device where it waits for it, or copies.
    waits_ns, copies_ns = (
        work.call_start_ns[work.calls_named(waits_for_device)],
        taken(work.call_start_ns, launches.row[copied]),
    )
    meetings_ns = np.sort(np.concatenate((waits_ns, copies_ns)))
    if not (launches.row[rows] >= 0).any():  # of the host, nothing is known
        begin_ns = int(launches.issued_ns[rows[:1]].sum())
    found = list(_periods(sequence, names))
    # Forward and backward passes of one iteration repeat too. An optimizer shows that it is one; without, it is the longest.
    for kernels, ends, has_optimizer in found if found and found[0][2] else found[::-1]:
        ends_ns = launched_ns[ends]
        met = np.diff(places(meetings_ns, ends_ns))
        signs = (has_optimizer, kernels >= _LARGE, len(met) > 0 and met.min() > 0)
        if sum(signs) < 2 or (np.diff(ends_ns, prepend=begin_ns) <= 0).any():
            continue
        # The capture may begin inside of an iteration, or with what comes before the first.
        first = int(abs(ends[0] + 1 - kernels) > _ALIKE * kernels)
        edges = np.append(begin_ns, ends_ns)[first:]
        number = np.arange(first, len(ends_ns))
        if len(number) < 2:
            continue
        inferred = caveat("iterations_inferred.period", kernels=kernels)
        return Iterations(number, edges[:-1], edges[1:], np.empty(0, np.int64)), [inferred]
    return NO_ITERATIONS, []


def _of_busiest_stream(rows: Integers, streams: Sequence[Integers]) -> Integers:
    """Those of the stream with most kernels: they run in the order of their launches."""
    for numbers in streams:
        used, place = distinct(numbers[rows])
        if len(used) > 1:
            rows = rows[place == np.bincount(place).argmax()]
    return rows


def _periods(sequence: NDArray[np.int32], names: Sequence[str]) -> Iterator[tuple[float, Integers, bool]]:
    """Candidates, the shortest first.

    Iterations of so many kernels of one stream, and the places of their last ones, of which the first can be partial; and
    whether kernels of an optimizer are known, of which each iteration has as many.
    """
    size = len(sequence)
    if size < 2 * _LEAST:
        return
    order, begins, ends, distance = _at_equal_distance(sequence)
    optimizer: Integers | None = None
    for same in _agreeing(distance):
        kernels = float(np.median(distance[same]))
        earliest = same.start + int(np.argmin(order[begins[same]]))
        anchors = order[begins[earliest] : ends[earliest] + 1].astype(np.int64)
        before = max(0, int(anchors[0] - kernels))
        if size - before < (2 - _EQUAL) * kernels:
            continue
        sure = same.stop - same.start >= _NAMES and len(anchors) > _DISTANCES
        repeated = 1.0 if sure else _share_repeated(sequence[before:], round(kernels))
        if same.stop - same.start < _NAMES and repeated < _ALL_REPEATED:
            continue
        if _difference(sequence, np.concatenate(([before], anchors, [size])), kernels) > _ALIKE:
            continue
        if optimizer is None:
            optimizer = _of_optimizer(sequence, names)
        counts = np.diff(places(optimizer, anchors))
        if len(optimizer) and (counts.min() < (1 - _ALIKE) * counts.max() or not counts.min()):
            continue
        iteration_ends = _iteration_ends(sequence, anchors, kernels, optimizer, repeated=repeated >= _REPEATED)
        if len(iteration_ends):
            yield kernels, iteration_ends, len(optimizer) > 0


def _iteration_ends(
    sequence: NDArray[np.int32], anchors: Integers, kernels: float, optimizer: Integers, *, repeated: bool
) -> Integers:
    """Places of the last kernels of iterations; none where nothing shows them for sure."""
    size = len(sequence)
    stepped = _steps(optimizer, int(anchors[0] - (1 + _EQUAL) * kernels), kernels)
    if len(stepped):
        to_end = _moved_to_end(sequence, stepped)
        if max(abs(to_end[0] + 1 - kernels), size - 1 - to_end[-1]) <= _EQUAL * kernels:  # the capture holds whole ones
            return to_end
    if not repeated:
        return stepped
    starts = _moved_back(sequence, anchors)
    after = size - starts[-1] - kernels  # kernels after the last period, or less than 0
    if starts[0] == 0 and abs(after) <= _EQUAL * kernels:  # the capture holds whole ones
        return np.append(starts[1:], size) - 1
    if len(optimizer):
        return stepped
    starts = np.append(starts, size) if after >= -_EQUAL * kernels else starts
    return starts[starts > 0] - 1


def _at_equal_distance(sequence: NDArray[np.int32]) -> tuple[NDArray[np.int32], Integers, Integers, NDArray[np.float64]]:
    """Names whose kernels are equally far apart up to the last, in most of the capture.

    Returns:
        Places in the sequence by name; for each such name, the indices of its first and its last kernel there, and the distance
        between two, ascending.
    """
    size = len(sequence)
    counts = np.bincount(sequence)
    codes = sequence.astype(np.uint16) if len(counts) <= 1 << 16 else sequence  # sorted in a fifth of the time
    order = np.argsort(codes, kind="stable").astype(np.int32)
    last = np.cumsum(counts) - 1
    several = np.flatnonzero(counts > 1)
    counts, last = counts[several], last[several]
    usual = order[last] - order[last - 1]
    # Few names have their last kernel so near to the end, and can be so far apart in most of the capture.
    good = (size - order[last] <= (1 + _EQUAL) * usual) & ((1 + _EQUAL) * usual * counts >= _COVERED * size)
    good &= usual >= _LEAST
    counts, last, usual = (each[good][:_MOST_NAMES] for each in (counts, last, usual))
    begin = last - counts + 1
    for place, (first, after, apart) in enumerate(zip(begin.tolist(), last.tolist(), usual.tolist(), strict=True)):
        others = np.flatnonzero(np.abs(np.diff(order[first : after + 1]) - apart) > _EQUAL * apart)
        begin[place] += others[-1] + 1 if len(others) else 0
    spanned = order[last] - order[begin]
    distance = spanned / (last - begin)
    rows = np.flatnonzero((spanned + distance >= _COVERED * size) & (size - order[last] <= (1 + _EQUAL) * distance))
    rows = rows[np.argsort(distance[rows], kind="stable")]
    return order, begin[rows], last[rows], distance[rows]


def _agreeing(distance: NDArray[np.float64]) -> list[slice]:
    """Distances that are equal, ascending."""
    found, place = [], 0
    while place < len(distance):
        after = int(distance.searchsorted((1 + _EQUAL) * distance[place], "right"))
        found.append(slice(place, after))
        place = after
    most = sorted(found, key=lambda same: same.start - same.stop)[:_CANDIDATES]
    return sorted(most, key=lambda same: same.start)


def _share_repeated(sequence: NDArray[np.int32], kernels: int) -> float:
    return float((sequence[:-kernels] == sequence[kernels:]).mean()) if kernels < len(sequence) else 0.0


def _difference(sequence: NDArray[np.int32], edges: Integers, kernels: float) -> float:
    """The largest share of kernels of two consecutive whole periods that have other names."""
    whole = [edge for edge in pairwise(edges.tolist()) if edge[1] - edge[0] >= (1 - _EQUAL) * kernels]
    if len(whole) < 2:
        middle = max(0, len(sequence) - round(kernels))
        whole = [(max(0, middle - round(kernels)), middle), (middle, len(sequence))]
    largest = 0.0
    for place in np.unique(np.linspace(0, len(whole) - 2, _COMPARED).astype(int)).tolist():
        one, next_one = (sequence[slice(*whole[each])] for each in (place, place + 1))
        size = int(max(one.max(), next_one.max())) + 1
        differing = np.abs(np.bincount(one, minlength=size) - np.bincount(next_one, minlength=size)).sum()
        largest = max(largest, differing / (len(one) + len(next_one)))
    return largest


def _of_optimizer(sequence: NDArray[np.int32], names: Sequence[str]) -> Integers:
    """Places of an optimizer's kernels."""
    used = np.flatnonzero(np.bincount(sequence))
    for pattern in _OPTIMIZERS:
        codes = [code for code in used.tolist() if pattern.search(names[code])]
        if codes:
            return np.flatnonzero(np.isin(sequence, codes))
    return np.empty(0, np.int64)


def _steps(optimizer: Integers, begin: int, kernels: float) -> Integers:
    """Places of the last kernel of each step of the optimizer; none where those after a place are not one a period."""
    apart = np.diff(optimizer)
    known = apart[places(optimizer, np.array([begin]))[0] :]
    if not len(known):
        return np.empty(0, np.int64)
    steps = optimizer[:-1][apart >= (1 - _ALIKE) * known.max()]
    if abs(optimizer[-1] - steps[-1] - kernels) <= _EQUAL * kernels:
        steps = np.append(steps, optimizer[-1])
    between = np.diff(steps[steps >= begin])
    equal = len(between) and (np.abs(between - kernels) <= _EQUAL * kernels).all()
    return steps if equal else np.empty(0, np.int64)


def _moved_back(sequence: NDArray[np.int32], anchors: Integers) -> Integers:
    """The same kernels precede each anchor: up to the capture's beginning, or to the first that differs."""
    first, *others = anchors.tolist()
    most = min(first, int(np.diff(anchors).min()))
    differs = np.zeros(most, bool)
    for anchor in others:
        differs |= sequence[anchor - most : anchor] != sequence[first - most : first]
    last = np.flatnonzero(differs)[-1:]
    return anchors - (most - 1 - int(last[0]) if len(last) else most)


def _moved_to_end(sequence: NDArray[np.int32], steps: Integers) -> Integers:
    """Places moved by as many kernels as follow the last one, if the same ones follow each: such as a moving average."""
    after = sequence[steps[-1] + 1 :]
    same = all((sequence[step + 1 : step + 1 + len(after)] == after).all() for step in steps[:-1].tolist())
    return steps + len(after) if same else steps
