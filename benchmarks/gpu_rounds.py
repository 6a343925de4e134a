"""Shared parts of the GPU benchmarks: a case's input and results, and rounds in which the blocks of all sides take turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from benchmarks.gpu_processes import Place, WorkerError
from benchmarks.gpu_sizes import Sizes
from benchmarks.paired import Ratio

#: Uncounted iterations at the start of each block: afterwards the processor is warm, and leftovers of the previous block (a
#: teardown of CUPTI, a report) are done.
SETTLE = 5

#: Minimum number of rounds, whatever the time.
_FEWEST_ROUNDS = 3


@dataclass
class Row:
    """One ratio.

    Attributes:
        case: the case's name.
        what: the two sides, numerator first.
        ratio: the ratio and its interval.
        iterations: counted iterations per side.
        milliseconds: median of each side's blocks.
        target: range of acceptable ratios; None without a target.
        interval_counts: whether the whole interval must lie in the range, not only the ratio.
        note: a remark for the reader.
    """

    case: str
    what: str
    ratio: Ratio
    iterations: int
    milliseconds: dict[str, float]
    target: tuple[float, float] | None = None
    interval_counts: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the target was met, and how certain that is."""
        if self.target is None:
            return ""
        low, high = self.target
        if low <= self.ratio.low and self.ratio.high <= high:
            return "met"
        if self.ratio.low > high or self.ratio.high < low:
            return "missed"
        if self.interval_counts:
            return "not shown: the interval is too wide"
        return f"{'met' if low <= self.ratio.median <= high else 'missed'}, but not by the whole interval"

    def as_json(self) -> dict[str, Any]:
        """All of it, and the verdict."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass
class Results:
    """The results of a case.

    Attributes:
        rows: ratios.
        costs: costs of captures, one entry per window.
        facts: anything else, by name.
        raw: the measurements, for further computations; written and not printed.
    """

    rows: list[Row] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bench:
    """The input of a case.

    Attributes:
        name: the case's.
        place: where its trainings run.
        sizes: of their model; a case may choose others.
        seconds: how long it may measure, without the starts of its trainings.
        most_rounds: rounds, or hundreds of pairs, after which it stops anyway.
        results: receives its results as they arrive.
        say: prints a line.
    """

    name: str
    place: Place
    sizes: Sizes
    seconds: float
    most_rounds: int
    say: Callable[[str], None]
    results: Results = field(default_factory=Results)

    @property
    def cuda(self) -> bool:
        """Whether the trainings have a GPU."""
        return self.place.lane.gpu is not None

    def begin(self) -> None:
        """Start the clock, because its trainings run now."""
        self._deadline = monotonic() + self.seconds
        self._round_began: float | None = None
        self._round = 0
        self._slowest = 0.0

    def another_round(self) -> bool:
        """Whether there is time for another round; call it before each."""
        now = monotonic()
        if self._round_began is not None:
            self._slowest = max(self._slowest if self._round > 1 else 0.0, now - self._round_began)
            self._round += 1
        self._round_began = now
        if self._round >= self.most_rounds:
            return False
        return self._round < _FEWEST_ROUNDS or now + self._slowest < self._deadline


Side = Callable[[], Mapping[str, Any]]


def take_turns(bench: Bench, sides: Mapping[str, Side], count: int) -> dict[str, list[float]]:
    """Run blocks of all sides in rounds, in a new random order for each, after one uncounted round.

    The last `count` iterations of a block count, except for the first and the last of these, on every side alike: the first
    includes the start of a profiler, and the last its stop.

    Args:
        bench: the case.
        sides: each runs one block of SETTLE + count iterations.
        count: iterations of a block's window.

    Returns:
        For each side, the median of each round's block in milliseconds.
    """
    draw = random.Random(bench.name)
    for side in sides.values():
        side()
    medians: dict[str, list[float]] = {name: [] for name in sides}
    bench.begin()
    while bench.another_round():
        found = {}
        try:
            for name in draw.sample(list(sides), len(sides)):
                found[name] = median_ms(side_counted(sides[name](), count))
        except WorkerError as error:
            done = min(map(len, medians.values()))
            if done < _FEWEST_ROUNDS:
                raise
            bench.results.facts["stopped"] = f"after {done} rounds: {error}"
            break
        for name, median in found.items():
            medians[name].append(median)
    return medians


def side_counted(block: Mapping[str, Any], count: int) -> list[int]:
    """The iterations of a block that are compared."""
    return block["durations"][-count:][1:-1]


def median_ms(nanoseconds: Iterable[float]) -> float:
    """The median of durations, in milliseconds."""
    return statistics.median(nanoseconds) / 1e6
