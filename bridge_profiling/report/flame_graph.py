"""`RunFacts.flame_graph` as files and as a figure.

A file is for speedscope, or folded text, which flamegraph.pl and other tools read. The figure is an icicle of a rank's stacks:
a box for each frame under the frame that calls it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling import __version__
from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.common.printable import printable, shell_path
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.types import caveat
from bridge_profiling.layout import number_ranges
from bridge_profiling.report import words
from bridge_profiling.report.figures import COLORS, STYLES, figure
from bridge_profiling.report.page import write_output
from bridge_profiling.report.rows import Rows, of_source
from bridge_profiling.report.views import Figure, SectionView, captioned, section

#: Time that a stack weighs: the host's in it, or the device's in the work that it launched.
Weight = StrEnum("Weight", ["host", "device"])

#: The column of `RunFacts.flame_graph` with a stack's own time, and the one that includes what it calls.
OWN_NS = {Weight.host: "self_ns", Weight.device: "device_ns"}
TOTAL_NS = {Weight.host: "total_ns", Weight.device: "device_total_ns"}

#: Files by default.
SPEEDSCOPE_NAME, FOLDED_NAME = "flamegraph.speedscope.json", "flamegraph.folded.txt"

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

#: A Python frame as Kineto writes it.
_PYTHON = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)", re.DOTALL)

_AUTOGRAD = "autograd::engine::evaluate_function: "

#: A file of ours begins with this many bytes of header at most.
_HEADER = 256

_FOLDED = re.compile(rb"rank \d+;thread ")

#: Frames below this share of the rank's time are not drawn, so a page stays small.
LEAST_SHARE = 0.005

#: Height of what is above the boxes, in pixels.
_ABOVE = 60

#: An outer frame with one callee that takes this share of its time says nothing.
_SAME = 0.99

#: Characters of a frame's name; those that fit the whole width, and those of a label that is read after a click on its box.
_NAME, _WIDTH, _LABEL = 300, 150, 16

_LABELS = {Weight.host: "host time", Weight.device: "device time launched"}


def check_replaceable(output: Path, *, folded: bool) -> None:
    """Refuse to replace a file that is not a flame graph of the same format.

    Raises:
        ProfilingConfigError: the file exists and is another one.
    """
    if not output.is_file():
        return
    with output.open("rb") as file:
        head = file.read(_HEADER)
    same = _FOLDED.match(head) if folded else SCHEMA.encode() in head
    require(
        same or not head,
        f"{output} exists and is not a {'file of folded stacks' if folded else 'speedscope file'} of bridge-profiling",
        why="it would be replaced",
        instead="Name another file with -o, or remove this one",
    )


def write_flame_graph(
    facts: RunFacts,
    output: Path,
    *,
    weight: str = Weight.host,
    ranks: Collection[int] | None = None,
    folded: bool = False,
) -> int:
    """Write a run's stacks as a file for https://www.speedscope.app, or as folded text. Returns the number of stacks.

    Args:
        facts: of the run.
        output: the file, written atomically.
        weight: the time that a stack weighs, a value of `Weight`.
        ranks: ranks to write; None for all.
        folded: write a line `rank R;thread T;frame;…;frame nanoseconds` for each stack.

    Raises:
        ProfilingConfigError: a rank was not captured, no stack has such time, or the file is another kind of file or cannot be
            written.
    """
    require(weight in list(Weight), f"weight={weight!r} is unknown", instead="Type host or device")
    weight = Weight(weight)
    check_replaceable(output, folded=folded)
    table = of_source(facts, facts.flame_graph)
    captured = sorted(set(table["rank"].to_pylist()))
    if missing := sorted(set(ranks or ()) - set(captured)):
        raise ProfilingConfigError(
            f"no stacks of {'rank' if len(missing) == 1 else 'ranks'} {number_ranges(missing)} were captured",
            instead=f"Type ranks from {number_ranges(captured)}" if captured else "Name another RUN",
        )
    table = table.filter(pc.greater(table[OWN_NS[weight]], 0))
    if ranks is not None:
        table = table.filter(pc.is_in(table["rank"], pa.array(sorted(ranks), table["rank"].type)))
    instead = "Type --weight host" if weight is Weight.device else "Capture with operators or Python stacks"
    require(table.num_rows, f"these captures hold no stacks with {weight} time", instead=instead)
    if folded:
        text = "".join(folded_lines(table, weight))
    else:
        text = json.dumps(speedscope(table, facts.path.absolute().name, weight), separators=(",", ":"))
    write_output(output, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return table.num_rows


def speedscope(table: pa.Table, name: str, weight: Weight) -> dict[str, Any]:
    """The document: a sampled profile of each rank and thread, in which each stack is one sample."""
    frames: dict[str, int] = {}
    profiles = []
    for (rank, thread), rows in _by_thread(table):
        samples = [[frames.setdefault(frame, len(frames)) for frame in row["stack"]] for row in rows]
        weights = [row[OWN_NS[weight]] for row in rows]
        profiles.append(
            {
                "type": "sampled",
                "name": f"rank {rank}, thread {thread}, {weight} time",
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        )
    return {
        # First: `check_replaceable` finds it there.
        "$schema": SCHEMA,
        "exporter": f"bridge-profiling@{__version__}",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(each) for each in frames]},
        "profiles": profiles,
    }


def folded_lines(table: pa.Table, weight: Weight) -> Iterator[str]:
    """A line for each stack: `rank R;thread T;frame;…;frame nanoseconds`."""
    for (rank, thread), rows in _by_thread(table):
        for row in rows:
            frames = ";".join(printable(" ".join(frame.replace(";", ":").split())) for frame in row["stack"])
            yield f"rank {rank};thread {thread};{frames} {row[OWN_NS[weight]]}\n"


def short_name(frame: str) -> str:
    """A frame without its directories and autograd's prefix: "forward (linear.py:130)", "AddmmBackward0"."""
    found = _PYTHON.fullmatch(frame)
    return frame.removeprefix(_AUTOGRAD) if found is None else f"{found['name']} ({Path(found['file']).name}:{found['line']})"


def _by_thread(table: pa.Table) -> Iterator[tuple[tuple[int, int | None], Rows]]:
    """Rows by rank and thread, in their order; Python objects of one rank at a time."""
    for rank in dict.fromkeys(table["rank"].to_pylist()):
        rows = table.filter(pc.equal(table["rank"], rank)).to_pylist()
        for thread, mine in itertools.groupby(rows, key=lambda row: row["thread"]):
            yield (rank, thread), list(mine)


def _frame(frame: str) -> dict[str, Any]:
    found = _PYTHON.fullmatch(frame)
    return {"name": frame} if found is None else {**found.groupdict(), "line": int(found["line"])}


def flame_graph_section(facts: RunFacts, iterations: Rows) -> list[SectionView]:
    """The section, with the slowest rank, else the first one; empty if no range of that rank is inside another one.

    Args:
        facts: of the run.
        iterations: rows of `RunFacts.iterations` by the main source.
    """
    slowest = next((row["rank"] for row in facts.stragglers.to_pylist() if row["verdict"] != "no"), None)
    rank = slowest if slowest is not None else min((info.rank for info in facts.infos), default=None)
    # Of this rank alone: those of all ranks took a twelfth of the time of a report.
    rows = [] if rank is None else facts.flame_graph_of(rank, LEAST_SHARE).to_pylist()
    if all(len(row["stack"]) < 2 for row in rows):
        return []
    count = len({row["iteration"] for row in iterations if row["rank"] == rank})
    of = f"mean of {words.counted(count, 'iteration')}" if count else "the whole capture"
    variants = {
        _LABELS[weight]: flame_graph_figure(rows, weight, f"rank {rank}", count or 1)
        for weight in Weight
        if any(row[OWN_NS[weight]] for row in rows)
    }
    notes = [] if any(row["category"] == "python" for row in rows) else [words.sentence(caveat("no_python_stacks").text)]
    which = f"{rank}, the slowest rank" if slowest is not None else f"{rank}"
    drawn = captioned("flame", variants, rank=which, of=of)
    whole = f"All frames of all ranks, for speedscope: bridge-profiling flamegraph {shell_path(facts.path)}"
    return [section("flame", whole, notes=notes, figures=drawn)]


def flame_graph_figure(rows: Rows, weight: Weight, title: str, iterations: int = 1) -> Figure:
    """Rows of `RunFacts.flame_graph` of one rank, in their order, as an icicle.

    Outer frames that all of a thread's time has in common are left out.

    Args:
        rows: the rows.
        weight: the time that is drawn.
        title: name of the outermost box.
        iterations: number of iterations to divide times by.
    """
    own, total = OWN_NS[weight], TOTAL_NS[weight]
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

    trace: dict[str, Any] = {name: [] for name in ("ids", "parents", "labels", "values", "customdata")}
    colors: list[str] = []
    deepest = 1

    def add(id: str, parent: str, label: str, time_ns: float, color: str, frame: str = "", alone: str = "") -> None:
        trace["ids"].append(id)
        trace["parents"].append(parent)
        trace["labels"].append(label[:_NAME])
        trace["values"].append(time_ns)
        trace["customdata"].append([(frame or label)[:_NAME], _ms(time_ns, iterations), alone])
        colors.append(COLORS[color])

    add("all", "", title, everything, "muted")
    for thread, roots in threads.items():
        roots = _without_common_frames(roots, callees, [row[total] for row in rows])
        whole = sum(rows[place][total] for place in roots)
        add(f"thread {thread}", "all", f"thread {thread}", whole, "muted")
        waiting = [(place, f"thread {thread}", 3) for place in reversed(roots)]
        while waiting:
            place, parent, depth = waiting.pop()
            row, deepest = rows[place], max(deepest, depth)
            alone = f"{row['category']}, {_ms(row[own], iterations)} in it alone, {row['count'] / iterations:,.4g} calls"
            frame = row["stack"][-1]
            room = max(int(_WIDTH * row[total] / everything), _LABEL)
            label = name if len(name := short_name(frame)) <= room else f"{name[: room - 1]}…"
            add(str(place), parent, label, row[total], row["category"], frame, alone)
            waiting += [(each, str(place), depth + 1) for each in reversed(callees[place])]
    style = STYLES["icicle"]
    level, trace = style["pathbar"]["thickness"], style | trace | {"marker": {"colors": colors}}
    return figure("icicle", [trace], _ABOVE + level * min(deepest, style["maxdepth"]))


def _ms(time_ns: float, iterations: int) -> str:
    return f"{time_ns / iterations / 1e6:,.3f} ms"


def _without_common_frames(roots: list[int], callees: dict[int, list[int]], total: Sequence[float]) -> list[int]:
    """The outermost frames that differ in what they call."""
    while len(roots) == 1:
        inner = callees[roots[0]]
        if len(inner) != 1 or not callees[inner[0]] or total[inner[0]] < _SAME * total[roots[0]]:
            break
        roots = inner
    return roots
