"""The table of captures whose causes are known: what was found in each, as Markdown for docs/concepts/known-causes.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Finding
from bridge_profiling.analysis.workers import Outcome, call
from tests.planted.cases import CASES, Case

#: Findings that name no cause of their own: the consequence of others, a description of the work, the price of looking.
NO_CAUSE = ("low_device_busy", "dominant_kernel", "profiler_overhead")

#: What is true of a planted capture beside its plant: by case, the finding, and why it is none of the false alarms.
TRUE_AS_WELL = {
    # ddp.overlap_grad_reduce=false is a part of what was planted.
    "slow_link_2": {"low_overlap"},
    # The gradients' reduction goes over the slow link too, and all of it is exposed there.
    "slow_link_4": {"low_overlap"},
    # 2 MiB of each iteration stay allocated, to hold the rest apart.
    "memory_fragmentation_2": {"memory_growth"},
    # Two micro-batches in two stages: a third of the pipeline's time is bubble by the schedule alone.
    "witness_pp2_dp2": {"pipeline_bubble"},
}

#: What is special about a case without a plant.
_CLEAN = {
    "witness_pp2_dp2": "nothing; 2 micro-batches in 2 stages",
    "witness_pp2_dp2_nsys": "nothing; 2 micro-batches in 2 stages",
}

_LATE_HOSTS = frozenset({"straggler_host", "host_launch_bound"})

_HEADINGS = (
    "capture",
    "injected",
    "on ranks",
    "injected, ms",
    "over its baseline, ms",
    "found",
    "at place",
    "ranks",
    "potential saving, ms",
    "confidence",
    "also found",
    "false alarms",
)


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a capture.

    Args:
        name: of the capture.
        folder: where it lies.
        cause: what is in it, in words.
        finding: id that it must lead to; None where nothing is to be found.
        ranks: to blame.
        planted_ms: per iteration, on the ranks to blame; None where it is not known.
        true_as_well: ids of findings that are right though nobody planted them.
        twin: name of the same without the cause.
    """

    name: str
    folder: Path
    cause: str
    finding: str | None = None
    ranks: Sequence[int] = ()
    planted_ms: float | None = None
    true_as_well: frozenset[str] = frozenset()
    twin: str | None = None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What was found in a capture.

    Args:
        known: what is known of it.
        findings: in their order.
        iteration_ms: the median over ranks of their median iterations.
        waiting_us: what each rank waits for others in an iteration, in the mean; of ranks of which it is known.
        waited_for_us: what others wait for it.
        communication_us: of each rank over the whole capture.
        stages: of the pipeline, as `Run.pipeline` has them; none without one.
    """

    known: Known
    findings: list[Finding]
    iteration_ms: float
    waiting_us: dict[int, float]
    waited_for_us: dict[int, float]
    communication_us: dict[int, float]
    stages: list[dict[str, Any]]

    @property
    def planted(self) -> Finding | None:
        """The finding of the cause that is known."""
        return next((finding for finding in self.findings if finding.id == self.known.finding), None)

    @property
    def place(self) -> int | None:
        """Its place among all, from 1."""
        return None if self.planted is None else self.findings.index(self.planted) + 1

    @property
    def beside(self) -> list[str]:
        """Ids of the others that are right."""
        alarms = set(self.false_alarms)
        return [each.id for each in self.findings if each is not self.planted and each.id not in alarms]

    @property
    def false_alarms(self) -> list[str]:
        """Ids of causes that are named and not there."""
        right = {self.known.finding, *self.known.true_as_well, *NO_CAUSE}
        return [finding.id for finding in self.findings if finding.id not in right]


class Here:
    """An engine that works in this process: to start others takes longer than to read captures as small as these."""

    def map(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Outcome[Any]]:
        for place, task in enumerate(tasks):
            answer, error = call(function, task)
            yield Outcome(place, answer, error)


def planted_case(case: Case) -> Known:
    """What is known of a case of tests/planted."""
    return Known(
        name=case.name,
        folder=case.folder,
        cause=f"`{case.finding}`" if case.finding else _CLEAN.get(case.name, "nothing"),
        finding=case.finding,
        ranks=[rank for rank in case.planted_ranks if rank in case.captured],
        planted_ms=_planted_ms(case),
        true_as_well=frozenset(TRUE_AS_WELL.get(case.name, ())),
        twin=case.twin,
    )


def _planted_ms(case: Case) -> float | None:
    """What a planted rank is held for in an iteration: as it was set, or as the run measured it alone."""
    if case.planted_host_ms_per_iteration is not None:
        return case.planted_host_ms_per_iteration
    measured = json.loads((case.folder / "planted.json").read_text(encoding="utf-8"))["measured"]
    if case.planted_between_iterations is not None:
        completed = str(case.planted_between_iterations[1])
        return measured["ms_after_iterations_completed"][completed] / len(case.iterations)
    return measured.get("ms_per_iteration_alone")


#: Every planted case.
PLANTED = [planted_case(case) for case in CASES.values()]


def shared_captures(captures: Path) -> list[Known]:
    """The real captures: a model whose hosts hardly keep up, so that late hosts are true of each of them.

    Args:
        captures: their folder.
    """
    rows: list[dict[str, Any]] = [
        {
            "name": "kineto/plant_data",
            "cause": "`data_loading`: 30 ms before each of 4 micro-batches",
            "finding": "data_loading",
            "ranks": [0, 1, 2, 3],
            "planted_ms": 120.0,
            "true_as_well": _LATE_HOSTS,
        },
        {
            "name": "kineto/plant_straggler",
            "cause": "`straggler_compute`: 160 more matrix products",
            "finding": "straggler_compute",
            "ranks": [2],
            "planted_ms": 26.5,  # 196 ms of compute in two iterations, against 143
            "true_as_well": _LATE_HOSTS,
        },
        {
            "name": "kineto/tp2_dp2",
            "cause": "nothing; the hosts of two ranks are late",
            "finding": "straggler_host",
            "ranks": [1, 3],
            "true_as_well": _LATE_HOSTS,
        },
        {
            "name": "kineto/tp2_dp2_overlap",
            "cause": "nothing; hosts are late",
            "true_as_well": _LATE_HOSTS,
        },
        {
            "name": "kineto/pp2_dp2",
            "cause": "nothing; each exchange between stages waits for the device (`model.batch_p2p_sync`)",
            "finding": "host_sync",
            "ranks": [0, 1, 2, 3],
            "true_as_well": _LATE_HOSTS,
        },
        {
            "name": "nsys/tp2_dp2",
            "cause": "nothing; the hosts of two ranks are late",
            "finding": "straggler_host",
            "ranks": [0, 2],
            "true_as_well": _LATE_HOSTS,
        },
    ]
    return [Known(folder=captures / row["name"], **row) for row in rows]


def judge(known: Known, tables: Path) -> Judged:
    """Analyse a capture as a user does.

    Args:
        known: which one.
        tables: an empty folder for what is kept of it.
    """
    with Run(known.folder, parquet=tables, engine=Here()) as run:
        ranks = run.ranks().to_pylist()
        durations = _by_rank(run.iterations().to_pylist(), "duration_us")
        return Judged(
            known=known,
            findings=run.findings(),
            iteration_ms=median(median(each) for each in durations.values()) / 1e3,
            waiting_us={rank: mean(each) for rank, each in _by_rank(ranks, "waiting_us").items()},
            waited_for_us={rank: mean(each) for rank, each in _by_rank(ranks, "waited_for_us").items()},
            communication_us={row["rank"]: row["communication_us"] for row in run.breakdown().to_pylist()},
            stages=run.pipeline().to_pylist(),
        )


def _by_rank(rows: Iterable[dict[str, Any]], column: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in rows:
        if row[column] is not None:
            found.setdefault(row["rank"], []).append(row[column])
    return found


def markdown(judged: Sequence[Judged]) -> str:
    """The table."""
    clean = {each.known.name: each for each in judged}
    rows = [_row(each, clean.get(each.known.twin or "")) for each in judged]
    lines = [_HEADINGS, tuple("---" for _ in _HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(judged: Judged, clean: Judged | None) -> tuple[str, ...]:
    known, found = judged.known, judged.planted
    recoverable = found.recoverable_us_per_iteration if found else None
    return (
        known.name,
        known.cause,
        _ranks(known.ranks),
        _rounded(known.planted_ms),
        _rounded(None if clean is None else judged.iteration_ms - clean.iteration_ms),
        f"`{found.id}`" if found else "**not found**" if known.finding else "nothing",
        str(judged.place or ""),
        _ranks(found.ranks if found else ()),
        _rounded(None if recoverable is None else recoverable / 1e3),
        str(found.confidence) if found else "",
        ", ".join(f"`{each}`" for each in judged.beside),
        ", ".join(f"**{each}**" for each in judged.false_alarms) or "none",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _rounded(value_ms: float | None) -> str:
    """Two digits, so that the last bit of a sum changes no table."""
    return "" if value_ms is None else f"{value_ms:.0f}" if abs(value_ms) >= 10 else f"{value_ms:.1f}"


def replaced(page: str, block: str, table: str) -> str:
    """A page with the table between a block's two markers exchanged.

    Args:
        page: its text.
        block: name in the markers.
        table: the new table.
    """
    begin, end = f"<!-- {block}: begin -->\n", f"<!-- {block}: end -->\n"
    head, _, rest = page.partition(begin)
    _, marker, tail = rest.partition(end)
    if not marker:
        raise ValueError(f"the page lacks the markers {begin.strip()} and {end.strip()}")
    return f"{head}{begin}\n{table}\n{end}{tail}"
