"""Changes of kernels, copies, communication and operators between two sides, per iteration and rank.

A change must matter to an iteration, and be larger than the scatter of the event's own times. Communication kernels contain
waiting for other ranks, so their time is judged by the transfers, in `communication`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge_profiling.compare.steps import Side
from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.statistics import ENOUGH_SAMPLES, welch_p

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Limits above which a difference is a change."""

    share: float = 0.001
    """Change of an event's time, as a share of the base's iteration. Events on one side only are always changes."""

    relative: float = 0.05
    """Change of the mean time per call, as a share."""

    calls: float = 0.02
    """Change of the number of calls, as a share."""

    chance: float = 0.01
    """Probability of as large a difference by chance, from three iterations or runs per side. With fewer, times must not
    overlap at all."""

    operator_share: float = 0.005
    """As `share`, for operators: a host's times scatter more than a device's."""

    operator_relative: float = 0.10
    """As `relative`, for operators."""


@dataclass
class EventSide:
    """One kind of event on one side. Amounts are means over ranks and iterations."""

    count: float = 0.0  # calls per iteration and rank
    us: float = 0.0  # microseconds of all of them
    samples: list[float] = field(default_factory=list)  # mean microseconds per call, by iteration; of several runs, by run
    fastest: float = 0.0  # the lowest mean of a rank in an iteration
    slowest: float = 0.0  # the highest
    extra: dict[str, float] = field(default_factory=dict)  # further amounts, by name

    def add(self, rows: Sequence[Mapping[str, Any]], amount: float, extra: Sequence[str]) -> None:
        """Add up calls of the event, each row with its count, us, fastest, slowest and extra amounts."""
        self.count += sum(row["count"] for row in rows) / amount
        self.us += sum(row["us"] for row in rows) / amount
        self.fastest = min(self.fastest or rows[0]["fastest"], *(row["fastest"] for row in rows))
        self.slowest = max(self.slowest, *(row["slowest"] for row in rows))
        for name in extra:
            self.extra[name] = self.extra.get(name, 0.0) + sum(row[name] for row in rows) / amount

    @property
    def mean_us(self) -> float | None:
        """Per call; None without calls."""
        return self.us / self.count if self.count else None


Key = tuple[Any, ...]

#: Kinds of events by key, each with its amounts on one side.
Events = dict[Key, EventSide]

# Nanoseconds are added up as integers: DuckDB adds doubles in an order that changes from run to run.
_CELLS = """
with cells as (
    select {keys}, rank, {iteration} as step, count(*) as count, sum(end_ns - start_ns) as ns, sum(bytes) as bytes
    from device_events where {kinds} {where} group by all
)
select {keys}, step as iteration, sum(count)::double as count, sum(ns) / 1e3 as us, min(ns / 1e3 / count) as fastest,
    max(ns / 1e3 / count) as slowest, coalesce(sum(bytes), 0)::double as bytes
from cells group by all order by step
"""

# Only matched operations have transfer and waiting; for others, the kernel's time counts as transfer.
_OPERATIONS = """
with timed as (
    select operation, coalesce("group", '') as "group", coalesce(group_size, 0) as group_size, rank, collective,
        {iteration} as step, message_bytes as bytes, end_ns - start_ns as kernel_ns
    from operations where true {where}
), cells as (
    select operation, "group", group_size, rank, step, count(*) as count, sum(bytes) as bytes,
        sum(coalesce(transfer_ns, kernel_ns)) as ns, sum(wait_ns) as wait_ns, sum(kernel_ns) as kernel_ns
    from timed left join (select rank, collective, transfer_ns, wait_ns from waiting) using (rank, collective) group by all
)
select operation, "group", group_size, step as iteration, sum(count)::double as count, sum(ns) / 1e3 as us,
    min(ns / 1e3 / count) as fastest, max(ns / 1e3 / count) as slowest, coalesce(sum(bytes), 0)::double as bytes,
    coalesce(sum(wait_ns), 0) / 1e3 as wait_us, sum(kernel_ns) / 1e3 as kernel_us
from cells group by all order by step
"""

#: Columns that tell kinds of events apart.
KEYS = {
    "kernels": ("kind", "name"),
    "copies": ("kind", "direction", "from_memory", "to_memory"),
    "communication": ("operation", "group", "group_size"),
    "operators": ("name",),
}

_KINDS = {"kernels": "kind in ('compute', 'communication')", "copies": "kind in ('memcpy', 'memset')"}

#: Further amounts of each kind.
_EXTRA = {"kernels": (), "copies": ("bytes",), "communication": ("bytes", "wait_us", "kernel_us")}


def event_cells(
    connection: duckdb.DuckDBPyConnection, *, of: str, iterations: tuple[int, ...] = (), ranks: tuple[int, ...] = ()
) -> pa.Table:
    """Events per kind and iteration. Needs `measure_waiting`.

    Args:
        of: `kernels`, `copies` or `communication`.
        iterations: to count; without any, the whole capture counts as one.
        ranks: to count.

    Returns:
        The columns of `KEYS`, iteration, count, us (sum over ranks), fastest and slowest (mean per call of a rank), bytes; of
        communication also wait_us and kernel_us.
    """
    numbers, members = (", ".join(str(int(number)) for number in numbers) for numbers in (iterations, ranks))
    query = (_OPERATIONS if of == "communication" else _CELLS).format(
        keys=", ".join(KEYS[of]),
        kinds=_KINDS.get(of),
        iteration="iteration" if iterations else "0",
        where=f"and iteration in ({numbers}) and rank in ({members})" if iterations else "",
    )
    return connection.sql(query).to_arrow_table()


def events_of(side: Side, of: str, *, rekey: Callable[[Key], Key] = lambda key: key) -> Events:
    """Kernels, copies or communication of one side; times of communication are those of transfers.

    Args:
        side: its runs; of one without marked iterations, the whole capture counts as one.
        of: `kernels`, `copies` or `communication`.
        rekey: makes several keys one.
    """
    found: Events = {}
    for run, steps in side:
        if steps is None:
            iterations, ranks = 1, len({info.rank for info in run.infos if info.source == run.main_source})
            table = run.cells(of=of)
        else:
            iterations, ranks = len(steps.iterations), len(steps.ranks)
            table = run.cells(of=of, iterations=tuple(steps.iterations), ranks=tuple(steps.ranks))
        cells: dict[Key, list[dict[str, Any]]] = {}
        for row in table.to_pylist():
            cells.setdefault(rekey(tuple(row[name] for name in KEYS[of])), []).append(row)
        amount = iterations * ranks * len(side)
        for key, rows in cells.items():
            event = found.setdefault(key, EventSide())
            event.add(rows, amount, _EXTRA[of])
            # An iteration has several rows if `rekey` merged keys.
            iterations_of = grouped(rows, "iteration").values()
            means = [sum(row["us"] for row in each) / sum(row["count"] for row in each) for each in iterations_of]
            event.samples += means if len(side) == 1 else [fmean(means)]
    return found


def comparable(base: Events, other: Events) -> tuple[Events, Events]:
    """Communication of both sides, by operation only if one of them has no group names."""
    named = [any(group for _, group, _ in side) for side in (base, other)]
    if named[0] == named[1]:
        return base, other
    return _by_operation(base), _by_operation(other)


def _by_operation(events: Events) -> Events:
    found: Events = {}
    for (operation, _, _), event in events.items():
        merged = found.setdefault((operation, "any group", 0), EventSide(fastest=event.fastest))
        merged.count += event.count
        # The kernels' whole times, since one side cannot separate transfer from waiting.
        merged.us += event.extra["kernel_us"]
        merged.fastest, merged.slowest = min(merged.fastest, event.fastest), max(merged.slowest, event.slowest)
        for name, amount in event.extra.items():
            merged.extra[name] = merged.extra.get(name, 0.0) + (0.0 if name == "wait_us" else amount)
    return found


def without_arguments(key: Key) -> Key:
    """A kernel's kind and name without template arguments and parameters, which differ between profilers."""
    kind, name = key
    spelled = name.replace("(anonymous namespace)", "unnamed").replace("<unnamed>", "unnamed").removeprefix("void ")
    return kind, re.split(r"[<(]", spelled, maxsplit=1)[0].strip()


def operators_of(side: Side) -> Events:
    """Host operators of one side, by name; times are their own. Means over all captured iterations."""
    found: Events = {}
    for run, steps in side:
        iterations = max(len(set(run.iterations["iteration"].to_pylist())), 1)
        ranks = steps.ranks if steps is not None else sorted(set(run.operators["rank"].to_pylist()))
        amount = iterations * len(ranks) * len(side)
        for name, rows in grouped((row for row in run.operators.to_pylist() if row["rank"] in ranks), "name").items():
            of_ranks = []
            for shapes in grouped(rows, "rank").values():
                count = us = device_us = 0.0
                for row in shapes:
                    count, us, device_us = count + row["count"], us + row["self_us"], device_us + row["device_self_us"]
                of_ranks.append(
                    {"count": count, "us": us, "device_us": device_us, "fastest": us / count, "slowest": us / count}
                )
            found.setdefault((name,), EventSide()).add(of_ranks, amount, ("device_us",))
    return found


def changes(base: Events, other: Events, of: str, *, step_us: float, noise: Noise) -> list[dict[str, Any]]:
    """A row per kind of event of either side, the largest change of its time first.

    Args:
        base: events of one side.
        other: events of the other side.
        of: key of `KEYS`.
        step_us: the base's mean iteration, which shares are of.
        noise: limits.

    Returns:
        Columns of `KEYS`; change (`came`, `went`, `slower`, `faster`, `more`, `fewer`; None if within noise); base_, other_ and
        change_ of count, us and extra amounts; base_mean_us, other_mean_us and relative_mean per call.
    """
    names = KEYS[of]
    host = of == "operators"
    share, relative = (noise.operator_share, noise.operator_relative) if host else (noise.share, noise.relative)
    rows = []
    for key in sorted(base.keys() | other.keys(), key=repr):
        before, after = base.get(key, EventSide()), other.get(key, EventSide())
        row: dict[str, Any] = {"change": None} | dict(zip(names, key, strict=True))
        amounts = {"count": (before.count, after.count), "us": (before.us, after.us)}
        amounts |= {name: (before.extra.get(name, 0.0), after.extra.get(name, 0.0)) for name in before.extra | after.extra}
        for name, (first, second) in amounts.items():
            row |= {f"base_{name}": first, f"other_{name}": second, f"change_{name}": second - first}
        first_mean, second_mean = before.mean_us, after.mean_us
        row |= {"base_mean_us": first_mean, "other_mean_us": second_mean, "relative_mean": None}
        if first_mean and second_mean is not None:
            row["relative_mean"] = second_mean / first_mean - 1
        # Times of communication kernels contain waiting.
        timed = of != "kernels" or key[0] == "compute"
        row["change"] = _word(before, after, row, share * step_us, relative, noise, timed)
        rows.append(row)
    rows.sort(key=lambda row: (-abs(row["change_us"]), -abs(row["change_count"]), *(str(row[name]) for name in names)))
    return rows


def _word(
    before: EventSide, after: EventSide, row: dict[str, Any], least_us: float, relative: float, noise: Noise, timed: bool
) -> str | None:
    if not before.count or not after.count:
        return "came" if after.count else "went"
    more = after.count / before.count - 1
    # The change by the number of calls, and by the time of each: the larger part gives its name.
    by_calls = (after.count - before.count) * (before.mean_us or 0.0)
    by_time = (row["other_mean_us"] - row["base_mean_us"]) * after.count
    calls = abs(more) > noise.calls and (abs(by_calls) >= least_us or not timed)
    time = (
        timed
        and abs(by_time) >= least_us
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
