"""Changes of kernels, copies, communication and operators between two sides, per iteration and rank.

A change must matter to an iteration, and be larger than the scatter of the event's own times. Communication kernels contain
waiting for other ranks, so their time is judged by the transfers, in `communication`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.compare.steps import Comparable, RunSteps, Side, amounts, captured_iterations
from bridge_profiling.facts import kernels
from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.statistics import ENOUGH_SAMPLES, welch_p


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Limits above which a difference is a change.

    Args:
        share: change of an event's time, as a share of the base's iteration. Events on one side only are always changes.
        relative: change of the mean time per call, as a share.
        calls: change of the number of calls, as a share.
        chance: probability of as large a difference by chance, from three iterations or runs per side. With fewer, times must
            not overlap at all.
        operator_share: as `share`, for operators: a host's times scatter more than a device's.
        operator_relative: as `relative`, for operators.
    """

    share: float = 0.001
    relative: float = 0.05
    calls: float = 0.02
    chance: float = 0.01
    operator_share: float = 0.005
    operator_relative: float = 0.10


@dataclass
class EventSide:
    """One kind of event on one side."""

    # Those of `_AMOUNTS`: means over ranks and iterations; ns is nanoseconds of all calls.
    amounts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    samples: list[float] = field(default_factory=list)  # mean nanoseconds per call, by iteration; of several runs, by run
    fastest: float = math.inf  # the lowest mean of a rank in an iteration
    slowest: float = 0.0  # the highest

    def add(self, rows: Sequence[Mapping[str, Any]], share: float, names: Sequence[str]) -> None:
        """Add up calls of the event, each row with its fastest and slowest, and the amounts that are named."""
        for name in names:
            self.amounts[name] += sum(row[name] for row in rows) / share
        self.fastest = min(self.fastest, *(row["fastest"] for row in rows))
        self.slowest = max(self.slowest, *(row["slowest"] for row in rows))

    @property
    def mean_ns(self) -> float | None:
        """Per call; None without calls."""
        return self.amounts["ns"] / self.amounts["count"] if self.amounts["count"] else None


Key = tuple[Any, ...]

#: Kinds of events by key, each with its amounts on one side.
Events = dict[Key, EventSide]

#: Columns that tell kinds of events apart.
KEYS = kernels.KEYS | {"operators": ("name",)}

#: Amounts of each kind.
_AMOUNTS: dict[str, tuple[str, ...]] = {
    "kernels": ("count", "ns"),
    "copies": ("count", "ns", "bytes"),
    "communication": ("count", "ns", "bytes", "wait_ns", "kernel_ns"),
    "operators": ("count", "ns", "device_ns"),
}


def events_of(side: Side, of: str, rekey: Callable[[Key], Key] | None = None) -> Events:
    """Events of one side; times of communication are those of transfers, times of operators their own.

    Args:
        side: its runs; of one without marked iterations, the whole capture counts as one. Operators are of all iterations.
        of: key of `KEYS`.
        rekey: makes several keys one.
    """
    found: Events = {}
    for run, steps in side:
        if of == "operators":
            iterations, ranks, rows = captured_iterations(run), *_operators(run, steps)
        elif steps is None:
            iterations, ranks = 1, len({info.rank for info in run.facts.infos})
            rows = run.facts.event_cells(of=of).to_pylist()
        else:
            iterations, ranks = len(steps.iterations), len(steps.ranks)
            rows = run.facts.event_cells(of=of, iterations=tuple(steps.iterations), ranks=tuple(steps.ranks)).to_pylist()
        by_key: dict[Key, list[dict[str, Any]]] = {}
        for row in rows:
            key = tuple(row[name] for name in KEYS[of])
            by_key.setdefault(key if rekey is None else rekey(key), []).append(row)
        for key, mine in by_key.items():
            event = found.setdefault(key, EventSide())
            event.add(mine, iterations * ranks * len(side), _AMOUNTS[of])
            if of != "operators":
                # An iteration has several rows if `rekey` merged keys.
                means = [
                    sum(row["ns"] for row in each) / sum(row["count"] for row in each)
                    for each in grouped(mine, "iteration").values()
                ]
                event.samples += means if len(side) == 1 else [fmean(means)]
    return found


def _operators(run: Comparable, steps: RunSteps | None) -> tuple[int, list[dict[str, Any]]]:
    """The number of ranks, and a row for each operator of a rank, as in `event_cells`."""
    operators = run.facts.operators_by(shapes=True)
    ranks = operators["rank"].unique() if steps is None else pa.array(steps.ranks, pa.int32())
    mine = operators.filter(pc.is_in(operators["rank"], ranks)).group_by(["name", "rank"], use_threads=False)
    summed = mine.aggregate([(name, "sum") for name in ("count", "self_ns", "device_self_ns")])
    rows = summed.rename_columns(["name", "rank", "count", "ns", "device_ns"]).to_pylist()
    return len(ranks), [row | dict.fromkeys(("fastest", "slowest"), row["ns"] / row["count"]) for row in rows]


def comparable(base: Events, other: Events) -> tuple[Events, Events]:
    """Communication of both sides, by operation only if one of them has no group names."""
    named = [any(group for _, group, _ in side) for side in (base, other)]
    if named[0] == named[1]:
        return base, other
    return _by_operation(base), _by_operation(other)


def _by_operation(events: Events) -> Events:
    found: Events = {}
    for (operation, _, _), event in events.items():
        # The kernels' whole times, since one side cannot separate transfer from waiting.
        row = event.amounts | {"ns": event.amounts["kernel_ns"], "wait_ns": 0.0}
        row |= {"fastest": event.fastest, "slowest": event.slowest}
        found.setdefault((operation, "any group", 0), EventSide()).add([row], 1, _AMOUNTS["communication"])
    return found


def without_arguments(key: Key) -> Key:
    """A kernel's kind and name without template arguments and parameters, which differ between profilers."""
    kind, name = key
    spelled = name.replace("(anonymous namespace)", "unnamed").replace("<unnamed>", "unnamed").removeprefix("void ")
    return kind, re.split(r"[<(]", spelled, maxsplit=1)[0].strip()


def changes(base: Events, other: Events, of: str, *, step_ns: float, noise: Noise) -> list[dict[str, Any]]:
    """A row per kind of event of either side, the largest change of its time first.

    Args:
        base: events of one side.
        other: events of the other side.
        of: key of `KEYS`.
        step_ns: the base's mean iteration, which shares are of.
        noise: limits.

    Returns:
        Columns of `KEYS`; change (`came`, `went`, `slower`, `faster`, `more`, `fewer`; None if within noise); base_, other_ and
        change_ of count, ns and extra amounts; base_mean_ns, other_mean_ns and relative_mean per call.
    """
    names = KEYS[of]
    host = of == "operators"
    share, relative = (noise.operator_share, noise.operator_relative) if host else (noise.share, noise.relative)
    rows = []
    for key in sorted(base.keys() | other.keys(), key=repr):
        before, after = base.get(key, EventSide()), other.get(key, EventSide())
        row: dict[str, Any] = {"change": None} | dict(zip(names, key, strict=True))
        row |= amounts(_AMOUNTS[of], before.amounts, after.amounts)
        first_mean, second_mean = before.mean_ns, after.mean_ns
        row |= {"base_mean_ns": first_mean, "other_mean_ns": second_mean, "relative_mean": None}
        if first_mean and second_mean is not None:
            row["relative_mean"] = second_mean / first_mean - 1
        # Times of communication kernels contain waiting.
        timed = of != "kernels" or key[0] == "compute"
        row["change"] = _word(before, after, row, share * step_ns, relative, noise, timed)
        rows.append(row)
    rows.sort(key=lambda row: (-abs(row["change_ns"]), -abs(row["change_count"]), *(str(row[name]) for name in names)))
    return rows


def _word(
    before: EventSide, after: EventSide, row: dict[str, Any], least_ns: float, relative: float, noise: Noise, timed: bool
) -> str | None:
    first, second = before.amounts["count"], after.amounts["count"]
    if not first or not second:
        return "came" if second else "went"
    more = second / first - 1
    # The change by the number of calls, and by the time of each: the larger part gives its name.
    by_calls = (second - first) * (before.mean_ns or 0.0)
    by_time = (row["other_mean_ns"] - row["base_mean_ns"]) * second
    calls = abs(more) > noise.calls and (abs(by_calls) >= least_ns or not timed)
    time = (
        timed
        and abs(by_time) >= least_ns
        and abs(row["relative_mean"] or 0.0) > relative
        and _beyond_noise(before, after, noise.chance)
    )
    if time and (not calls or abs(by_time) > abs(by_calls)):
        return "slower" if by_time > 0 else "faster"
    if calls:
        return "more" if more > 0 else "fewer"
    return None


def _beyond_noise(before: EventSide, after: EventSide, chance: float) -> bool:
    if min(len(before.samples), len(after.samples)) >= ENOUGH_SAMPLES:
        return welch_p(before.samples, after.samples) < chance
    return before.fastest > after.slowest or after.fastest > before.slowest
