"""Where ranks' captures of one sequence of operations fit together. Arrays in, offsets out; knows no tables.

Two captures fit where all operations of their overlap are of the same kind and size and, as far as they are marked, of the same
iteration. Training repeats itself, so without marks several offsets fit. The participants of an operation end it together:
in the right offset the ends differ by the difference of the clocks and nothing else, whatever the clocks are; in a wrong one
they differ by the iterations' different lengths too. Where that leaves a choice, as for a group of two operations an
iteration, the clocks decide, as other groups of the same ranks give them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

#: How much the ends of the same operations differ, but for a constant: 1 to 10 us on NVLink, more between hosts.
_SAME_NS = 50_000

#: Spreads that differ by less are alike.
_SCATTER_NS = 10_000

#: Beyond this they are not the same operations: iterations differ from each other by as much.
_STEADY_NS = 500_000

#: Operations whose ends agree by chance: the few of one iteration do in another one too.
_FEW = 4

#: What hosts that keep time over the network differ by at most.
_HOSTS_NS = 50_000_000

#: Fits that the likely offsets miss are searched for exhaustively up to this many comparisons.
_SEARCHED = 1 << 24


@dataclass(frozen=True)
class Sequence:
    """One rank's operations in one group, in order.

    Args:
        rank: whose they are.
        signature: what each operation is: operation and size, as a number.
        iteration: the iteration of each; negative for none.
        end_ns: when each ended, on the rank's own clock.
    """

    rank: int
    signature: Integers
    iteration: Integers
    end_ns: Integers

    def __len__(self) -> int:
        return len(self.signature)


class Fit(NamedTuple):
    """One way in which two sequences fit: operation i of the other is operation i + offset of the reference.

    Args:
        offset: how far the other begins after the reference.
        overlap: operations in common.
        spread_ns: by how much the ends' differences differ, in the mean.
        apart_ns: the reference's clock less the other's: the median difference of the ends.
        marked: every operation in common has an iteration, the same in both.
    """

    offset: int
    overlap: int
    spread_ns: float
    apart_ns: float
    marked: bool


class RankClocks:
    """Differences between clocks, as far as sequences that fit in one way only give them."""

    def __init__(self) -> None:
        self._above: dict[int, tuple[int, float]] = {}

    def learn(self, one: int, other: int, apart_ns: float) -> None:
        """One rank's clock is that much ahead of the other's."""
        (top, ahead), (bottom, behind) = self._top(one), self._top(other)
        if top != bottom:
            self._above[bottom] = (top, apart_ns + behind - ahead)

    def apart_ns(self, one: int, other: int) -> float | None:
        """How much one rank's clock is ahead of the other's; None when nothing relates them."""
        (top, ahead), (bottom, behind) = self._top(one), self._top(other)
        return ahead - behind if top == bottom else None

    def _top(self, rank: int) -> tuple[int, float]:
        """The rank that this one is related to by others, and how much this one's clock is ahead of its."""
        ahead = 0.0
        while rank in self._above:
            rank, behind = self._above[rank]
            ahead -= behind
        return rank, ahead


def align(channels: Iterable[list[Sequence]]) -> list[list[int | None]]:
    """Each sequence's offset in its channel, against the longest one there; None for those that fit nowhere.

    Args:
        channels: the sequences of each group of ranks.
    """
    every = list(channels)
    fits = [_against_longest(sequences) for sequences in every]
    clocks = RankClocks()
    # What fits in one way only tells the clocks, and these tell the rest.
    plain = [
        (ways[0].overlap, sequences[longest].rank, sequence.rank, ways[0].apart_ns)
        for sequences, (longest, found) in zip(every, fits, strict=True)
        for sequence, ways in zip(sequences, found, strict=True)
        if sequence.rank != sequences[longest].rank and _plain(ways)
    ]
    clocks = RankClocks()
    for _, one, other, apart_ns in sorted(plain, reverse=True):
        clocks.learn(one, other, apart_ns)
    return [
        [
            _chosen(ways, clocks.apart_ns(sequences[longest].rank, each.rank))
            for each, ways in zip(sequences, found, strict=True)
        ]
        for sequences, (longest, found) in zip(every, fits, strict=True)
    ]


def _plain(ways: list[Fit]) -> bool:
    """Whether the first of some fits has so many operations more than the next that it is the right one."""
    return bool(ways) and ways[0].overlap > _FEW and (len(ways) == 1 or ways[0].overlap >= 2 * ways[1].overlap)


def _against_longest(sequences: list[Sequence]) -> tuple[int, list[list[Fit]]]:
    longest = max(range(len(sequences)), key=lambda place: len(sequences[place]))
    return longest, [
        [Fit(0, len(each), 0.0, 0.0, True)] if place == longest else fitting(sequences[longest], each)
        for place, each in enumerate(sequences)
    ]


def _chosen(ways: list[Fit], apart_ns: float | None) -> int | None:
    """Of the ways in which two sequences fit the one that the clocks agree with, else the one of most operations."""
    if apart_ns is not None:
        near = [way for way in ways if abs(way.apart_ns - apart_ns) <= _STEADY_NS]
        return min(near, key=lambda way: abs(way.apart_ns - apart_ns)).offset if near else None
    # A few operations fit in several places: their iterations, or the hosts' clocks, must say that they are the same.
    vouched = [way for way in ways if way.overlap > _FEW or way.marked or abs(way.apart_ns) <= _HOSTS_NS]
    return (
        min(vouched, key=lambda way: (-way.overlap, way.spread_ns // _SCATTER_NS, abs(way.apart_ns))).offset
        if vouched
        else None
    )


def fitting(reference: Sequence, other: Sequence) -> list[Fit]:
    """The ways in which two sequences fit and end together; those of most operations first."""
    if not len(reference) or not len(other):
        return []
    found = _fits(reference, other, _likely(reference, other))
    searchable = len(reference) * len(other) <= _SEARCHED
    sure = any(fit.overlap >= _FEW and fit.spread_ns <= _SAME_NS for fit in found)
    marked = (other.iteration >= 0).all() and (reference.iteration >= 0).all()
    if searchable and not (sure and marked):
        found = _fits(reference, other, np.arange(1 - len(other), len(reference)))
    return sorted(_steadiest(found), key=lambda fit: (-fit.overlap, fit.spread_ns))


def _steadiest(found: list[Fit]) -> list[Fit]:
    """Of some fits those whose ends agree as well as in the best of them."""
    # An operation or two in common always agree: they say nothing about how well more can.
    telling = [fit.spread_ns for fit in found if fit.overlap >= _FEW and fit.spread_ns <= _STEADY_NS]
    limit = max(3 * min(telling), _SAME_NS / 2) if telling else _STEADY_NS
    return [fit for fit in found if fit.spread_ns <= limit]


def _likely(reference: Sequence, other: Sequence) -> Integers:
    """Offsets that make iterations begin or end together, both captures begin or end together, or the clocks agree."""
    candidates = [0, len(reference) - len(other)]
    for number in np.intersect1d(reference.iteration, other.iteration):
        if number >= 0:
            mine, theirs = np.flatnonzero(reference.iteration == number), np.flatnonzero(other.iteration == number)
            candidates += [mine[0] - theirs[0], mine[-1] - theirs[-1]]
    place = np.clip(np.searchsorted(reference.end_ns, other.end_ns), 1, max(len(reference) - 1, 1))
    before, after = reference.end_ns[place - 1], reference.end_ns[np.minimum(place, len(reference) - 1)]
    nearest = np.where(other.end_ns - before < after - other.end_ns, place - 1, place)
    candidates.append(int(np.median(nearest - np.arange(len(other)))))
    return np.unique(np.array(candidates, np.int64))


def _fits(reference: Sequence, other: Sequence, candidates: Integers) -> list[Fit]:
    """Of some offsets those that fit."""
    found = []
    for place in candidates.tolist():
        mine = slice(max(0, place), min(len(reference), place + len(other)))
        theirs = slice(mine.start - place, mine.stop - place)
        if mine.stop <= mine.start or (reference.signature[mine] != other.signature[theirs]).any():
            continue
        one, two = reference.iteration[mine], other.iteration[theirs]
        if ((one != two) & (one >= 0) & (two >= 0)).any():
            continue
        apart = reference.end_ns[mine] - other.end_ns[theirs]
        middle = int(np.sort(apart)[len(apart) // 2])
        # The mean of the deviations, not their median: a wrong alignment is right within an iteration.
        spread = float(np.abs(apart - middle).mean())
        found.append(Fit(place, len(apart), spread, float(middle), bool(((one >= 0) & (two >= 0)).all())))
    return found
