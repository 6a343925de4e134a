"""The timelines that a page carries: segments of some iterations of some ranks, as coarse as the page's size asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.ranks.timeline import KINDS, Segments, Window, segments, whole_captures, windows_of
from bridge_profiling.report.answers import Answers
from bridge_profiling.traces.types import RankInfo

#: An iteration is so many times as long as what is shortest in its picture, at the finest and at the coarsest.
_FINEST, _COARSEST = 2_000, 400

#: Pictures of an iteration of a rank that a page carries, and how many of them can be the finest: what keeps it small.
_MOST_PICTURES, _MOST_FINE = 128, 24

#: Iterations on a page: the typical one, the slowest, the fastest, and the first ones besides.
_MOST_ITERATIONS = 8

#: Up to so many ranks have a lane of the host's annotations.
_HOST_RANKS = 16


@dataclass(frozen=True)
class PageTimeline:
    """Segments by iteration and rank.

    Args:
        windows: of each iteration shown, by rank.
        segments: of each iteration and rank shown.
        typical: the iteration to show first.
        resolution_ns: what is shorter cannot be told apart, by iteration.
        left_out: how many captured iterations are not shown.
    """

    windows: Mapping[int | None, Mapping[int, Window]]
    segments: Mapping[tuple[int | None, int], Segments]
    typical: int | None
    resolution_ns: Mapping[int | None, int]
    left_out: int

    def __bool__(self) -> bool:
        return bool(self.segments)


def page_timeline(run: Run, answers: Answers, ranks: Sequence[int]) -> PageTimeline:
    """The timelines of some ranks.

    Args:
        run: whose captures are shown.
        answers: about it.
        ranks: those to show.
    """
    entries = [(info, entry) for info, entry in run.entries() if info.rank in set(ranks)]
    offsets = run.clock_offsets() if len(answers.summary.infos) > 1 else None
    windows = windows_of(run.iterations(), answers.summary.source, offsets) or whole_captures(entries, offsets)
    typical, shown = _iterations(windows, max(_MOST_PICTURES // max(len(entries), 1), 1))
    windows = {number: windows[number] for number in shown}
    finest = max(_FINEST * min(1.0, _MOST_FINE / max(len(entries) * len(windows), 1)), _COARSEST)
    resolution = {number: max(int(_length_ns(by_rank) / finest), 1_000) for number, by_rank in windows.items()}
    found = _segments(entries, windows, resolution)
    return PageTimeline(windows, found, typical, resolution, len(answers_iterations(answers)) - len(windows))


def answers_iterations(answers: Answers) -> list[int | None]:
    """The captured iterations; one that has no number where none is marked."""
    return sorted({row["iteration"] for row in answers.iterations}) or [None]


def as_json(timeline: PageTimeline) -> dict[str, Any]:
    """What the page's script draws from: columns of numbers, starts as differences, names by number; times in microseconds."""
    names: dict[str, int] = {}
    pictures: dict[str, dict[str, Any]] = {}
    for (number, rank), each in timeline.segments.items():
        start = (each.start_ns // 1_000).tolist()
        before = [0, *start[:-1]]
        pictures.setdefault(_text(number), {})[str(rank)] = {
            "lanes": each.lanes,
            "lane": each.lane.tolist(),
            "kind": each.kind.tolist(),
            "start": [now - then for now, then in zip(start, before, strict=True)],
            "duration": [max(int(duration), 1) for duration in (each.duration_ns / 1_000).round().tolist()],
            "name": [names.setdefault(name, len(names)) for name in each.name],
            "count": each.count.tolist(),
        }
    return {
        "kinds": list(KINDS),
        "names": list(names),
        "typical": _text(timeline.typical),
        "pictures": pictures,
        "spans": {_text(number): round(_length_ns(by_rank) / 1e3) for number, by_rank in timeline.windows.items()},
    }


def _text(number: int | None) -> str:
    return "capture" if number is None else str(number)


def _length_ns(by_rank: Mapping[int, Window]) -> int:
    return max(window.end_ns - window.zero_ns for window in by_rank.values())


def _iterations(windows: Mapping[int | None, Mapping[int, Window]], most: int) -> tuple[int | None, list[int | None]]:
    """The typical iteration, and those to show, at most so many."""
    if not windows:
        return None, []
    lengths = {number: _length_ns(by_rank) for number, by_rank in windows.items()}
    middle = median(lengths.values())
    typical = min(lengths, key=lambda number: (abs(lengths[number] - middle), -1 if number is None else number))
    by_length = sorted(lengths, key=lambda number: lengths[number])
    wanted = [typical, by_length[-1], by_length[0], *lengths]
    chosen = set(list(dict.fromkeys(wanted))[: min(most, _MOST_ITERATIONS)])
    return typical, [number for number in windows if number in chosen]


def _segments(
    entries: Sequence[tuple[RankInfo, Path]],
    windows: Mapping[int | None, Mapping[int, Window]],
    resolution: Mapping[int | None, int],
) -> dict[tuple[int | None, int], Segments]:
    found = {}
    for info, entry in entries:
        mine = [by_rank[info.rank] for by_rank in windows.values() if info.rank in by_rank]
        for each in segments(entry, mine, resolution, host=len(entries) <= _HOST_RANKS):
            # A CPU's iteration without phases has nothing to draw.
            if each.start_ns.size:
                found[each.window.iteration, info.rank] = each
    return found
