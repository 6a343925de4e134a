"""Findings in words, each with its evidence, its events and a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.words import named_ranks
from bridge_profiling.findings import Event, Finding
from bridge_profiling.report import tables, words
from bridge_profiling.report.figures import attribution_figure, bars_figure
from bridge_profiling.report.rows import of_source
from bridge_profiling.report.timeline import Timeline, around_event
from bridge_profiling.report.verdict import Conclusion
from bridge_profiling.report.views import Cell, Figure, FigureView, FindingView, TableView

#: Events listed with a finding, and bars of a picture.
_MOST_EVENTS, _MOST_BARS = 8, 24

#: Evidence that is a command to copy.
_COMMAND = ("ncu_command", "ncu_notes")


def findings_view(facts: RunFacts, found: Conclusion, pictures: Pictures | None = None) -> list[FindingView]:
    """Every finding; for a page with its picture, and with links into the page's timeline."""
    views, judged = [], len(facts.infos) - len(facts.unjudged)
    for number, finding in enumerate(found.findings, 1):
        saving = finding.recoverable_ns_per_iteration, finding.at_most_ns_per_iteration
        evidence = [
            (words.label(name), words.value(name, value))
            for name, value in finding.evidence.items()
            if value not in (None, {}, [], ()) and name not in _COMMAND
        ]
        responsible = named_ranks(finding.ranks, judged) if finding.ranks else ""
        events = _events(number, finding.events, None if pictures is None else pictures.timeline)
        picture = None if pictures is None else pictures.of(finding)
        figure = None if picture is None else FigureView(f"finding-{number}", {"finding": picture[0]}, picture[1])
        gain = words.saving(*saving, share=found.share)
        views.append(FindingView(number, finding, responsible, gain, evidence, events, figure))
    return views


def _events(place: int, events: Sequence[Event], timeline: Timeline | None) -> TableView | None:
    rows = [
        asdict(event) | {"timeline": Cell("", target=None if timeline is None else timeline.target(event))}
        for event in events[:_MOST_EVENTS]
    ]
    left = len(events) - len(rows)
    view = tables.view("events", rows, note=f"{left:,} more events." if left else "")
    return replace(view, python=f"findings[{place - 1}].events") if rows else None


@dataclass(frozen=True)
class Pictures:
    """Draws a picture of a finding's evidence from the answers: a figure and a sentence on what it shows."""

    facts: RunFacts
    found: Conclusion
    timeline: Timeline  # of the page

    def of(self, finding: Finding) -> tuple[Figure, str] | None:
        """The picture that `text.toml` names for such findings, else the first event in its timeline, else the attribution."""
        name, *given = words.text("pictures", finding.id) or [""]
        drawn = getattr(self, f"_{name}")(finding, *given) if name else None
        return drawn or self._event(finding) or self._attribution(finding)

    def _event(self, finding: Finding) -> tuple[Figure, str] | None:
        entries = {info.rank: entry for info, entry in self.facts.captures.entries()}
        for event in finding.events:
            window = self.timeline.window_of(event)
            if window is not None and event.start_ns is not None and event.duration_ns and event.rank in entries:
                drawn = around_event(entries[event.rank], event, window, finding.events)
                where = "the capture" if window.iteration is None else f"iteration {window.iteration}"
                caption = f"Rank {event.rank} in {where}, around one of the events, which the upper lane shows."
                return None if drawn is None else (drawn, caption)
        return None

    def _attribution(self, finding: Finding, view: str = "cause") -> tuple[Figure, str] | None:
        rows = {row["rank"]: row for row in self.found.on_devices}
        shown = _select(finding, list(rows))
        caption = f"The median iteration by {view}."
        return (attribution_figure([rows[rank] for rank in shown], view), caption) if shown else None

    def _by_rank(self, finding: Finding, values: Mapping[int, float], caption: str, color: str) -> tuple[Figure, str] | None:
        shown = _select(finding, list(values))
        responsible = {f"rank {rank}" for rank in finding.ranks} if len(finding.ranks) < len(values) else set()
        bars = {f"rank {rank}": values[rank] / 1e6 for rank in shown}
        caption += "; responsible ranks in orange." if responsible else "."
        return _bars(bars, "ms per iteration", caption, responsible, color)

    def _of_ranks(self, finding: Finding, column: str, caption: str) -> tuple[Figure, str] | None:
        """A column of `RunFacts.ranks`, the median over the iterations."""
        found: dict[int, list[float]] = defaultdict(list)
        for row in self.facts.ranks.to_pylist():
            if row[column] is not None:
                found[row["rank"]].append(row[column])
        return self._by_rank(finding, {rank: median(values) for rank, values in found.items()}, caption, "muted")

    def _exposed(self, finding: Finding, caption: str) -> tuple[Figure, str] | None:
        values = {row["rank"]: row["exposed_communication_ns"] for row in self.found.on_devices}
        return self._by_rank(finding, values, caption, "communication")

    def _bubbles(self, finding: Finding, caption: str) -> tuple[Figure, str] | None:
        stages = self.facts.pipeline.to_pylist()
        bars = {f"stage {row['stage']}": row["bubble_ns"] / 1e6 for row in stages}
        marked = {f"stage {row['stage']}" for row in stages if set(row["ranks"]) & set(finding.ranks)}
        highlighted = marked if len(marked) < len(bars) else set()
        caption += "; responsible stages in orange." if highlighted else "."
        return _bars(bars, "ms per iteration", caption, highlighted)

    def _kernels(self, finding: Finding, caption: str) -> tuple[Figure, str] | None:
        kernels = of_source(self.facts, self.facts.kernels).to_pylist()
        rows = [row for row in kernels if row["kind"] == "compute"][:10]
        labels = [f"{place}. {row['name'][:46]}{'…' if len(row['name']) > 46 else ''}" for place, row in enumerate(rows, 1)]
        named = {event.name for event in finding.events}
        highlighted = {label for label, row in zip(labels, rows, strict=True) if row["name"] in named}
        bars = {label: row["total_ns"] / 1e6 for label, row in zip(labels, rows, strict=True)}
        return _bars(bars, "ms of all ranks and iterations", caption, highlighted)

    def _overhead(self, finding: Finding, caption: str) -> tuple[Figure, str] | None:
        bars: dict[str, float] = {}
        for manifest in self.facts.manifests[: _MOST_BARS // 2]:
            for text, profiled in (("profiled", True), ("not profiled", False)):
                durations = manifest.durations_ns(profiled=profiled)
                if durations:
                    bars[f"rank {manifest.rank}, {text}"] = median(durations) / 1e6
        highlighted = {label for label in bars if not label.endswith("not profiled")}
        return _bars(bars, "ms of the median iteration", caption, highlighted)

    def _memory(
        self, finding: Finding, columns: Sequence[str], scale: float, divisor: float, unit: str, caption: str
    ) -> tuple[Figure, str] | None:
        """The first of some columns of `RunFacts.memory` that is known, by device."""
        rows = [row for row in self.facts.memory.to_pylist() if not finding.ranks or row["rank"] in finding.ranks][:_MOST_BARS]
        values = [next(filter(None, map(row.get, columns)), 0.0) * scale / divisor for row in rows]
        labels = [f"rank {row['rank']}, device {row['device']}" for row in rows]
        return _bars(dict(zip(labels, values, strict=True)), unit, caption, color="compute")


def _bars(
    bars: Mapping[str, float], unit: str, caption: str, highlighted: Collection[str] = (), color: str = "muted"
) -> tuple[Figure, str] | None:
    drawn = bars_figure(list(bars), list(bars.values()), unit, highlighted=highlighted, color=color)
    return (drawn, caption) if bars else None


def _select(finding: Finding, ranks: Sequence[int]) -> list[int]:
    """Ranks with a bar: all if they are few, else the responsible ones and some others."""
    if len(ranks) <= _MOST_BARS:
        return sorted(ranks)
    responsible = [rank for rank in finding.ranks if rank in set(ranks)][: _MOST_BARS - 6]
    others = [rank for rank in ranks if rank not in set(finding.ranks)]
    return sorted([*responsible, *others[: _MOST_BARS - len(responsible)]])
