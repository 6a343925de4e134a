"""What came, went, sped up or slowed between two sides: kernels, copies, communication and operators, per iteration and rank.

Only what is beyond noise is called a change: it must matter to an iteration, and differ by more than its own times scatter.
Communication kernels contain waiting for other ranks, so their time is judged by what moved data, in `communication`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge_profiling.analysis.compare.statistics import ENOUGH_SAMPLES, welch_p
from bridge_profiling.analysis.compare.steps import RunSteps
from bridge_profiling.analysis.ranks.waiting import measure_waiting
from bridge_profiling.analysis.run import Run
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Above what a difference is a change."""

    share: float = 0.001
    """Share of the base's iteration that an event's time must change by; what came or went is told whatever its time."""

    relative: float = 0.05
    """Share that the mean time of a call must change by."""

    calls: float = 0.02
    """Share that the number of calls must change by."""

    chance: float = 0.01
    """Probability of as large a difference by chance, from three iterations, or runs, a side. With fewer, times must not
    overlap at all."""

    operator_share: float = 0.005
    """As `share`, of operators: a host's times scatter more than a device's."""

    operator_relative: float = 0.10
    """As `relative`, of operators."""


@dataclass
class EventSide:
    """One kind of event on one side. Amounts are means over ranks and iterations.

    Args:
        count: calls in an iteration of a rank.
        us: microseconds of all of them.
        samples: mean microseconds of a call, by iteration; of several runs by run.
        fastest: the least mean of a rank in an iteration.
        slowest: the greatest.
        extra: further amounts, by name.
    """

    count: float = 0.0
    us: float = 0.0
    samples: list[float] = field(default_factory=list)
    fastest: float = 0.0
    slowest: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def mean_us(self) -> float | None:
        """Of a call; None without one."""
        return self.us / self.count if self.count else None


#: Kinds of events by what tells them apart, and what each side knows of them.
Sides = dict[tuple[Any, ...], EventSide]

_CELLS = """
with chosen as (select {iteration} as iteration, * exclude (iteration) from device_events where {kinds} {where}
), cells as (
    select {keys}, rank, iteration, count(*) as count, sum(end_ns - start_ns) / 1e3 as us, sum(bytes) as bytes
    from chosen group by all
)
select {keys}, iteration, sum(count)::double as count, sum(us)::double as us, min(us / count) as fastest,
    max(us / count) as slowest, coalesce(sum(bytes), 0)::double as bytes
from cells group by all order by iteration
"""

# Transfer and waiting are known of matched operations alone; a kernel's time stands in for the transfer where none is.
_OPERATIONS = """
with timed as (
    select operations.operation, coalesce(operations."group", '') as "group", coalesce(operations.group_size, 0) as group_size,
        operations.rank, {iteration} as iteration, operations.message_bytes as bytes,
        (operations.end_ns - operations.start_ns) / 1e3 as kernel_us, wait_ns / 1e3 as wait_us,
        coalesce(transfer_ns, operations.end_ns - operations.start_ns) / 1e3 as transfer_us
    from operations left join waiting using (rank, collective) where true {where}
), cells as (
    select operation, "group", group_size, rank, iteration, count(*) as count, sum(transfer_us) as us, sum(bytes) as bytes,
        sum(wait_us) as wait_us, sum(kernel_us) as kernel_us
    from timed group by all
)
select operation, "group", group_size, iteration, sum(count)::double as count, sum(us)::double as us,
    min(us / count) as fastest, max(us / count) as slowest, coalesce(sum(bytes), 0)::double as bytes,
    coalesce(sum(wait_us), 0)::double as wait_us, sum(kernel_us)::double as kernel_us
from cells group by all order by iteration
"""


def kernel_sides(runs: Sequence[Run], steps: Sequence[RunSteps | None], *, spelled_apart: bool = False) -> Sides:
    """Kernels of one side, by kind and name.

    Args:
        runs: of that side.
        steps: which iterations of each; None for a whole capture, as if it were one.
        spelled_apart: the other side is another profiler's, which spells template arguments its own way: names are taken up to
            there.
    """
    question = partial(_events, keys="kind, name", kinds="kind in ('compute', 'communication')")
    return _side(runs, steps, question, 2, rekey=without_arguments if spelled_apart else None)


def copy_sides(runs: Sequence[Run], steps: Sequence[RunSteps | None]) -> Sides:
    """Copies and memsets of one side, by kind, direction and memories.

    Args:
        runs: of that side.
        steps: which iterations of each.
    """
    question = partial(_events, keys="kind, direction, from_memory, to_memory", kinds="kind in ('memcpy', 'memset')")
    return _side(runs, steps, question, 4, extra=("bytes",))


def communication_sides(runs: Sequence[Run], steps: Sequence[RunSteps | None]) -> Sides:
    """Communication of one side, by operation, the program's name for the group, and its size; times are of transfers.

    Args:
        runs: of that side.
        steps: which iterations of each.
    """
    return _side(runs, steps, _operations, 3, extra=("bytes", "wait_us", "kernel_us"))


def comparable(base: Sides, other: Sides) -> tuple[Sides, Sides]:
    """Communication of both sides, by operation alone where one of them knows no groups.

    Args:
        base: `communication_sides` of one side.
        other: of the other.
    """
    named = [any(group for _, group, _ in side) for side in (base, other)]
    if named[0] == named[1]:
        return base, other
    return _by_operation(base), _by_operation(other)


def _by_operation(sides: Sides) -> Sides:
    found: Sides = {}
    for (operation, _, _), side in sides.items():
        merged = found.setdefault((operation, "any group", 0), EventSide(fastest=side.fastest))
        merged.count += side.count
        # Where transfer cannot be told from waiting on one side, kernels' whole times are compared.
        merged.us += side.extra["kernel_us"]
        merged.fastest, merged.slowest = min(merged.fastest, side.fastest), max(merged.slowest, side.slowest)
        for name, amount in side.extra.items():
            merged.extra[name] = merged.extra.get(name, 0.0) + (0.0 if name == "wait_us" else amount)
    return found


def without_arguments(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A kernel's kind and name without template arguments and parameters, which profilers spell each their own way."""
    kind, name = key
    spelled = name.replace("(anonymous namespace)", "unnamed").replace("<unnamed>", "unnamed").removeprefix("void ")
    return kind, re.split(r"[<(]", spelled, maxsplit=1)[0].strip()


#: What adds up over an operator's shapes.
_SUMMED = ("count", "self_us", "device_us")


def operator_sides(runs: Sequence[Run], steps: Sequence[RunSteps | None]) -> Sides:
    """Host operators of one side, by name; times are their own. Of whole captures, over the iterations captured.

    Args:
        runs: of that side.
        steps: which ranks of each.
    """
    found: Sides = {}
    for run, mine in zip(runs, steps, strict=True):
        # By shapes too: whether the work is the same is asked of the same answer.
        table = run.operators(shapes=True)
        marked = run.iterations()
        iterations = len(set(marked["iteration"].to_pylist())) if marked.num_rows else 1
        captured = mine.ranks if mine is not None else sorted(set(table["rank"].to_pylist()))
        per_rank: dict[str, dict[int, dict[str, float]]] = {}
        for row in table.to_pylist() if table.num_rows else []:
            if row["rank"] in captured:
                sums = per_rank.setdefault(row["name"], {}).setdefault(row["rank"], dict.fromkeys(_SUMMED, 0.0))
                for measure in _SUMMED:
                    sums[measure] += row[measure]
        amount = iterations * len(captured) * len(runs)
        for name, of_ranks in per_rank.items():
            side, rows = found.setdefault((name,), EventSide()), list(of_ranks.values())
            means = [row["self_us"] / row["count"] for row in rows]
            side.count += sum(row["count"] for row in rows) / amount
            side.us += sum(row["self_us"] for row in rows) / amount
            side.extra["device_us"] = side.extra.get("device_us", 0.0) + sum(row["device_us"] for row in rows) / amount
            side.fastest, side.slowest = min(side.fastest or means[0], *means), max(side.slowest, *means)
    return found


def changes(
    base: Sides,
    other: Sides,
    names: Sequence[str],
    *,
    step_us: float,
    noise: Noise,
    on_host: bool = False,
    timed: Callable[[tuple[Any, ...]], bool] = lambda key: True,
) -> list[dict[str, Any]]:
    """A row per kind of event of either side, the largest change of its time first.

    Args:
        base: what one side knows of each.
        other: the other side.
        names: of the columns that tell kinds apart.
        step_us: the base's mean iteration, which shares are of.
        noise: above what a difference is a change.
        on_host: the events are operators.
        timed: of which kinds the time means something.

    Returns:
        Besides `names`: change (`came`, `went`, `slower`, `faster`, `more`, `fewer`; None for none beyond noise), and base_,
        other_ and change_ of count and us, and of what else is known; base_mean_us, other_mean_us and relative_mean of a call.
    """
    share, relative = (noise.operator_share, noise.operator_relative) if on_host else (noise.share, noise.relative)
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
        row["change"] = _word(before, after, row, share * step_us, relative, noise, timed(key))
        rows.append(row)
    rows.sort(key=lambda row: (-abs(row["change_us"]), -abs(row["change_count"]), *(str(row[name]) for name in names)))
    return rows


def _word(
    before: EventSide, after: EventSide, row: dict[str, Any], least_us: float, relative: float, noise: Noise, timed: bool
) -> str | None:
    if not before.count or not after.count:
        return "came" if after.count else "went"
    more = after.count / before.count - 1
    # What the number of calls changed, and what the time of each did: the larger part gives its name.
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


def _events(
    connection: duckdb.DuckDBPyConnection,
    infos: Sequence[RankInfo],
    *,
    limitations: list[str],
    keys: str,
    kinds: str,
    iteration: str,
    where: str,
) -> pa.Table:
    return connection.sql(_CELLS.format(keys=keys, kinds=kinds, iteration=iteration, where=where)).to_arrow_table()


def _operations(
    connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str], iteration: str, where: str
) -> pa.Table:
    measure_waiting(connection, infos, limitations=limitations)
    if iteration == "iteration":
        iteration, where = "operations.iteration", where.replace("iteration in", "operations.iteration in")
    where = where.replace("rank in", "operations.rank in")
    return connection.sql(_OPERATIONS.format(iteration=iteration, where=where)).to_arrow_table()


def _side(
    runs: Sequence[Run],
    steps: Sequence[RunSteps | None],
    question: Callable[..., pa.Table],
    keys: int,
    extra: Sequence[str] = (),
    rekey: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> Sides:
    """Sum up what a question says of each run's iterations; kinds that `rekey` calls the same are one."""
    found: Sides = {}
    for run, mine in zip(runs, steps, strict=True):
        if mine is None:  # nothing marks iterations: the capture counts as one
            numbers, ranks, clause, iteration = [0], sorted({info.rank for info, _ in run.entries()}), "", "0"
        else:
            numbers, ranks, iteration = mine.iterations, mine.ranks, "iteration"
            clause = f"and iteration in ({_listed(numbers)}) and rank in ({_listed(ranks)})"
        if not ranks:
            continue
        table = run.across(partial(question, iteration=iteration, where=clause))
        cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in table.to_pylist():
            key = tuple(list(row.values())[:keys])
            cells.setdefault(rekey(key) if rekey else key, []).append(row)
        amount = len(numbers) * len(ranks) * len(runs)
        for key, rows in cells.items():
            side = found.setdefault(key, EventSide())
            side.count += sum(row["count"] for row in rows) / amount
            side.us += sum(row["us"] for row in rows) / amount
            means = _means(rows)
            side.samples += means if len(runs) == 1 else [fmean(means)]
            side.fastest = min(side.fastest or rows[0]["fastest"], *(row["fastest"] for row in rows))
            side.slowest = max(side.slowest, *(row["slowest"] for row in rows))
            for name in extra:
                side.extra[name] = side.extra.get(name, 0.0) + sum(row[name] for row in rows) / amount
    return found


def _means(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Of a call, in each iteration; an iteration has several rows where kinds were made one."""
    by_iteration: dict[int, list[float]] = {}
    for row in rows:
        sums = by_iteration.setdefault(row["iteration"], [0.0, 0.0])
        sums[0] += row["us"]
        sums[1] += row["count"]
    return [us / count for us, count in by_iteration.values()]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(int(number)) for number in numbers)
