"""Timelines: a lane for each stream and a bar for each kernel; of a finding's event as a figure, of iterations as page data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.timeline import KINDS, Segments, Window, segments, whole_captures, windows_of
from bridge_profiling.facts.words import short
from bridge_profiling.findings import Event
from bridge_profiling.report.figures import COLORS, KIND_NAMES, STYLES, figure
from bridge_profiling.report.views import Figure, Target

#: The lane of a finding's own events.
_EVIDENCE = "evidence"

#: Points to hover over along the width of a picture.
_HOVER = 40

#: How often the shortest visible bar fits into an iteration, at the finest and at the coarsest resolution.
_FINEST, _COARSEST = 2_000, 400

#: Pictures (an iteration of a rank) on a page, and how many of them may be the finest: these limits keep the page small.
_MOST_PICTURES, _MOST_FINE = 128, 24

#: Iterations on a page: the typical one, the slowest, the fastest, then the first ones.
_MOST_ITERATIONS = 8

#: Up to this number of ranks, each has a lane for the host's annotations.
_HOST_RANKS = 16

Highlight = tuple[str, float, float]


@dataclass(frozen=True)
class Timeline:
    """Segments by iteration and rank, for a page."""

    windows: Mapping[int | None, Mapping[int, Window]]  # of each iteration shown, by rank
    segments: Mapping[tuple[int | None, int], Segments]  # of each iteration and rank shown
    typical: int | None  # the iteration to show first
    resolution_ns: Mapping[int | None, int]  # the shortest visible length, by iteration
    left_out: int  # number of captured iterations that are not shown

    @property
    def ranks(self) -> list[int]:
        """Ranks with a timeline."""
        return sorted({rank for _, rank in self.segments})

    def window_of(self, event: Event) -> Window | None:
        """The window of the iteration that holds an event."""
        by_rank = self.windows.get(event.iteration, {})
        if event.rank in by_rank:
            return by_rank[event.rank]
        candidates = [each[event.rank] for each in self.windows.values() if event.rank in each]
        start = event.start_ns
        return next((each for each in candidates if start is not None and each.start_ns <= start < each.end_ns), None)

    def target(self, event: Event) -> Target | None:
        """Where the page's timeline shows an event."""
        if (event.iteration, event.rank) not in self.segments or event.start_ns is None:
            return None
        start_ms = (event.start_ns - self.windows[event.iteration][event.rank].zero_ns) / 1e6
        end_ms = start_ms + event_length_ns(event) / 1e6
        return Target(event.rank, iteration_name(event.iteration), round(start_ms, 4), round(end_ms, 4))

    def target_at(self, rank: int, start_ns: int, duration_ns: float) -> Target | None:
        """Where the page's timeline shows a call, if its iteration is on the page."""
        for number, by_rank in self.windows.items():
            if rank in by_rank and by_rank[rank].start_ns <= start_ns < by_rank[rank].end_ns:
                return self.target(Event(rank, "", number, start_ns, duration_ns))
        return None

    def data(self) -> dict[str, Any]:
        """The page's script draws from this: columns of numbers, starts as differences, names by number; microseconds."""
        names: dict[str, int] = {}
        pictures: dict[str, dict[str, Any]] = {}
        for (number, rank), each in self.segments.items():
            start = (each.start_ns // 1_000).tolist()
            pictures.setdefault(iteration_name(number), {})[str(rank)] = {
                "lanes": each.lanes,
                "lane": each.lane.tolist(),
                "kind": each.kind.tolist(),
                "start": [now - then for now, then in zip(start, [0, *start[:-1]], strict=True)],
                "duration": [max(int(duration), 1) for duration in (each.duration_ns / 1_000).round().tolist()],
                "name": [names.setdefault(name, len(names)) for name in each.name],
                "count": each.count.tolist(),
            }
        return {
            "kinds": list(KINDS),
            "names": [short(name) for name in names],
            "typical": iteration_name(self.typical),
            "pictures": pictures,
            "spans": {iteration_name(number): round(_length_ns(by_rank) / 1e3) for number, by_rank in self.windows.items()},
        }


def timeline_of(facts: RunFacts, ranks: Sequence[int]) -> Timeline:
    """The timelines of some ranks of a run."""
    everyone = facts.captures.entries()
    entries = [(info, entry) for info, entry in everyone if info.rank in set(ranks)]
    offsets = facts.clock_offsets if len(everyone) > 1 else None
    iterations = facts.iterations
    windows = windows_of(iterations, facts.source, offsets) or whole_captures(entries, offsets)
    captured = {row["iteration"] for row in iterations.to_pylist() if row["source"] == facts.source}
    typical, shown = _select(windows, max(_MOST_PICTURES // max(len(entries), 1), 1))
    windows = {number: windows[number] for number in shown}
    finest = max(_FINEST * min(1.0, _MOST_FINE / max(len(entries) * len(windows), 1)), _COARSEST)
    resolution = {number: max(int(_length_ns(by_rank) / finest), 1_000) for number, by_rank in windows.items()}
    found = {}
    for info, entry in entries:
        mine = [by_rank[info.rank] for by_rank in windows.values() if info.rank in by_rank]
        for each in segments(entry, mine, resolution, host=len(entries) <= _HOST_RANKS):
            # An iteration on a CPU without phases has nothing to draw.
            if each.start_ns.size:
                found[each.window.iteration, info.rank] = each
    return Timeline(windows, found, typical, resolution, max(len(captured), 1) - len(windows))


def event_length_ns(event: Event) -> int:
    """How long an event is; one that stands for many is drawn as long as their mean. 0 if unknown."""
    return int((event.duration_ns or 0) / max(event.count, 1))


def iteration_name(number: int | None) -> str:
    """An iteration as text; the whole capture where none is marked."""
    return "capture" if number is None else str(number)


def _length_ns(by_rank: Mapping[int, Window]) -> int:
    return max(window.end_ns - window.zero_ns for window in by_rank.values())


def _select(windows: Mapping[int | None, Mapping[int, Window]], most: int) -> tuple[int | None, list[int | None]]:
    """The typical iteration, and those to show."""
    if not windows:
        return None, []
    lengths = {number: _length_ns(by_rank) for number, by_rank in windows.items()}
    middle = median(lengths.values())
    typical = min(lengths, key=lambda number: (abs(lengths[number] - middle), -1 if number is None else number))
    by_length = sorted(lengths, key=lambda number: lengths[number])
    chosen = list(dict.fromkeys([typical, by_length[-1], by_length[0], *lengths]))[: min(most, _MOST_ITERATIONS)]
    return typical, [number for number in windows if number in set(chosen)]


def around_event(entry: Path, event: Event, window: Window, events: Sequence[Event]) -> Figure | None:
    """The streams around an event in its window, with all of a finding's events there in a lane of their own.

    The margin is three lengths of the event; of a short one, up to 40 lengths or 8% of the iteration.
    """
    assert event.start_ns is not None
    first, length = event.start_ns, event_length_ns(event)
    margin = max(3 * length, min(40 * length, int(0.08 * (window.end_ns - window.start_ns))))
    begin, end = max(first - margin, window.start_ns), min(first + length + margin, window.end_ns)
    if end <= begin:
        return None
    part = Window(window.rank, window.iteration, begin, end, window.zero_ns)
    drawn = segments(entry, [part], {window.iteration: max((end - begin) // 600, 1)}, host=True)
    marks = [
        (
            each.name[:120],
            (each.start_ns - window.zero_ns) / 1e6,
            (each.start_ns - window.zero_ns + event_length_ns(each)) / 1e6,
        )
        for each in events
        if each.rank == event.rank and each.start_ns is not None and each.duration_ns and begin <= each.start_ns < end
    ]
    return timeline_figure(drawn, span_ms=((begin - window.zero_ns) / 1e6, (end - window.zero_ns) / 1e6), highlights=marks)


def timeline_figure(
    shown: Sequence[Segments], *, span_ms: tuple[float, float] | None = None, highlights: Sequence[Highlight] = ()
) -> Figure:
    """Segments of some ranks in one iteration, from the top down; `highlights` (name, start, end) have a lane on top."""
    ends = [float((each.start_ns + each.duration_ns).max()) / 1e6 for each in shown if len(each)]
    begin, end = span_ms or (0.0, max(ends, default=1.0))
    several = len({each.window.rank for each in shown}) > 1
    labels: list[str] = [_EVIDENCE] if highlights else []
    points: dict[str, dict[str, list[Any]]] = {}

    def add(kind: str, lane: int, first: float, last: float, text: str, length_ms: float) -> None:
        """Points along a bar, and a gap after it."""
        mine = points.setdefault(kind, {"x": [], "y": [], "text": [], "customdata": []})
        steps = 1 + min(int((last - first) / ((end - begin) / _HOVER)), _HOVER)
        mine["x"] += [*(round(first + (last - first) * step / steps, 5) for step in range(steps + 1)), None]
        mine["y"] += [lane] * (steps + 1) + [None]
        mine["text"] += [text] * (steps + 1) + [""]
        mine["customdata"] += [round(length_ms, 4)] * (steps + 1) + [None]

    for name, first, last in highlights:
        add("highlight", 0, first, last, name, last - first)
    for each in shown:
        for row in range(len(each)):
            first = each.start_ns[row] / 1e6
            last = first + each.duration_ns[row] / 1e6
            if last >= begin and first <= end:
                count = int(each.count[row])
                more = f" and {count - 1:,} more" if count > 1 else ""
                lane, text = len(labels) + int(each.lane[row]), f"{each.name[row][:120]}{more}"
                add(KINDS[each.kind[row]], lane, first, last, text, each.duration_ns[row] / 1e6)
        labels += [f"rank {each.window.rank} · {lane}" if several else lane for lane in each.lanes]
    traces = [
        STYLES["lanes"]
        | {
            "name": _EVIDENCE if kind == "highlight" else KIND_NAMES[kind],
            "line": {"width": 14, "color": "#000000" if kind == "highlight" else COLORS[kind]},
            "meta": kind,
            **found,
        }
        for kind, found in points.items()
    ]
    lanes = {"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.4, -0.6]}
    return figure("lanes", traces, 110 + max(len(labels), 2) * 26, xaxis={"range": [begin, end]}, yaxis=lanes)
