"""Rows of a run's tables and figures, computed when they are first read; chooses the ranks that have a row of their own."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.compare.bench import AgainstBench, with_alone
from bridge_profiling.facts.device import ranks_without_work
from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.words import named_ranks
from bridge_profiling.findings import Event
from bridge_profiling.manifest import RankCapture
from bridge_profiling.report import figures, rows
from bridge_profiling.report.comparison_view import bench_communication
from bridge_profiling.report.rows import Rows, of_source
from bridge_profiling.report.timeline import Timeline, timeline_of
from bridge_profiling.report.verdict import Conclusion
from bridge_profiling.report.views import Cell, Target
from bridge_profiling.traces.types import RankInfo

#: Up to the first number of ranks, each has a row. Beyond, ranks are aggregated, and the second number have rows of their own.
EVERY_RANK, NAMED_RANKS = 64, 16

#: Ranks on a terminal, and in the timeline at first: as many as fit a screen.
ON_A_SCREEN = 8

#: Rows of a table, and a note below it.
_Noted = tuple[Rows, str]


def ranks_to_show(facts: RunFacts, found: Conclusion, most: int = NAMED_RANKS, every: int = EVERY_RANK) -> list[int]:
    """The ranks with a row of their own: all up to `every`, else the `most` interesting ones.

    Those are the responsible ones of findings about few ranks, slow and fast ones, and the first of each pipeline stage.
    """
    everyone = [info.rank for info in facts.infos]
    if len(everyone) <= every:
        return everyone
    responsible = [rank for each in found.findings if len(each.ranks) <= most // 2 for rank in each.ranks[:4]]
    slowest = facts.stragglers["rank"].to_pylist()
    first = [members[0] for members in stages(facts.infos).values()]
    wanted = [
        *responsible, *slowest[: most // 4], *slowest[-2:], *first[: most // 2], *slowest[most // 4 :], *everyone
    ]  # fmt: skip
    known = set(everyone)
    return sorted(list(dict.fromkeys(rank for rank in wanted if rank in known))[:most])


def stages(infos: Iterable[RankInfo]) -> dict[str, list[int]]:
    """Ranks by pipeline stage; one group of all where there is one stage, or none is known."""
    found: dict[str, list[int]] = defaultdict(list)
    for info in infos:
        stage, count = (info.coordinates or {}).get("pp", (0, 1))
        found[f"pipeline stage {stage}" if count > 1 else "all ranks"].append(info.rank)
    return dict(found)


@dataclass(frozen=True)
class Answers:
    """What a run's tables, figures and sections show, each by its id; `tables.toml` names its attributes and methods.

    Args:
        facts: of the run.
        place: `analyze` (tables about all profilers on a terminal), `screen` (a report on a terminal) or `page`.
        found: the conclusion; None for `analyze`.
        bench: the run compared with benchmarks.
        folder: of the page.
    """

    facts: RunFacts
    place: str
    found: Conclusion | None
    bench: AgainstBench | None
    folder: Path = Path()

    # Which ranks and iterations.

    @cached_property
    def ranks(self) -> list[int]:
        """Those with a row of their own."""
        few = {} if self.place == "page" else {"most": ON_A_SCREEN, "every": ON_A_SCREEN}
        return [] if self.found is None else ranks_to_show(self.facts, self.found, **few)

    @cached_property
    def captured(self) -> Rows:
        """Rows of `RunFacts.iterations`."""
        return self._own("iterations").to_pylist()

    @cached_property
    def timeline(self) -> Timeline:
        """Of the page."""
        return timeline_of(self.facts, self.ranks)

    @property
    def _iteration_count(self) -> int:
        return len({row["iteration"] for row in self.captured}) or 1

    @cached_property
    def _on_cpus(self) -> bool:
        """Whether no rank has device work, but iterations."""
        if self.found is not None:
            return bool(self.found.on_cpus)
        return 0 < self.facts.breakdown.num_rows == len(self._without_device) and bool(self.hosts)

    @cached_property
    def _without_device(self) -> set[tuple[int, str]]:
        breakdown = self.facts.breakdown
        return {
            (rank, source) for source in set(breakdown["source"].to_pylist()) for rank in ranks_without_work(breakdown, source)
        }

    @property
    def _attribution(self) -> Rows:
        return [] if self.found is None else self.found.on_devices

    @property
    def _every(self) -> int:
        """Up to this number of ranks, each has a bar."""
        return EVERY_RANK if self.place == "page" else ON_A_SCREEN

    @property
    def _combined(self) -> bool:
        """Whether bars are means of ranks."""
        return len(self._attribution) > self._every

    def _own(self, name: str) -> pa.Table:
        """A table of facts, of the main profiler unless the place shows all."""
        table = getattr(self.facts, name)
        return table if self.place == "analyze" else of_source(self.facts, table)

    # Rows of tables.

    def breakdown(self) -> Rows:
        """Device time, unless no rank has any."""
        return [] if self._on_cpus else self.facts.breakdown.to_pylist()

    def typical(self) -> Rows:
        """Typical iterations; ranks without a device have a duration only."""
        known = {"rank", "source", "duration_ns", "iterations"}
        return [] if self._on_cpus else [
            row | dict.fromkeys(row.keys() - known) if (row["rank"], row["source"]) in self._without_device else row
            for row in self.facts.typical_iteration.to_pylist()
        ]  # fmt: skip

    @cached_property
    def hosts(self) -> Rows:
        """The mean iteration of each rank on CPUs."""
        if self.found is not None:
            return self.found.on_cpus[:EVERY_RANK]
        return rows.mean_host_iterations(self.facts.host_iterations.to_pylist())

    @cached_property
    def bars(self) -> Rows:
        """Rows of `RunFacts.attribution` with labels: each rank, or means of many ranks and some ranks."""
        by_rank = {row["rank"]: row for row in self._attribution}
        slow = {row["rank"] for row in self.facts.stragglers.to_pylist() if row["verdict"] == "stable"}
        found: Rows = []
        for stage, members in list(stages(self.facts.infos).items())[: self._every] if self._combined else ():
            if mine := [by_rank[rank] for rank in members if rank in by_rank]:
                means = {part: fmean(row[part] for row in mine) for part in ("duration_ns", *{*BY_CAUSE, *BY_ACTIVITY})}
                found.append({"label": f"{stage}, mean of {len(mine)}", **means})
        shown = [rank for rank in self.ranks if rank in by_rank]
        found += [by_rank[rank] | {"label": f"rank {rank}{' (slow)' if rank in slow else ''}"} for rank in shown]
        hidden = {*BY_CAUSE, *BY_ACTIVITY}.difference(*(figures.visible_parts(found, view) for view in figures.VIEWS))
        return [row | dict.fromkeys(hidden, 0.0) for row in found]

    def spread(self) -> Rows:
        """How the ranks of a large job differ: a row for each part of an iteration."""
        lines = []
        for part in ("duration_ns", *figures.visible_parts(self._attribution), *BY_ACTIVITY[1:]) if self._combined else ():
            values = sorted(row[part] for row in self._attribution)
            low, high = (values[min(int(share * len(values)), len(values) - 1)] for share in (0.05, 0.95))
            name = "iteration" if part == "duration_ns" else figures.PARTS[part][0]
            ends = {"minimum_ns": values[0], "low_ns": low, "high_ns": high, "maximum_ns": values[-1]}
            lines.append({"part": name, "median_ns": median(values), **ends})
        return lines

    def checks(self) -> Rows:
        """The checklist, if any check has an answer."""
        checks = [] if self.found is None else self.found.scorecard
        return checks if any(row["value"] is not None for row in checks) else []

    def phases(self) -> Rows:
        """Phases by name; for a screen without short ones of libraries."""
        on_screen = self.found is not None
        of_device = bool(self.found.on_devices) or not self.found.without_device if self.found else not self._on_cpus
        merged = rows.phases(self._own("phases").to_pylist(), library=not on_screen)
        return [row | {"of_device": of_device} for row in merged]

    @cached_property
    def phases_of_ranks(self) -> Rows:
        """Phases by name and rank, with the place of the longest call in the timeline."""
        named, of_device = ("rank", "name", "longest_iteration", "longest_start_ns", "longest_ns"), not self._on_cpus
        ranks = set(self.ranks)
        found = [row for row in self._own("phases").to_pylist() if row["rank"] in ranks]
        places = [self.timeline.target(Event(*(row[name] for name in named))) for row in found]
        return [
            rows.with_counters(row)
            | {"of_device": of_device, "on_host": not of_device}
            | {"longest": Cell("", row["longest_ns"], target=place) if any(places) else None}
            for row, place in zip(found, places, strict=True)
        ]

    def operators(self) -> Rows:
        """Operators of all ranks by name, with the place of the longest call in the timeline."""
        of_ranks = self._own("operators")
        ranks = {"ranks": named_ranks(sorted(set(of_ranks["rank"].to_pylist())))}
        places = self._longest_calls() if self.place == "page" else {}
        links = {name: {"longest": Cell("", target=target)} for name, target in places.items()}
        empty = {"longest": Cell("")} if links else {}
        return [row | ranks | links.get(row["name"], empty) for row in rows.operators(of_ranks)]

    def _longest_calls(self) -> dict[str, Target]:
        """Where the timeline shows the longest call of each operator; of those whose iteration is on the page."""
        found: dict[str, Target] = {}
        if not self.timeline.segments:
            return found
        calls = self._own("longest_calls")
        shown = calls.filter(pc.is_in(calls["rank"], pa.array(self.timeline.ranks, pa.int32()))).to_pylist()
        for row in sorted(shown, key=lambda row: -row["duration_ns"]):
            if row["name"] not in found:
                place = self.timeline.target_at(row["rank"], row["start_ns"], row["duration_ns"])
                found |= {row["name"]: place} if place else {}
        return found

    @cached_property
    def by_group(self) -> Rows:
        """Communication per iteration."""
        return rows.by_group(self.facts.communication.to_pylist(), self._iteration_count)

    @property
    def timed_groups(self) -> Rows:
        """Those with the most time whose transfer is known."""
        return [row for row in self.by_group[: rows.MOST_GROUPS] if row["transfer_ns"] is not None]

    def by_size(self) -> Rows:
        """The same by size of message."""
        return rows.by_size(with_alone(self.facts).to_pylist(), self._iteration_count)

    def bench_communication(self) -> Rows:
        """Communication compared with benchmarks."""
        return bench_communication(self.bench)

    def manifests(self) -> list[RankCapture]:
        """Of the ranks with a row of their own."""
        return [each for each in self.facts.manifests if each.rank in self.ranks]

    def captures(self) -> _Noted:
        """How complete each rank's capture is; of many complete ones the first."""
        infos, found, quiet = self.facts.infos, list[dict[str, Any]](), 0
        manifests = {manifest.rank: manifest for manifest in self.facts.manifests}
        offsets = {row["rank"]: row for row in self.facts.clock_offsets.to_pylist()} if len(infos) > 1 else {}
        boundaries = grouped(self.captured, "rank")
        for info in infos:
            manifest, offset = manifests.get(info.rank), offsets.get(info.rank, {})
            status = manifest.manifest.status if manifest else "partial" if info.partial else "no manifest"
            sound = status in ("complete", "no manifest") and not info.error
            quiet += sound
            if sound and len(infos) > EVERY_RANK and quiet > NAMED_RANKS:
                continue
            boundary = [row["boundary"] for row in boundaries.get(info.rank, ())]
            edges = f", {sum(boundary)} at the profiler's edges" if any(boundary) else ""
            row = {
                "rank": f"rank {info.rank}",
                "status": f"{status}{', cut short' if info.error and info.judged else '' if info.judged else ', not judged'}",
                "iterations": f"{len(boundary)}{edges}",
                **{name: offset.get(name) for name in ("offset_ns", "residual_ns")},
                "host": info.host or None,
            }
            for name, profiled in (("profiled", True), ("not_profiled", False)):
                durations_ns = manifest.durations_ns(profiled=profiled) if manifest else []
                row[name] = median(durations_ns) if durations_ns else None
            found.append(row)
        left = quiet - NAMED_RANKS if len(infos) > EVERY_RANK else 0
        return found, f"{left:,} more ranks without problems." if left > 0 else ""

    def files(self) -> _Noted:
        """Trace files of the ranks with a row of their own."""
        infos = self.facts.infos
        found: Rows = [
            {"rank": info.rank, "copy": Cell("", copy=file), "file": Cell(file, link=_link(Path(file), self.folder))}
            for info in infos
            if info.rank in set(self.ranks)
            for file in info.files
        ]
        left = len(infos) - len({row["rank"] for row in found})
        return found, f"{left:,} more ranks." if left else ""

    @cached_property
    def compared(self) -> Rows:
        """Rows of `RunFacts.ranks`."""
        return self.facts.ranks.to_pylist()

    @cached_property
    def waiting(self) -> rows.WaitMatrix:
        """Who waits for whom in the marked iterations, if any are."""
        ranks, waits = [info.rank for info in self.facts.infos], self.facts.waits.to_pylist()
        marked = [row for row in waits if row["iteration"] is not None]
        iterations = len({row["iteration"] for row in self.compared}) or 1
        return rows.wait_matrix(marked or waits, iterations, ranks)


def _link(file: Path, folder: Path) -> str:
    """From the page to a file; it stays valid if both are moved together."""
    try:
        relative = os.path.relpath(file, folder)
    except ValueError:  # another drive
        return file.as_uri()
    # The leading dot: otherwise a directory whose name has a colon would be read as a scheme.
    return "./" + quote(os.fsencode(Path(relative).as_posix()))
