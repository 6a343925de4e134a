"""The page's flame graph: the stacks of one rank as an icicle, a box for each frame under the frame that calls it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bridge_profiling.facts.caveats import caveat
from bridge_profiling.printable import shell_path
from bridge_profiling.report import words
from bridge_profiling.report.figures import COLORS, figure
from bridge_profiling.report.flame_graph import OWN_US, TOTAL_US, Weight, short_name
from bridge_profiling.report.verdict import Summary
from bridge_profiling.report.views import Figure, FigureView, Row, SectionView

if TYPE_CHECKING:
    from bridge_profiling.run import Run

#: Frames below this share of the rank's time are not drawn, so a page stays small.
LEAST_SHARE = 0.005

#: Levels that are drawn at a time: a click on a box shows those below it.
_LEVELS = 24

#: Height of a level and of what is above the boxes, in pixels.
_LEVEL, _ABOVE = 22, 60

#: An outer frame with one callee that takes this share of its time says nothing.
_SAME = 0.99

#: On all colors of boxes, in light and dark.
_TEXT = "#14181f"

#: Characters of a frame's name; those that fit the whole width, and those of a label that is read after a click on its box.
_NAME, _WIDTH, _LABEL = 300, 150, 16

_LABELS = {Weight.host: "host time", Weight.device: "device time launched"}


def flame_graph_section(run: Run, summary: Summary, iterations: Sequence[Row]) -> list[SectionView]:
    """The section, with the slowest rank, else the first one; empty if no range of that rank is inside another one.

    Args:
        run: the run.
        summary: its verdict.
        iterations: rows of `Run.iterations` of `summary.source`.
    """
    slowest = next((row["rank"] for row in summary.stragglers if row["verdict"] != "no"), None)
    rank = slowest if slowest is not None else min((info.rank for info in summary.infos), default=None)
    # Of this rank alone: those of all ranks took a twelfth of the time of a report.
    rows = [] if rank is None else run.facts.flame_graph_of(rank, LEAST_SHARE).to_pylist()
    if all(len(row["stack"]) < 2 for row in rows):
        return []
    count = len({row["iteration"] for row in iterations if row["rank"] == rank})
    of = f"mean of {words.counted(count, 'iteration')}" if count else "the whole capture"
    variants = {
        str(weight): flame_graph_figure(rows, weight, f"rank {rank}", count or 1)
        for weight in Weight
        if any(row[OWN_US[weight]] for row in rows)
    }
    texts = words.resource("sections")["flame"]
    notes = [] if any(row["category"] == "python" for row in rows) else [words.sentence(caveat("no_python_stacks").text)]
    caption = (
        f"Stacks of rank {rank}{', the slowest rank' if slowest is not None else ''}: {of}. Frames below 0.5% are not drawn."
    )
    view = FigureView("flame", variants, caption, {str(weight): label for weight, label in _LABELS.items()})
    whole = f"All frames of all ranks, for speedscope: bridge-profiling flamegraph {shell_path(summary.path)}"
    section = SectionView("flame", texts["title"], [texts["text"], whole], notes, figures=[view], short=texts["short"])
    return [section]


def flame_graph_figure(rows: Sequence[Row], weight: Weight, title: str, iterations: int = 1) -> Figure:
    """Rows of `Run.flame_graph` of one rank, in their order, as an icicle.

    Outer frames that all of a thread's time has in common are left out.

    Args:
        rows: the rows.
        weight: the time that is drawn.
        title: name of the outermost box.
        iterations: number of iterations to divide times by.
    """
    own, total = OWN_US[weight], TOTAL_US[weight]
    threads: dict[int | None, list[int]] = defaultdict(list)
    callees: dict[int, list[int]] = defaultdict(list)
    everything = sum(row[total] for row in rows if len(row["stack"]) == 1)
    path: list[int] = []
    for place, row in enumerate(rows):
        if row[total] <= 0 or row[total] < LEAST_SHARE * everything:
            continue
        # A row comes after that of its caller, which has at least its time.
        del path[len(row["stack"]) - 1 :]
        (callees[path[-1]] if path else threads[row["thread"]]).append(place)
        path.append(place)

    boxes: list[dict[str, Any]] = [_box("all", "", title, everything, "muted")]
    deepest = 1
    for thread, roots in threads.items():
        roots = _without_common_frames(roots, callees, [row[total] for row in rows])
        whole = sum(rows[place][total] for place in roots)
        boxes.append(_box(f"thread {thread}", "all", f"thread {thread}", whole, "muted"))
        waiting = [(place, f"thread {thread}", 3) for place in reversed(roots)]
        while waiting:
            place, parent, depth = waiting.pop()
            row, deepest = rows[place], max(deepest, depth)
            alone = f"{row['category']}, {_ms(row[own], iterations)} in it alone, {row['count'] / iterations:,.4g} calls"
            frame = row["stack"][-1]
            room = max(int(_WIDTH * row[total] / everything), _LABEL)
            label = name if len(name := short_name(frame)) <= room else f"{name[: room - 1]}…"
            boxes.append(_box(str(place), parent, label, row[total], row["category"], frame, alone))
            waiting += [(each, str(place), depth + 1) for each in reversed(callees[place])]
    trace = {
        "type": "icicle",
        "ids": [box["id"] for box in boxes],
        "parents": [box["parent"] for box in boxes],
        "labels": [box["label"] for box in boxes],
        # Whole nanoseconds: Plotly draws nothing if those of callees add up to more than their caller's.
        "values": [round(box["time_us"] * 1e3) for box in boxes],
        "customdata": [[box["frame"], _ms(box["time_us"], iterations), box["alone"]] for box in boxes],
        "branchvalues": "total",
        "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}, %{percentRoot:.1%} of all<br>%{customdata[2]}<extra></extra>",
        "marker": {"colors": [COLORS[box["color"]] for box in boxes]},
        "tiling": {"orientation": "v", "pad": 1},
        "maxdepth": _LEVELS,
        "pathbar": {"thickness": _LEVEL, "textfont": {"color": _TEXT}},
        "textposition": "middle left",
        "textfont": {"color": _TEXT},
        "leaf": {"opacity": 1},
    }
    height = _ABOVE + _LEVEL * min(deepest, _LEVELS)
    return figure([trace], height, margin={"l": 10, "r": 10, "t": 30, "b": 10}, uniformtext={"minsize": 9, "mode": "hide"})


def _box(id: str, parent: str, label: str, time_us: float, color: str, frame: str = "", alone: str = "") -> dict[str, Any]:
    name, whole = label[:_NAME], (frame or label)[:_NAME]
    return {"id": id, "parent": parent, "label": name, "time_us": time_us, "color": color, "frame": whole, "alone": alone}


def _ms(time_us: float, iterations: int) -> str:
    return f"{time_us / iterations / 1e3:,.3f} ms"


def _without_common_frames(roots: list[int], callees: dict[int, list[int]], total: Sequence[float]) -> list[int]:
    """The outermost frames that differ in what they call."""
    while len(roots) == 1:
        inner = callees[roots[0]]
        if len(inner) != 1 or not callees[inner[0]] or total[inner[0]] < _SAME * total[roots[0]]:
            break
        roots = inner
    return roots
