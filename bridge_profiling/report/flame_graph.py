"""`Run.flame_graph` as files: for speedscope, and as folded text, which flamegraph.pl and other tools read."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling import __version__
from bridge_profiling.errors import ProfilingConfigError, require
from bridge_profiling.layout import number_ranges
from bridge_profiling.printable import printable
from bridge_profiling.report.page import write_output

#: Time that a stack weighs: the host's in it, or the device's in the work that it launched.
Weight = StrEnum("Weight", ["host", "device"])

#: The column of `Run.flame_graph` with a stack's own time, and the one that includes what it calls.
OWN_US = {Weight.host: "self_us", Weight.device: "device_us"}
TOTAL_US = {Weight.host: "total_us", Weight.device: "device_total_us"}

#: Files by default.
SPEEDSCOPE_NAME, FOLDED_NAME = "flamegraph.speedscope.json", "flamegraph.folded.txt"

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

#: A Python frame as Kineto writes it.
_PYTHON = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)", re.DOTALL)

_AUTOGRAD = "autograd::engine::evaluate_function: "

#: A file of ours begins with this many bytes of header at most.
_HEADER = 256

_FOLDED = re.compile(rb"rank \d+;thread ")

Row = dict[str, Any]


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
    table: pa.Table,
    output: Path,
    *,
    name: str,
    weight: str = Weight.host,
    ranks: Collection[int] | None = None,
    folded: bool = False,
) -> int:
    """Write rows of `Run.flame_graph` of one profiler as a speedscope file, or as folded text. Returns the number of stacks.

    Args:
        table: the rows.
        output: the file, written atomically.
        name: of the profile.
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
    captured = sorted(set(table["rank"].to_pylist()))
    if missing := sorted(set(ranks or ()) - set(captured)):
        raise ProfilingConfigError(
            f"no stacks of {'rank' if len(missing) == 1 else 'ranks'} {number_ranges(missing)} were captured",
            instead=f"Type ranks from {number_ranges(captured)}" if captured else "Name another RUN",
        )
    table = table.filter(pc.greater(table[OWN_US[weight]], 0))
    if ranks is not None:
        table = table.filter(pc.is_in(table["rank"], pa.array(sorted(ranks), table["rank"].type)))
    instead = "Type --weight host" if weight is Weight.device else "Capture with operators or Python stacks"
    require(table.num_rows, f"these captures hold no stacks with {weight} time", instead=instead)
    if folded:
        text = "".join(folded_lines(table, weight))
    else:
        text = json.dumps(speedscope(table, name, weight), separators=(",", ":"))
    write_output(output, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return table.num_rows


def speedscope(table: pa.Table, name: str, weight: Weight) -> dict[str, Any]:
    """The document: a sampled profile of each rank and thread, in which each stack is one sample."""
    frames: dict[str, int] = {}
    profiles = []
    for (rank, thread), rows in _by_thread(table):
        samples = [[frames.setdefault(frame, len(frames)) for frame in row["stack"]] for row in rows]
        weights = [round(row[OWN_US[weight]], 3) for row in rows]
        profiles.append(
            {
                "type": "sampled",
                "name": f"rank {rank}, thread {thread}, {weight} time",
                "unit": "microseconds",
                "startValue": 0,
                "endValue": round(sum(weights), 3),
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
            yield f"rank {rank};thread {thread};{frames} {round(row[OWN_US[weight]] * 1e3)}\n"


def short_name(frame: str) -> str:
    """A frame without its directories and autograd's prefix: "forward (linear.py:130)", "AddmmBackward0"."""
    found = _PYTHON.fullmatch(frame)
    return frame.removeprefix(_AUTOGRAD) if found is None else f"{found['name']} ({Path(found['file']).name}:{found['line']})"


def _by_thread(table: pa.Table) -> Iterator[tuple[tuple[int, int | None], list[Row]]]:
    """Rows by rank and thread, in their order; Python objects of one rank at a time."""
    for rank in dict.fromkeys(table["rank"].to_pylist()):
        rows = table.filter(pc.equal(table["rank"], rank)).to_pylist()
        for thread, mine in itertools.groupby(rows, key=lambda row: row["thread"]):
            yield (rank, thread), list(mine)


def _frame(frame: str) -> dict[str, Any]:
    found = _PYTHON.fullmatch(frame)
    return {"name": frame} if found is None else {**found.groupdict(), "line": int(found["line"])}
