"""Tables of what an integration measured inside the window, from the manifests: memory of phases, and DeepSpeed's timers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, TypeVar

from bridge_profiling.manifest import RankCapture
from bridge_profiling.report import words
from bridge_profiling.report.views import TableView, ms, of, table
from bridge_profiling.typed_json import read_typed

Measured = TypeVar("Measured")


@dataclass
class PhaseMemory:
    """`framework.phase_memory`: a row for each phase of each captured iteration."""

    phase: list[str]
    before_bytes: list[int]
    after_bytes: list[int]
    peak_bytes: list[int]

    def __post_init__(self) -> None:
        if len({len(self.phase), len(self.before_bytes), len(self.after_bytes), len(self.peak_bytes)}) > 1:
            raise ValueError("its columns have different lengths")


@dataclass
class WallClock:
    """`framework.wall_clock_breakdown`: DeepSpeed's timers, a value for each captured iteration."""

    timers_ms: dict[str, list[float]] = field(default_factory=dict)


def phase_memory(manifests: Iterable[RankCapture]) -> TableView:
    """Device memory of each rank's phases: means before and after, and the highest peak."""
    rows = []
    for capture, found in _measured(manifests, "phase_memory", PhaseMemory):
        for phase in dict.fromkeys(found.phase):
            columns = (found.before_bytes, found.after_bytes, found.peak_bytes)
            mine = [row for name, *row in zip(found.phase, *columns, strict=True) if name == phase]
            before, after, peak = zip(*mine, strict=True)
            known = {"before": fmean(before), "after": fmean(after), "peak": max(peak)}
            rows.append({"rank": capture.rank, "phase": phase, "count": len(mine), **known})
    cells = {
        "rank": of("rank", str),
        "phase": lambda row: row["phase"],
        "count": of("count"),
        "before, mean": of("before", words.memory),
        "after, mean": of("after", words.memory),
        "peak": of("peak", words.memory),
    }
    return table("phase-memory", "Device memory allocated by phase, captured iterations", rows, cells, of_ranks=True)


def wall_clock(manifests: Iterable[RankCapture]) -> TableView:
    """DeepSpeed's wall-clock breakdown: mean, deviation and share of the captured iterations."""
    rows = []
    for capture, found in _measured(manifests, "wall_clock_breakdown", WallClock):
        iterations_ns = capture.durations_ns(profiled=True)
        for name, values_ms in found.timers_ms.items():
            if values_ms:
                mean_us = fmean(values_ms) * 1e3
                share = mean_us * 1e3 / fmean(iterations_ns) if any(iterations_ns) else None
                known: dict[str, Any] = {"mean_us": mean_us, "deviation_us": pstdev(values_ms) * 1e3, "share": share}
                rows.append({"rank": capture.rank, "name": name, **known})
    columns = {
        "rank": of("rank", str),
        "mean ms": ms("mean_us"),
        "deviation ms": ms("deviation_us"),
        "share of iteration": of("share", words.percent),
        "timer": lambda row: row["name"],
    }
    return table("wall-clock", "DeepSpeed's wall-clock breakdown, captured iterations", rows, columns, name_last=True)


def _measured(manifests: Iterable[RankCapture], key: str, kind: type[Measured]) -> Iterator[tuple[RankCapture, Measured]]:
    """What each rank measured; ranks without it, or where it is not as we write it, are left out."""
    for capture in manifests:
        content = (capture.manifest.framework or {}).get(key)
        if isinstance(content, dict):
            try:
                yield capture, read_typed(content, kind, key)
            except ValueError:
                continue
