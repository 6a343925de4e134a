"""A run's answers as a view: for a page, and for a terminal.

`text.toml` declares the sections of each, with their tables and figures; `tables.toml` says which rows a table has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge_profiling.common.printable import shell_path
from bridge_profiling.compare.bench import AgainstBench
from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.report import figures, measurements, rows, tables, words
from bridge_profiling.report.answers import ON_A_SCREEN, Answers, ranks_to_show
from bridge_profiling.report.comparison_view import bench_section
from bridge_profiling.report.findings_view import Pictures, findings_view
from bridge_profiling.report.flame_graph import flame_graph_section
from bridge_profiling.report.timeline import iteration_name
from bridge_profiling.report.verdict import Conclusion, notices, verdict
from bridge_profiling.report.views import Figure, FigureView, PageView, SectionView, TableView, captioned, section

#: Ranks whose memory is drawn.
_MEMORY_RANKS = 4

#: Functions that make a table's rows of others.
_FUNCTIONS = {"rows": rows, "measurements": measurements}

#: Figures by the names of their variants; None where there is nothing to draw.
_Variants = dict[str, Figure | None]

#: Paragraphs of a section, and its other fields.
_More = tuple[Sequence[str], dict[str, Any]]


def run_tables(facts: RunFacts, bench: AgainstBench | None) -> list[TableView]:
    """The tables of `bridge-profiling analyze`."""
    shown = _Sections(facts, "analyze", None, bench)
    return [table for id in words.resource("text")["pages"]["analyze"] if (table := shown.table(id)).rows]


def screen_view(facts: RunFacts, found: Conclusion) -> PageView:
    """What a terminal shows of a run: the verdict, where the time goes, the findings, and benchmarks."""
    shown = _Sections(facts, "screen", found, found.bench)
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
    shown = _Sections(facts, "page", found, found.bench, output.absolute().parent)
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


def _title(facts: RunFacts) -> str:
    return facts.path.absolute().name or "run"


class _Sections(Answers):
    """The tables, figures and sections of a run, as they are declared."""

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

    def _counters_over_time(self) -> _Variants:
        """The counters that nsys sampled, in percent."""
        over_time = self.facts.gpu_metrics_over_time().to_pylist() if self.facts.gpu_metrics.num_rows else []
        drawn = [row for row in over_time if row["rank"] in self.ranks[:ON_A_SCREEN] and "%" in row["metric"]]
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
            "at_first": ranks_to_show(self.facts, self.found, most=ON_A_SCREEN, every=ON_A_SCREEN),
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


#: The variants of each figure, by its id.
_FIGURES: Mapping[str, Callable[[_Sections], _Variants | list[FigureView]]] = {
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
    "gpu-metrics-over-time": _Sections._counters_over_time,
    "kernel-counters-figure": lambda of: {"counters": figures.kernel_counters_figure(of.facts.kernel_counters.to_pylist())},
    "memory": _Sections._memory,
}
