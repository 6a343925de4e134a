"""A run's answers as a view: for a page, and for a terminal. Chooses the ranks that have a row of their own.

`text.toml` declares the sections of each, with their tables and figures; `tables.toml` says which rows a table has.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from bridge_profiling.printable import shell_path
from bridge_profiling.report import figures, measurements, rows, tables, words
from bridge_profiling.report.comparison_view import bench_communication, bench_section
from bridge_profiling.report.findings_view import Pictures, findings_view
from bridge_profiling.report.flame_graph import flame_graph_section
from bridge_profiling.report.rows import Rows, of_source
from bridge_profiling.report.timeline import Timeline, iteration_name, timeline_of
from bridge_profiling.report.verdict import Conclusion, notices, verdict
from bridge_profiling.report.views import Cell, Figure, FigureView, PageView, SectionView, TableView, Target, captioned, section
from bridge_profiling.traces.types import RankInfo

#: Up to the first number of ranks, each has a row. Beyond, ranks are aggregated, and the second number have rows of their own.
EVERY_RANK, NAMED_RANKS = 64, 16

#: Ranks on a terminal, and in the timeline at first: as many as fit a screen.
_ON_A_SCREEN = 8

#: Ranks whose memory is drawn.
_MEMORY_RANKS = 4

#: Functions that make a table's rows of others.
_FUNCTIONS = {"rows": rows, "measurements": measurements}

#: Rows of a table, and a note below it.
_Noted = tuple[Rows, str]

#: Figures by the names of their variants; None where there is nothing to draw.
_Variants = dict[str, Figure | None]

#: Paragraphs of a section, and its other fields.
_More = tuple[Sequence[str], dict[str, Any]]


def run_tables(facts: RunFacts, bench: AgainstBench | None) -> list[TableView]:
    """The tables of `bridge-profiling analyze`."""
    shown = Answers(facts, "analyze", None, bench)
    return [table for id in words.resource("text")["pages"]["analyze"] if (table := shown.table(id)).rows]


def screen_view(facts: RunFacts, found: Conclusion) -> PageView:
    """What a terminal shows of a run: the verdict, where the time goes, the findings, and benchmarks."""
    shown = Answers(facts, "screen", found, found.bench)
    sections = [
        shown.section("host" if found.on_cpus else "budget"),
        shown.section("scorecard"),
        section("phases", tables=[shown.table("phases")]),
        bench_section(found.bench),
    ]
    findings = findings_view(facts, found)
    return PageView("report", _title(facts), verdict(facts, found), sections, findings=findings, notices=notices(facts))


def page_view(facts: RunFacts, found: Conclusion, output: Path) -> PageView:
    """A run's page, at `output`; its links to the traces are relative to that."""
    shown = Answers(facts, "page", found, found.bench, output.absolute().parent)
    pages, timeline, bench = words.resource("text")["pages"], shown.timeline, found.bench
    named = [(id.rstrip("?"), id[-1] == "?") for id in pages["cpus" if found.on_cpus else "devices"]]
    sections = [view for id, optional in named if not (view := shown.section(id)).empty or not optional]
    named_bench = f", bench={bench.file!r}" if bench and not bench.found_beside_captures else ""
    memory = facts.memory.to_pylist()
    return PageView(
        "report",
        _title(facts),
        verdict(facts, found),
        sections,
        facts=[*measurements.capture_facts(facts, shown.captured, memory), *measurements.training_facts(facts)],
        findings=findings_view(facts, found, Pictures(facts, found, timeline)),
        notices=notices(facts),
        timeline=timeline.data() if timeline.segments else None,
        opened=f"from bridge_profiling.run import Run; Run({str(facts.path.absolute())!r}{named_bench})",
    )


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


def _title(facts: RunFacts) -> str:
    return facts.path.absolute().name or "run"


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

    def table(self, id: str) -> TableView:
        """A table as it is declared."""
        source, _, function = tables.declared(id)["rows"].partition(" ")
        scope, _, name = source.rpartition(".")
        made: Any = self._own(name) if scope == "own" else getattr(self.facts if scope else self, name)
        made = made.to_pylist() if scope else made() if callable(made) else made
        found, note = made if isinstance(made, tuple) else (made, "")
        if function:
            module, _, name = function.partition(".")
            found = getattr(_FUNCTIONS[module], name)(found)
        # Those of a device for each rank, and one more to see that there are more.
        most = len(self.facts.breakdown) + 1 if (id, self.place) == ("memory-devices", "analyze") else None
        return tables.view(id, found, most, place=self.place, note=note)

    def section(self, id: str) -> SectionView:
        """A section as it is declared, with what its method adds to that."""
        if id == "flame":
            return next(iter(flame_graph_section(self.facts, self.captured)), section(id))
        texts = words.text("sections", id)
        declared = words.text("sections", texts.get("like", id))
        drawn = [figure for name in declared.get("figures", ()) for figure in self._figure(name)]
        found = [self.table(name) for name in declared.get("tables", ())]
        paragraphs, more = getattr(self, f"_of_{id}", lambda: ((), {}))()
        return section(id, *paragraphs, figures=drawn, tables=found, **more)

    def _figure(self, id: str) -> list[FigureView]:
        variants = _FIGURES[id](self)
        return captioned(id, variants) if isinstance(variants, dict) else variants

    # Which ranks and iterations.

    @cached_property
    def ranks(self) -> list[int]:
        """Those with a row of their own."""
        few = {} if self.place == "page" else {"most": _ON_A_SCREEN, "every": _ON_A_SCREEN}
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
        return EVERY_RANK if self.place == "page" else _ON_A_SCREEN

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
        found = [row for row in self._own("phases").to_pylist() if row["rank"] in set(self.ranks)]
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

    def bench_copies(self) -> Rows:
        """Copies compared with benchmarks."""
        return [] if self.bench is None else self.bench.copies.to_pylist()

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

    def _counters_over_time(self) -> _Variants:
        """The counters that nsys sampled, in percent."""
        over_time = self.facts.gpu_metrics_over_time().to_pylist() if self.facts.gpu_metrics.num_rows else []
        drawn = [row for row in over_time if row["rank"] in self.ranks[:_ON_A_SCREEN] and "%" in row["metric"]]
        courses = sorted(grouped(drawn, "rank", "device").items())
        return {f"rank {rank}, device {device}": figures.counters_figure(course) for (rank, device), course in courses}

    def _memory(self) -> list[FigureView]:
        devices = self.facts.memory.to_pylist()
        peaks = [row["rank"] for row in sorted(devices, key=lambda row: -(row["peak_bytes"] or 0))]
        growing = [row["rank"] for row in sorted(devices, key=lambda row: -(row["growth_bytes_per_iteration"] or 0))]
        drawn = set(list(dict.fromkeys([*peaks[:2], *growing[:2], *peaks]))[:_MEMORY_RANKS])
        return memory_over_time_view(self.facts, drawn, "memory") if drawn else []

    # What sections have besides.

    def _of_budget(self) -> _More:
        notes = [] if all(row["waiting_known"] for row in self._attribution) else [words.say("with_waiting")]
        return (), {"notes": [*notes, *([words.say("means", len(self._attribution))] if self._combined else [])]}

    def _of_phases(self) -> _More:
        return [words.say("device_time_inside")] if self.phases_of_ranks and not self._on_cpus else (), {}

    def _of_iterations(self) -> _More:
        block = -(-len({row["rank"] for row in self.compared}) // figures.MOST_ROWS)
        slowest = Counter(row["rank"] for row in self.compared if row["place"] == "slowest")
        often = [f"rank {rank} in {count} of {slowest.total()}" for rank, count in slowest.most_common(4)]
        more = f", and {len(slowest) - 4} other ranks in the rest" if len(slowest) > 4 else ""
        said = [f"Slowest by own time: {', '.join(often)} iterations{more}."] if often else []
        return said, {"notes": [words.say("rows_of_ranks", block)] if block > 1 else []}

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

    def _of_waits(self) -> _More:
        matrix, everyone = self.waiting, len(self.facts.infos)
        cells = zip(matrix.ranks, matrix.wait_ns, strict=True)
        pairs = [(wait, rank, other) for rank, row in cells for other, wait in zip(matrix.ranks, row, strict=True) if wait > 0]
        longest = [f"rank {rank} for rank {other}, {words.ms(wait)}" for wait, rank, other in sorted(pairs)[:-6:-1]]
        if not longest:
            return (), {}
        some = [words.say("most_waiting", shown=len(matrix.ranks), all=everyone, share=matrix.shown)]
        said = [f"Longest waits per iteration: {'; '.join(longest)}."]
        return said, {"notes": some if len(matrix.ranks) < everyone else []}

    def _of_communication(self) -> _More:
        bench = bench_section(self.bench)
        return (), {"parts": [] if bench.empty else [bench]}

    def _of_timeline(self) -> _More:
        timeline = self.timeline
        if not timeline.segments:
            return (), {}
        assert self.found is not None
        left = f" {timeline.left_out} more captured iterations are not on this page." if timeline.left_out > 0 else ""
        data = {
            "iterations": [(iteration_name(number), number == timeline.typical) for number in timeline.windows],
            "ranks": timeline.ranks,
            "at_first": ranks_to_show(self.facts, self.found, most=_ON_A_SCREEN, every=_ON_A_SCREEN),
            "caption": words.say("timeline", shortest_us=max(timeline.resolution_ns.values()) / 1e3, left=left),
        }
        return (), {"data": data}

    def _of_quality(self) -> _More:
        infos = self.facts.infos
        versions = sorted({f"{name} {version}".replace("_", " ") for info in infos for name, version in info.versions.items()})
        known = {"errors": self.facts.errors, "limitations": self.facts.limitations}
        return (), {"data": known | {"versions": " · ".join(versions[:12])}}

    def _of_raw(self) -> _More:
        return (), {"data": {"run": shell_path(self.facts.path), "perfetto": self.facts.source == "kineto"}}


def memory_over_time_view(facts: RunFacts, ranks: set[int], id: str) -> list[FigureView]:
    """Memory over time of the devices of some ranks; none if none was recorded."""
    by_site, timeline = (
        grouped((row for row in answer.to_pylist() if row["rank"] in ranks), "rank", "device")
        for answer in (facts.memory_over_time, facts.memory_timeline)
    )
    variants = {
        f"rank {rank}, device {device}": figures.memory_figure(
            by_site.get((rank, device), []), timeline.get((rank, device), [])
        )
        for rank, device in sorted({*by_site, *timeline})
    }
    return captioned("memory-by-site" if by_site else "memory-over-time", variants, shown_as=id)


def _link(file: Path, folder: Path) -> str:
    """From the page to a file; it stays valid if both are moved together."""
    try:
        relative = os.path.relpath(file, folder)
    except ValueError:  # another drive
        return file.as_uri()
    # The leading dot: otherwise a directory whose name has a colon would be read as a scheme.
    return "./" + quote(os.fsencode(Path(relative).as_posix()))


#: The variants of each figure, by its id.
_FIGURES: Mapping[str, Callable[[Answers], _Variants | list[FigureView]]] = {
    "budget": lambda of: {f"by {view}": figures.attribution_figure(of.bars, view) for view in figures.VIEWS if of.bars},
    "host": lambda of: {"by cause": figures.host_figure(of.hosts)},
    "iterations": lambda of: {
        text: figures.iterations_figure(of.compared, name)
        for name, text in figures.MEASURES.items()
        if any(row[name] is not None for row in of.compared)
    },
    "waits": lambda of: {"waits": figures.waits_figure(of.waiting) if any(map(any, of.waiting.wait_ns)) else None},
    "roofline": lambda of: {"roofline": figures.roofline_figure(of.facts.matrix_products.to_pylist())},
    "communication": lambda of: {"communication": figures.communication_figure(of.timed_groups) if of.timed_groups else None},
    "gpu-metrics-over-time": Answers._counters_over_time,
    "kernel-counters-figure": lambda of: {"counters": figures.kernel_counters_figure(of.facts.kernel_counters.to_pylist())},
    "memory": Answers._memory,
}
