"""What the page and the terminal show of a run: every question asked once, the rows as plain data. Words come elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.attribution.device import ranks_without_work
from bridge_profiling.analysis.compare.bench import AgainstBench
from bridge_profiling.analysis.findings import Finding, Thresholds
from bridge_profiling.analysis.findings.evidence import profiler_cost_us
from bridge_profiling.manifest import RankCapture
from bridge_profiling.report import rank_choice
from bridge_profiling.traces.types import RankInfo

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Summary:
    """What is needed to say where the time went, who is to blame and how sure that is.

    Args:
        path: the run.
        source: the profiler whose captures answer across ranks: `kineto` or `nsys`.
        infos: what is known of each rank's trace by that profiler, by rank.
        budget: rows of `Run.budget` of these, but for `without_device`.
        findings: as `Run.findings` orders them.
        manifests: what each rank wrote down about its capture.
        limitations: what the captures cannot tell.
        errors: what could not be read.
        bench: the run beside benchmarks; None without any.
        without_device: ranks whose trace has no work on a device, ascending: there is no device whose time could be divided.
    """

    path: Path
    source: str
    infos: list[RankInfo]
    budget: Rows
    findings: list[Finding]
    manifests: list[RankCapture]
    limitations: list[str]
    errors: list[str]
    bench: AgainstBench | None = None
    without_device: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Captured ranks, ascending."""
        return [info.rank for info in self.infos]

    @property
    def profiler_cost_us(self) -> dict[int, float]:
        """What the profiler made an iteration longer, by rank; empty where no manifest tells."""
        return profiler_cost_us(self.manifests)


@dataclass(frozen=True)
class Answers:
    """All that the page shows, but for its timeline.

    Args:
        summary: what the terminal shows too.
        iterations: rows of `Run.iterations`.
        ranks: rows of `Run.ranks`.
        waits: rows of `Run.waits`.
        stragglers: rows of `Run.straggler`.
        pipeline: rows of `Run.pipeline`.
        communication: rows of `Run.communication`.
        kernels: rows of `Run.kernels`, all ranks together.
        operators: operators by name, all asked ranks together.
        operator_ranks: which ranks those are.
        memory: rows of `Run.memory`.
        memory_timeline: rows of `Run.memory_timeline` by rank and device.
        memory_by_site: rows of `memory_over_time` by rank and device.
        offsets: rows of `Run.clock_offsets` by rank.
    """

    summary: Summary
    iterations: Rows
    ranks: Rows
    waits: Rows
    stragglers: Rows
    pipeline: Rows
    communication: Rows
    kernels: Rows
    operators: Rows
    operator_ranks: list[int]
    memory: Rows
    memory_timeline: Mapping[tuple[int, int], Rows]
    memory_by_site: Mapping[tuple[int, int], Rows]
    offsets: Mapping[int, dict[str, Any]]


def summarize(run: Run, thresholds: Thresholds | None = None) -> Summary:
    """Ask what the verdict needs.

    Args:
        run: whose captures are read now, unless they were.
        thresholds: above or below what a number becomes a finding; None for the defaults.
    """
    # Findings first: they ask of each capture what nobody else does, and captures are read once for all of it.
    findings = run.findings(thresholds)
    source = run.main_source
    idle = ranks_without_work(run.breakdown(), source)
    return Summary(
        path=run.path,
        source=source,
        infos=[info for info in run.infos if info.source == source],
        budget=[row for row in run.attribution().to_pylist() if row["source"] == source and row["rank"] not in idle],
        findings=findings,
        manifests=run.manifests,
        limitations=run.limitations,
        errors=run.errors,
        bench=run.against_bench,
        without_device=idle,
    )


def ask(run: Run, thresholds: Thresholds | None = None) -> Answers:
    """Ask all that the page shows.

    Args:
        run: whose captures are read now, unless they were.
        thresholds: as in `summarize`.
    """
    run.prefetch("idle_causes", "launch_statistics", "operators")
    summary = summarize(run, thresholds)
    ranks = run.ranks().to_pylist()
    answers: dict[str, Any] = {
        "iterations": [row for row in run.iterations().to_pylist() if row["source"] == summary.source],
        "ranks": ranks,
        "waits": run.waits().to_pylist(),
        "stragglers": run.stragglers().to_pylist(),
        "pipeline": run.pipeline().to_pylist(),
        "communication": run.communication().to_pylist(),
        "kernels": [row for row in run.kernels(by_rank=False).to_pylist() if row["source"] == summary.source],
        "memory": run.memory().to_pylist(),
        "offsets": {row["rank"]: row for row in run.clock_offsets().to_pylist()} if len(summary.infos) > 1 else {},
    }
    operators = [row for row in run.operators().to_pylist() if row["source"] == summary.source]
    held = sorted({row["rank"] for row in answers["memory"]})
    shown = rank_choice.of_memory(answers["memory"], held)
    by_site = run.ask("memory_over_time", ranks=tuple(shown)) if answers["memory"] else None
    timeline = run.memory_timeline() if answers["memory"] else None
    return Answers(
        # Questions across ranks add to what cannot be told.
        summary=_with_limitations(summary, run),
        operators=_of_all_ranks(operators),
        operator_ranks=sorted({row["rank"] for row in operators}),
        memory_timeline=_by_device([row for row in timeline.to_pylist() if row["rank"] in shown] if timeline else []),
        memory_by_site=_by_device(by_site.to_pylist() if by_site else []),
        **answers,
    )


def _with_limitations(summary: Summary, run: Run) -> Summary:
    return Summary(**{**vars(summary), "limitations": run.limitations, "errors": run.errors})


def _of_all_ranks(operators: Rows) -> Rows:
    """Operators by name: counts and times added up, the longest call of any rank."""
    found: dict[str, dict[str, Any]] = {}
    for row in operators:
        mine = found.setdefault(
            row["name"], {"name": row["name"], "count": 0, "self_us": 0.0, "total_us": 0.0, "device_us": 0.0, "max_us": 0.0}
        )
        for name in ("count", "self_us", "total_us", "device_us"):
            mine[name] += row[name] or 0
        mine["max_us"] = max(mine["max_us"], row["max_us"])
    return sorted(found.values(), key=lambda row: (-row["self_us"], row["name"]))


def _by_device(rows: Rows) -> dict[tuple[int, int], Rows]:
    found: dict[tuple[int, int], Rows] = {}
    for row in rows:
        found.setdefault((row["rank"], row["device"]), []).append(row)
    return found
