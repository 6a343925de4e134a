"""The page's findings: each with its evidence in words, the events that show it, and a picture of that evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_profiling.analysis.findings import Event, Finding
from bridge_profiling.analysis.ranks.timeline import Window, segments
from bridge_profiling.report import wording
from bridge_profiling.report.answers import Answers
from bridge_profiling.report.evidence import length_ns
from bridge_profiling.report.figures.bars import bars_figure
from bridge_profiling.report.figures.budget import budget_figure
from bridge_profiling.report.figures.style import Figure
from bridge_profiling.report.figures.timeline import timeline_figure
from bridge_profiling.report.page_parts import Figures, Table
from bridge_profiling.report.page_timeline import PageTimeline

#: Events listed with a finding.
_MOST_EVENTS = 8

#: Around an event that is shown, so many times its length; and of a short one more, up to so much of the iteration.
_AROUND, _AROUND_SHORT, _ENOUGH = 3, 40, 0.08

#: How blame is drawn.
_BLAMED = "; those to blame in orange."

#: Evidence that is a command, which is shown as one.
_COMMAND = ("ncu_command", "ncu_notes")

#: Bars of a picture.
_MOST_BARS = 24


@dataclass(frozen=True)
class Picture:
    """A figure, and what it shows.

    Args:
        figure: Plotly's data.
        words: one sentence.
    """

    figure: Figure
    words: str


class Pictures:
    """A picture of each finding's evidence.

    Args:
        answers: about the run.
        timeline: of the page; its windows say where iterations lie.
        entries: the folder of each rank's tables.
    """

    def __init__(self, answers: Answers, timeline: PageTimeline, entries: Mapping[int, Path]) -> None:
        self._answers, self._timeline, self._entries = answers, timeline, entries
        self._by_id: dict[str, Callable[[Finding], Picture | None]] = {
            "straggler_compute": self._compute,
            "straggler_host": self._own_time,
            "pipeline_bubble": self._bubbles,
            "exposed_communication": self._exposed,
            "low_overlap": self._exposed,
            "dominant_kernel": self._kernels,
            "small_kernels": self._kernels,
            "low_device_busy": self._activity,
            "profiler_overhead": self._overhead,
            "memory_headroom": self._memory,
            "memory_fragmentation": self._memory,
            "memory_growth": self._memory,
        }

    def of(self, finding: Finding) -> Picture | None:
        """The picture: what is drawn of findings of its kind, else its most telling event in the timeline, else the budget."""
        drawn = self._by_id.get(finding.id)
        return (drawn(finding) if drawn else None) or self._event(finding) or self._budget(finding)

    def _event(self, finding: Finding) -> Picture | None:
        """The streams around the most telling event, and the event itself."""
        for event in finding.events:
            window = self._window(event)
            if window is not None and event.start_ns is not None and event.duration_us and event.rank in self._entries:
                return self._around(event, window, finding.events)
        return None

    def _around(self, event: Event, window: Window, events: Sequence[Event]) -> Picture | None:
        assert event.start_ns is not None
        iteration_ns = window.end_ns - window.start_ns
        first, last = event.start_ns, event.start_ns + length_ns(event)
        margin = max(_AROUND * (last - first), min(_AROUND_SHORT * (last - first), int(_ENOUGH * iteration_ns)))
        begin, end = max(first - margin, window.start_ns), min(last + margin, window.end_ns)
        if end <= begin:
            return None
        part = Window(window.rank, window.iteration, begin, end, window.zero_ns)
        drawn = segments(self._entries[event.rank], [part], {window.iteration: max((end - begin) // 600, 1)}, host=True)
        marks = [
            (
                each.name[:120],
                (each.start_ns - window.zero_ns) / 1e6,
                (each.start_ns - window.zero_ns + length_ns(each)) / 1e6,
            )
            for each in events
            if each.rank == event.rank and each.start_ns is not None and each.duration_us and begin <= each.start_ns < end
        ]
        span_ms = ((begin - window.zero_ns) / 1e6, (end - window.zero_ns) / 1e6)
        where = "the capture" if window.iteration is None else f"iteration {window.iteration}"
        words = f"Rank {event.rank} in {where}, around the most telling event; the upper lane shows the finding's own events."
        return Picture(timeline_figure(drawn, span_ms=span_ms, highlights=marks), words)

    def _window(self, event: Event) -> Window | None:
        by_rank = self._timeline.windows.get(event.iteration)
        if by_rank is not None and event.rank in by_rank:
            return by_rank[event.rank]
        if event.start_ns is None:
            return None
        for candidate in self._timeline.windows.values():
            window = candidate.get(event.rank)
            if window is not None and window.start_ns <= event.start_ns < window.end_ns:
                return window
        return None

    def _ranks(self, finding: Finding, everyone: Sequence[int]) -> list[int]:
        """Ranks with a bar: all of a few, else those to blame and the first of the others."""
        if len(everyone) <= _MOST_BARS:
            return sorted(everyone)
        blamed = [rank for rank in finding.ranks if rank in set(everyone)][: _MOST_BARS - 6]
        others = [rank for rank in everyone if rank not in set(finding.ranks)]
        return sorted([*blamed, *others[: _MOST_BARS - len(blamed)]])

    def _by_rank(
        self, finding: Finding, values: Mapping[int, float | None], title: str, words: str, colour: str = "muted"
    ) -> Picture | None:
        ranks = self._ranks(finding, [rank for rank in values if values[rank] is not None])
        if not ranks:
            return None
        blamed = {f"rank {rank}" for rank in finding.ranks} if len(finding.ranks) < len(values) else set()
        labels = [f"rank {rank}" for rank in ranks]
        drawn = bars_figure(labels, [(values[rank] or 0.0) / 1e3 for rank in ranks], title, highlighted=blamed, colour=colour)
        return Picture(drawn, f"{words}{_BLAMED if blamed else '.'}")

    def _median_of(self, column: str) -> dict[int, float | None]:
        """A column of `Run.ranks`, the median over iterations, by rank."""
        found: dict[int, list[float]] = {}
        for row in self._answers.ranks:
            if row[column] is not None:
                found.setdefault(row["rank"], []).append(row[column])
        return {rank: sorted(values)[len(values) // 2] for rank, values in found.items()}

    def _compute(self, finding: Finding) -> Picture | None:
        return self._by_rank(finding, self._median_of("compute_us"), "ms of an iteration", "Compute of each rank")

    def _own_time(self, finding: Finding) -> Picture | None:
        words = "Own time of each rank: the iteration without waiting for other ranks"
        return self._by_rank(finding, self._median_of("own_us"), "ms of an iteration", words)

    def _exposed(self, finding: Finding) -> Picture | None:
        values = {row["rank"]: row["exposed_communication_us"] for row in self._answers.summary.budget}
        words = "Exposed communication of each rank, waiting for other ranks included"
        return self._by_rank(finding, values, "ms of an iteration", words, "communication")

    def _activity(self, finding: Finding) -> Picture | None:
        return self._budget(finding, "activity")

    def _budget(self, finding: Finding, view: str = "cause") -> Picture | None:
        rows = {row["rank"]: row for row in self._answers.summary.budget}
        shown = self._ranks(finding, list(rows))[:_MOST_BARS]
        words = "The median iteration, by " + ("what ran on the device." if view == "activity" else "what its time is owed to.")
        return Picture(budget_figure([rows[rank] for rank in shown], view), words) if shown else None

    def _bubbles(self, finding: Finding) -> Picture | None:
        rows = self._answers.pipeline
        if not rows:
            return None
        labels = [f"stage {row['stage']}" for row in rows]
        blamed = {f"stage {row['stage']}" for row in rows if set(row["ranks"]) & set(finding.ranks)}
        highlighted = blamed if len(blamed) < len(rows) else set()
        drawn = bars_figure(labels, [row["bubble_us"] / 1e3 for row in rows], "ms of an iteration", highlighted=highlighted)
        return Picture(drawn, f"The bubble of each pipeline stage{_BLAMED if highlighted else '.'}")

    def _kernels(self, finding: Finding) -> Picture | None:
        rows = [row for row in self._answers.kernels if row["kind"] == "compute"][:10]
        if not rows:
            return None
        labels = [f"{place}. {row['name'][:46]}{'…' if len(row['name']) > 46 else ''}" for place, row in enumerate(rows, 1)]
        named = {event.name for event in finding.events}
        highlighted = {label for label, row in zip(labels, rows, strict=True) if row["name"] in named}
        drawn = bars_figure(
            labels, [row["total_us"] / 1e3 for row in rows], "ms of all ranks and iterations", highlighted=highlighted
        )
        return Picture(drawn, "The compute kernels with the most time; those that the finding names in orange.")

    def _overhead(self, finding: Finding) -> Picture | None:
        labels, values = [], []
        for manifest in self._answers.summary.manifests[: _MOST_BARS // 2]:
            for words, profiled in (("profiled", True), ("not profiled", False)):
                durations = sorted(manifest.durations_ns(profiled=profiled))
                if durations:
                    labels.append(f"rank {manifest.rank}, {words}")
                    values.append(durations[len(durations) // 2] / 1e6)
        highlighted = {label for label in labels if not label.endswith("not profiled")}
        drawn = bars_figure(labels, values, "ms of the median iteration", highlighted=highlighted)
        return Picture(drawn, "Iterations of the same run, profiled in orange and not profiled.") if labels else None

    def _memory(self, finding: Finding) -> Picture | None:
        rows = [row for row in self._answers.memory if not finding.ranks or row["rank"] in finding.ranks][:_MOST_BARS]
        if not rows:
            return None
        labels = [f"rank {row['rank']}, device {row['device']}" for row in rows]
        if finding.id == "memory_growth":
            values = [(row["growth_bytes_per_iteration"] or 0.0) / 2**20 for row in rows]
            return Picture(
                bars_figure(labels, values, "MiB an iteration", colour="compute"), "Growth from iteration to iteration."
            )
        if finding.id == "memory_fragmentation":
            values = [100 * (row["fragmentation"] or 0.0) for row in rows]
            drawn = bars_figure(labels, values, "% of what is free", colour="compute")
            return Picture(drawn, "Of the memory that is reserved and free, what its largest free block is not.")
        values = [(row["peak_reserved_bytes"] or row["peak_bytes"]) / 2**30 for row in rows]
        return Picture(bars_figure(labels, values, "GiB", colour="compute"), "What was held of the device at the most.")


def findings_section(answers: Answers, pictures: Pictures, timeline: PageTimeline, figures: Figures) -> list[dict[str, Any]]:
    """Every finding in words, with its picture.

    Args:
        answers: about the run.
        pictures: of the findings.
        timeline: of the page: events that lie in it are linked to it.
        figures: the pictures are added.
    """
    captured, found = len(answers.summary.infos), []
    budget = answers.summary.budget
    typical_us = sorted(row["duration_us"] for row in budget)[len(budget) // 2] if budget else None
    for place, finding in enumerate(answers.summary.findings):
        picture = pictures.of(finding)
        if picture is not None:
            figures[f"finding-{place + 1}"] = {"finding": picture.figure}
        back = finding.recoverable_us_per_iteration
        found.append(
            {
                "finding": finding,
                "number": place + 1,
                "figure": f"finding-{place + 1}" if picture is not None else None,
                "words": "" if picture is None else picture.words,
                "ranks": wording.ranks(finding.ranks, captured) if finding.ranks else "",
                "gain": None if back is None else wording.milliseconds(back),
                "share": wording.percent(back / typical_us) if back and typical_us else "",
                "evidence": [
                    (wording.heading(name), wording.value(name, value))
                    for name, value in finding.evidence.items()
                    if value not in (None, {}, [], ()) and name not in _COMMAND
                ],
                "command": finding.evidence.get("ncu_command"),
                "command_notes": finding.evidence.get("ncu_notes", []),
                "events": _events(finding, timeline),
                "more_events": max(len(finding.events) - _MOST_EVENTS, 0),
            }
        )
    return found


def _events(finding: Finding, timeline: PageTimeline) -> list[dict[str, Any]]:
    return [
        {
            "rank": event.rank,
            "name": event.name,
            "iteration": "" if event.iteration is None else event.iteration,
            "duration": wording.milliseconds(event.duration_us),
            "count": wording.number(event.count),
            **_place(event, timeline),
        }
        for event in finding.events[:_MOST_EVENTS]
    ]


def _place(event: Event, timeline: PageTimeline) -> dict[str, Any]:
    """Where the page's timeline shows the event."""
    if (event.iteration, event.rank) not in timeline.segments or event.start_ns is None:
        return {"start_ms": None, "end_ms": None}
    zero_ns = timeline.windows[event.iteration][event.rank].zero_ns
    start_ms = (event.start_ns - zero_ns) / 1e6
    return {"start_ms": round(start_ms, 4), "end_ms": round(start_ms + length_ns(event) / 1e6, 4)}


def rank_table(pipeline: Sequence[Mapping[str, Any]]) -> Table | None:
    """The stages of a pipeline; None without one."""
    if not pipeline:
        return None
    return Table(
        ["", "pipeline", "compute", "bubble", "other idle", "bubble share", "at best", "ranks"],
        [
            [
                f"stage {row['stage']} of {row['stages']}",
                *(wording.milliseconds(row[name]) for name in ("pipeline_us", "compute_us", "bubble_us", "other_idle_us")),
                wording.percent(row["bubble_fraction"]),
                wording.percent(row["ideal_bubble_fraction"]),
                wording.ranks(row["ranks"]).split(" ", 1)[1] if len(row["ranks"]) <= 16 else f"{len(row['ranks'])} ranks",
            ]
            for row in pipeline
        ],
    )
