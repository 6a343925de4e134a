"""One table of everything that needs no GPU, as ratios to a floor or a peer measured in the same run: `make bench`.

    python benchmarks/table.py [--rounds 5] [--rows report,hook] [--store]

Commands are measured in CPU seconds of all their processes, interleaved with their floor, and the ratio is the median of the
pairs'. The table of the last release is next to this file, in table.json; --store replaces it, and the page in docs/reference.
The captures are tests/planted, repeated in time until a rank has about 15 MB of JSON, an nsys report 100 MB, a snapshot 50 MB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from isal import igzip
from large_files import SCAN, UNPICKLE, measured, write_report, write_snapshot
from paired import paired_ratio
from scaled_captures import scaled

from tests.planted.cases import CASES

HERE = Path(__file__).resolve().parent

#: The table of the last release, and the page that shows it.
STORED = HERE / "table.json"
PAGE = HERE.parent / "docs" / "reference" / "speed.md"

PARSE = """
import sys, msgspec
from isal import igzip
for path in sys.argv[1:]:
    msgspec.json.decode(igzip.decompress(open(path, "rb").read()))
"""
IMPORTS = "import numpy, pyarrow.compute, pyarrow.parquet"


@dataclass(frozen=True)
class Measured:
    """Seconds, or another unit, of our side and of the floor, and the ratio with its interval."""

    ours: float
    floor: float
    unit: str
    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A row of a table: what is measured, against what, and what was found."""

    name: str
    floor: str
    found: Measured


@dataclass
class Table:
    """A table and the machine that it was measured on."""

    machine: str = ""
    lines: dict[str, Line] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Table:
        """A stored table, or an empty one."""
        stored = json.loads(path.read_text()) if path.exists() else {"machine": "", "lines": {}}
        lines = {id: Line(**line | {"found": Measured(**line["found"])}) for id, line in stored["lines"].items()}
        return Table(stored["machine"], lines)

    def store(self, path: Path) -> None:
        """Keep this as the table of the last release, and write its page."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        PAGE.write_text(page(self))

    def show(self, stored: Table) -> None:
        """Print it next to the stored one."""
        print(self.machine)
        if stored.lines:
            print(f"last release: {stored.machine}")
        print("\n".join(self.markdown(stored)))

    def markdown(self, stored: Table | None = None) -> Iterator[str]:
        """As Markdown; with the ratios of a stored table, if it has any."""
        before = stored.lines if stored else {}
        last = " last release |" if before else ""
        yield f"| | ours | floor | × floor |{last} the floor |"
        yield f"|---|---:|---:|---:|{'---:|' * bool(before)}---|"
        for id, line in self.lines.items():
            same = id in before and (before[id].name, before[id].floor) == (line.name, line.floor)
            then = before[id].found if same else None
            last = "" if not before else " |" if then is None else f" {then.ratio:.2f} |"
            yield f"| {line.name} | {_cells(line)} |{last} {line.floor} |"


def _cells(line: Line) -> str:
    found = line.found
    interval = "" if found.low is None else f" ({found.low:.2f} to {found.high:.2f})"
    return f"{found.ours:,.3g} {found.unit} | {found.floor:,.3g} {found.unit} | {found.ratio:.2f}{interval}"


def page(table: Table) -> str:
    """The page of the documentation, with this table in place of the last one."""
    before, rest = PAGE.read_text().split("<!-- table -->\n")
    _, after = rest.split("<!-- end of table -->")
    shown = "\n".join((table.machine, "", *table.markdown()))
    return f"{before}<!-- table -->\n{shown}\n<!-- end of table -->{after}"


def machine() -> str:
    """What a table was measured on, in words."""
    known = Path("/proc/cpuinfo")
    found = [line.partition(":")[2].strip() for line in known.read_text().splitlines() if line.startswith("model name")]
    system = [f"{os.cpu_count()} CPUs", platform.system(), f"Python {platform.python_version()}"]
    libraries = [f"{each} {version(each)}" for each in ("numpy", "pyarrow", "duckdb", "msgspec")]
    return f"{datetime.date.today()}, {', '.join([*(found or [platform.machine()])[:1], *system, *libraries])}."


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
    name = "torch profiler"
    found = script("capture_cost.py", "--rounds", str(rounds), "--options", name, "--layers", "1")[name]
    ratio = found["held: hook / torch's .json.gz"]
    return Measured(*found["held_s"].values(), "s", ratio["median"], ratio["low"], ratio["high"])


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
    # A rank of tiny kernels: 4 MB of JSON for two iterations.
    trace = json.loads((CASES["small_kernels_2"].folder / "torch/iter-5-7/rank-0.pt.trace.json").read_bytes())
    for event in trace["traceEvents"]:
        event["ts"] = float(event.get("ts", 0))
    text = json.dumps(trace).encode()  # with the blanks that Kineto writes
    rank, large = scaled(text, 3), scaled(text, 15)
    sizes = {"large": (large, 1), "two": (rank, 2), "other": (rank, 2), "sixteen": (rank, 16)}
    for name, (content, count) in sizes.items():
        (work / name).mkdir()
        for number in range(count):
            (work / name / f"rank-{number}.json.gz").write_bytes(igzip.compress(scaled(content, 1, number), 2))
    write_report(CASES["clean_2_nsys"].folder / "nsys/iter-5-7/rank-0.sqlite.xz", work / "rank-0.sqlite", 150)
    write_snapshot(CASES["memory_leak_2"].folder / "memory/iter-5-9/rank-0.pickle.xz", work / "rank-0.pickle", 50)


def main() -> None:
    """Measure, print, and compare with the stored table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default=",".join(ROWS), help="which of " + ", ".join(ROWS))
    parser.add_argument("--store", action="store_true", help="keep this as the table of the last release")
    options = parser.parse_args()
    table = Table(machine())
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
