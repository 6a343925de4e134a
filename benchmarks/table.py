"""One table of everything that needs no GPU, as ratios to a floor or a peer measured in the same run: `make bench`.

    python benchmarks/table.py [--rounds 5] [--rows report,hook] [--store]

Commands are measured in CPU seconds of all their processes, interleaved with their floor, and the ratio is the median of the
pairs'. The table of the last release is next to this file, in table.json; --store replaces it, and the page in docs/reference.
The captures are tests/planted, repeated in time until a rank has about 15 MB of JSON, an nsys report 100 MB, a snapshot 50 MB.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from isal import igzip
from large_files import SCAN, UNPICKLE, measured, write_report, write_snapshot
from paired import paired_ratio
from scaled_captures import scaled
from speed_page import STORED, Line, Measured, Table, machine, processor

HERE = Path(__file__).resolve().parent
PLANTED = HERE.parent / "tests" / "planted"

#: A rank of tiny kernels: 4 MB of JSON for two iterations.
_TRACE = PLANTED / "small_kernels_2" / "torch" / "iter-5-7" / "rank-0.pt.trace.json.xz"
_REPORT = PLANTED / "clean_2_nsys" / "nsys" / "iter-5-7" / "rank-0.sqlite.xz"
_SNAPSHOT = PLANTED / "memory_leak_2" / "memory" / "iter-5-9" / "rank-0.pickle.xz"

PARSE = """
import sys, msgspec
from isal import igzip
for path in sys.argv[1:]:
    msgspec.json.decode(igzip.decompress(open(path, "rb").read()))
"""
IMPORTS = "import numpy, pyarrow.compute, pyarrow.parquet"


@dataclass(frozen=True)
class Row:
    """What is measured against what."""

    name: str
    floor: str  # in words
    measure: Callable[[Path, int], Measured]


def pairs(ours: list[str], floor: list[str], rounds: int, *, cached: bool, cache: Path) -> Measured:
    """CPU seconds of two commands that take turns."""
    found: dict[str, list[float]] = {"ours": [], "floor": []}
    # The first round compiles modules and fills the cache.
    for turn in range(rounds + 1):
        for side, command in (("ours", ours), ("floor", floor)):
            if not cached:
                shutil.rmtree(cache, ignore_errors=True)
            used = measured(command, cache)
            if turn:
                found[side].append(used.cpu_s)
    ratio = paired_ratio(found["ours"], found["floor"])
    return Measured(median(found["ours"]), median(found["floor"]), "CPU s", ratio.median, ratio.low, ratio.high)


def _command(
    name: str, run: str, *more: str, floor: str, ranks: int = 0, cached: bool = False
) -> Callable[[Path, int], Measured]:
    """Measures a command on a folder or file of `write_captures`; the floor gets its first `ranks` files."""

    def measure(work: Path, rounds: int) -> Measured:
        place = work / run if run else None
        page = ["-o", str(work / "page.html")] if name == "report" else []
        ours = [sys.executable, "-m", "bridge_profiling.cli", name, *([str(place)] if place else []), *page]
        ours += [each.format(work=work) for each in more]
        files = [] if place is None or not ranks else [place] if place.is_file() else sorted(place.glob("rank-*"))[:ranks]
        base = [sys.executable, "-c", floor, *map(str, files)]
        return pairs(ours, base, rounds, cached=cached, cache=work / "cache")

    return measure


def _hook(work: Path, rounds: int) -> Measured:
    found = script("hook_overhead.py", "--rounds", str(4 * rounds + 1))
    times = found["nanoseconds"]
    return Measured(times["hook, before its window"], times["pair of calls (baseline)"], "ns", found["ratio"])


def _export(work: Path, rounds: int) -> Measured:
    held = script("export_stall.py", "--rounds", str(min(rounds, 3)), "--operators", "15000")["held_s"]
    ours, floor = held["the hook"], held["torch's own .json.gz"]
    return Measured(ours, floor, "s", ours / floor)


def script(name: str, *options: str, checkout: Path = HERE.parent) -> dict:
    """The JSON in the last line that a checkout's benchmark prints."""
    command = [sys.executable, checkout / "benchmarks" / name, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(checkout)})
    if done.returncode:  # otherwise its errors are torch's notes about a machine without a GPU
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


_PARSED, _IMPORTED = "unpacking and parsing the same files (isal, msgspec)", "importing NumPy and PyArrow"

ROWS = {
    "help": Row("`--help`", "`python -c pass`", _command("--help", "", floor="pass")),
    "analyze": Row("`analyze --json`, 1 rank of 75 MB", _PARSED, _command("analyze", "large", "--json", floor=PARSE, ranks=1)),
    "report": Row("`report`, 2 ranks of 15 MB", _PARSED, _command("report", "two", floor=PARSE, ranks=2)),
    "cached": Row(
        "`report`, 2 ranks, from the cache", _IMPORTED, _command("report", "two", floor=IMPORTS, cached=True)
    ),
    "compare": Row(
        "`compare` of two such runs, from the cache",
        _IMPORTED,
        _command("compare", "two", "{work}/other", floor=IMPORTS, cached=True),
    ),
    "ranks": Row("`report`, 16 ranks of 15 MB", _PARSED, _command("report", "sixteen", floor=PARSE, ranks=16)),
    "nsys": Row("`analyze --json`, an nsys export of 100 MB", "SQLite's scan of every row", _command(
        "analyze", "rank-0.sqlite", "--json", floor=SCAN, ranks=1
    )),
    "memory": Row(
        "`memory`, a snapshot of 50 MB", "unpickling it", _command("memory", "rank-0.pickle", floor=UNPICKLE, ranks=1)
    ),
    "hook": Row("an iteration with the hook, outside its window", "Megatron Bridge's pair of calls", _hook),
    "export": Row("the end of a window, until the loop goes on", "torch's own export as .json.gz", _export),
}  # fmt: skip


def write_captures(work: Path) -> None:
    """Runs of 1, 2 and 16 ranks, and a file of each other profiler."""
    trace = json.loads(lzma.decompress(_TRACE.read_bytes()))
    for event in trace["traceEvents"]:
        event["ts"] = float(event.get("ts", 0))
    text = json.dumps(trace).encode()  # with the blanks that Kineto writes
    rank, large = scaled(text, 3), scaled(text, 15)
    sizes = {"large": (large, 1), "two": (rank, 2), "other": (rank, 2), "sixteen": (rank, 16)}
    for name, (content, count) in sizes.items():
        (work / name).mkdir()
        for number in range(count):
            (work / name / f"rank-{number}.json.gz").write_bytes(igzip.compress(scaled(content, 1, number), 2))
    write_report(_REPORT, work / _REPORT.stem, 150)
    write_snapshot(_SNAPSHOT, work / _SNAPSHOT.stem, 50)


def main() -> None:
    """Measure, print, and compare with the stored table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default=",".join(ROWS), help="which of " + ", ".join(ROWS))
    parser.add_argument("--store", action="store_true", help="keep this as the table of the last release")
    options = parser.parse_args()
    libraries = [f"{each} {version(each)}" for each in ("numpy", "pyarrow", "duckdb", "msgspec")]
    table = Table(machine(processor(), *libraries, f"{options.rounds} rounds"))
    with tempfile.TemporaryDirectory() as name:
        write_captures(Path(name))
        for id in options.rows.split(","):
            row = ROWS[id]
            print(f"measuring {row.name} …", file=sys.stderr, flush=True)
            table.lines[id] = Line(row.name, row.floor, row.measure(Path(name), options.rounds))
    table.show(Table.read(STORED))
    if options.store:
        table.store(STORED)


if __name__ == "__main__":
    main()
