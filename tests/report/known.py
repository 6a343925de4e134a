"""Answers and findings made for a claim."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
from rich.console import Console

from bridge_profiling.common.typed_json import read_typed
from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.findings import Confidence, Finding
from bridge_profiling.manifest import Manifest, RankCapture
from bridge_profiling.report.run_view import screen_view
from bridge_profiling.report.terminal import print_report
from bridge_profiling.report.verdict import Conclusion, conclude
from bridge_profiling.traces.types import Caveat, RankInfo

MS = 1_000_000.0


def row(rank: int, duration_ns: float = 100 * MS, iterations: int = 10, **parts_ns: float) -> dict[str, Any]:
    """A row of a budget: what is not named is compute."""
    found: dict[str, Any] = dict.fromkeys((*BY_CAUSE, *BY_ACTIVITY), 0.0) | parts_ns
    found["compute_ns"] = duration_ns - sum(parts_ns.values())
    found["idle_ns"] = duration_ns - found["compute_ns"]
    known = {"rank": rank, "source": "kineto", "iterations": iterations, "waiting_known": True, "duration_ns": duration_ns}
    return known | found


def finding(**known: Any) -> Finding:
    """A finding with what a claim needs to know."""
    usual: dict[str, Any] = {"id": "data_loading", "ranks": [0, 1], "confidence": Confidence.high}
    usual |= {"recoverable_ns_per_iteration": 30 * MS, "at_most_ns_per_iteration": 40 * MS, "evidence": {"waiting_ns": 30 * MS}}
    usual["title"] = "Data loading holds all ranks for 30 ms of each iteration"
    usual["action"] = "Raise dataset.num_workers. Then look at the disks."
    return Finding(**(usual | known))


_READ = ("kind", "name", "group", "total_ns", "role", "device_ns")

#: A table without rows, with the columns that are read of tables besides their rows.
_NOTHING = pa.table(
    {name: pa.array([], pa.float64() if name.endswith("ns") else pa.string()) for name in ("rank", "source", *_READ)}
)


class Known:
    """Facts about a run whose ranks have these budgets; `known` are others, tables as rows."""

    path, source, captures = Path("run7"), "kineto", SimpleNamespace(bench=None)

    def __init__(self, rows: list[dict[str, Any]], findings: list[Finding] | None = None, **known: Any) -> None:
        world, without_device = known.pop("world_size", len(rows)), known.pop("without_device", [])
        shared = {"rank_source": "trace", "source": self.source, "world_size": world}
        ranks = [each["rank"] for each in rows]
        self.infos = known.pop("infos", [RankInfo(rank=rank, files=[f"rank-{rank}.json"], **shared) for rank in ranks])
        self.unjudged, self.manifests = [], known.pop("manifests", [])
        self.errors, self.capture_caveats = known.pop("errors", []), []
        self._findings = findings or []
        busy = [
            {"rank": rank, "source": self.source}
            | dict.fromkeys(("busy_ns", "least_busy_ns"), float(rank not in without_device))
            for rank in ranks
        ]
        self._rows = known | {"attribution": rows, "breakdown": busy}

    @property
    def conclusion(self) -> Conclusion:
        return conclude(cast("Any", self), self._findings)

    def caveats(self, *names: str) -> list[Caveat]:
        return []

    def __getattr__(self, name: str) -> pa.Table:
        return pa.Table.from_pylist(rows) if (rows := self._rows.get(name)) else _NOTHING


def printed(run: Any, width: int = 80, **options: Any) -> str:
    """What `bridge-profiling report` prints, by default in a pipe; `options` are Rich's."""
    out = io.StringIO()
    print_report(
        screen_view(run if isinstance(run, Known) else run.facts, run.conclusion),
        Console(file=out, highlight=False, width=width, **options),
    )
    return out.getvalue()


def manifest(rank: int, profiled_ms: list[int], plain_ms: list[int]) -> RankCapture:
    """A rank's manifest: profiled iterations after plain ones."""
    first = len(plain_ms) + 2
    captured = list(range(first, first + len(profiled_ms)))
    numbers = [0, *range(1, len(plain_ms) + 1), *captured]
    content = {"rank": rank, "status": "complete", "window": {"start": first, "end": first + len(profiled_ms)}, "profilers": []}
    content["captured"] = {"iterations": captured}
    durations_ns = [each * 1_000_000 for each in (500, *plain_ms, *profiled_ms)]
    content["durations_ns"] = {"iteration": numbers, "duration_ns": durations_ns}
    return RankCapture(Path("run7"), "iter-12-14", read_typed(content, Manifest, "manifest"))
