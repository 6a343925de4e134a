"""One table of what profiling costs a training on a GPU: `make bench-gpu`.

    python benchmarks/gpu_table.py [--seconds 140] [--store] [--json FILE]

Some cases of gpu_overhead.py, all GPUs of the machine at once. The table of the last release is next to this file, in
gpu_table.json; --store replaces it, and the page in docs/reference. --json writes the table elsewhere: the machine with the GPU
is seldom the one with the repository; `--show FILE --store` stores such a file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from speed_page import STORED_GPU, Line, Measured, Table, machine


class Row(NamedTuple):
    """Where a row comes from: a case of gpu_overhead.py, and how the case names the two sides."""

    case: str
    sides: str
    name: str
    floor: str


ROWS = {
    "inside": Row(
        "inside-torch",
        "recorded: with the hook / without",
        "an iteration inside the hook's window",
        "the same iteration without the hook, recorded by the same profiler",
    ),
    "blocks": Row(
        "inside-torch", "hook / bare", "a window of the hook, without its edges", "a window of `torch.profiler` driven bare"
    ),
    "begin": Row(
        "edges-torch",
        "arming and start: hook / torch.profiler",
        "the two iterations in which a window is armed and begins",
        "the same with `torch.profiler`'s `prepare_trace` and `start_trace`",
    ),
    "stop": Row(
        "edges-torch",
        "stop: hook / torch.profiler and export",
        "the end of a window, until the loop goes on",
        "`stop_trace` and torch's own export as .json.gz",
    ),
    "nsys": Row(
        "inside-nsys",
        "recorded: with the hook / without",
        "an iteration inside nsys' window",
        "the same iteration without our ranges, recorded by the same nsys",
    ),
    "nsys_outside": Row(
        "inside-nsys", "collecting: hook / without nsys", "an iteration inside nsys' window", "the same training without nsys"
    ),
}


def table_of(record: dict[str, Any]) -> Table:
    """The table of what gpu_overhead.py found."""
    rows = {(row["case"], row["what"]): row for row in record["rows"]}
    lines = {}
    for id, wanted in ROWS.items():
        row = rows.get((wanted.case, wanted.sides))
        found, why_not = None, ""
        if row is None:
            left_out = {**record["left_out"], **{case: error.splitlines()[0] for case, error in record["failed"].items()}}
            why_not = left_out.get(wanted.case, "the case ended before it")[:120].replace("|", "/")
        else:
            above, below = _sides(row["milliseconds"])
            ratio = row["ratio"]
            found = Measured(above, below, "ms", ratio["median"], ratio["low"], ratio["high"])
        lines[id] = Line(wanted.name, wanted.floor, found, why_not)
    about = record["facts"].get("inside-torch", {}).get("about", {})
    nsys = record["facts"].get("inside-nsys", {}).get("nsys", {}).get("version", "none")
    step = f"{about.get('training', '?')} of {about.get('step_ms', 0):.1f} ms an iteration"
    where = (record["machine"]["cores"], record["machine"]["python"])
    return Table(
        machine(about.get("device", "?"), f"torch {about.get('torch', '?')}", f"nsys {nsys}", step, where=where), lines
    )


def _sides(milliseconds: dict[str, float]) -> tuple[float, float]:
    """Ours and the floor's: the hook's side is named so."""
    return milliseconds["hook"], next(value for name, value in milliseconds.items() if name != "hook")


def main() -> None:
    """Measure, print, and compare with the stored table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=140, help="for all of it")
    parser.add_argument("--store", action="store_true", help="keep this as the table of the last release")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what was measured")
    parser.add_argument("--show", type=Path, metavar="FILE", help="a file of --json, instead of measuring")
    parser.add_argument("more", nargs="*", help="options of gpu_overhead.py, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.show or options.json or Path(folder, "measured.json")
        if options.show is None:
            cases = dict.fromkeys(row.case for row in ROWS.values())
            command = [sys.executable, Path(__file__).with_name("gpu_overhead.py"), "--cases", *cases, "--json", path]
            subprocess.run([*command, "--seconds", str(options.seconds), *options.more], check=False)
        table = table_of(json.loads(path.read_text()))
    table.show(Table.read(STORED_GPU))
    if options.store:
        table.store(STORED_GPU)


if __name__ == "__main__":
    main()
