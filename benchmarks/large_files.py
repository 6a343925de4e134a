"""Large files of nsys and of the memory history: seconds and peak memory of a command, next to a floor on the same file.

    python benchmarks/large_files.py REPORT.sqlite[.xz] SNAPSHOT.pickle[.xz] [--report-mb 1000] [--snapshot-mb 200] [--rounds 3]

Each file is a real one, repeated in time until it has that size. The floors: SQLite's own scan of every row, and unpickling.
"""

from __future__ import annotations

import argparse
import lzma
import os
import pickle
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

#: Larger than any correlation id of a file that is repeated.
_IDS = 1_000_000

SCAN = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
for (name,) in database.execute("select name from sqlite_master where type = 'table'").fetchall():
    columns = [row[1] for row in database.execute(f'pragma table_info("{name}")')]
    counts = ", ".join(f'count("{each}")' for each in columns)
    database.execute(f'select {counts} from "{name}"').fetchall()
"""
UNPICKLE = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"

#: Runs a command, and prints its wall and CPU seconds, and the peak memory in MB of its largest process.
_MEASURE = """
import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
print(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


def unpacked(path: Path) -> bytes:
    """A file's bytes."""
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def write_report(source: Path, target: Path, megabytes: float) -> None:
    """An exported nsys report, its events repeated in time, with iterations and correlations of their own."""
    content = unpacked(source)
    target.write_bytes(content)
    copies = round(megabytes * 1e6 / len(content))
    with sqlite3.connect(target) as database:
        database.create_function("later", 2, _later)
        first, last = database.execute("select min(start), max(end) from CUPTI_ACTIVITY_KIND_RUNTIME").fetchone()
        database.execute("create temp table copies as with recursive c(k) as (select 1 union all select k + 1 from c "
                         f"where k < {copies - 1}) select k from c")  # fmt: skip
        for (name,) in database.execute("select name from sqlite_master where type = 'table'").fetchall():
            columns = [row[1] for row in database.execute(f'pragma table_info("{name}")')]
            if "start" not in columns:
                continue
            shifted = {each: f"{each} + k * {last - first + 1_000_000}" for each in ("start", "end")}
            shifted["correlationId"] = f"correlationId + k * {_IDS}"
            shifted["text"] = "case when text like '%iteration%' then later(text, k) else text end"
            chosen = ", ".join(shifted.get(each, each) for each in columns)
            database.execute(
                f'insert into "{name}" select {chosen} from copies cross join (select * from "{name}" where start >= ?)',
                [first - 1_000_000_000],
            )


def _later(text: str, copy: int) -> str:
    return re.sub(r"\d+$", lambda found: str(int(found[0]) + 100 * copy), text)


def write_snapshot(source: Path, target: Path, megabytes: float) -> None:
    """A memory snapshot whose history is repeated; each repetition but the last frees what it has allocated."""
    content = unpacked(source)
    snapshot = pickle.loads(content)
    copies = max(round(megabytes * 1e6 / len(content)), 1)
    for place, entries in enumerate(snapshot["device_traces"]):
        if entries:
            span = entries[-1]["time_us"] - entries[0]["time_us"] + 1_000
            closed = [*entries, *_frees(entries)]
            earlier = [[_moved(each, -copy * span) for each in closed] for copy in range(copies - 1, 0, -1)]
            snapshot["device_traces"][place] = [*(each for piece in earlier for each in piece), *entries]
    target.write_bytes(pickle.dumps(snapshot, protocol=4))


def _moved(entry: dict[str, Any], by: int) -> dict[str, Any]:
    return {**entry, "frames": list(entry.get("frames", ())), "time_us": entry["time_us"] + by}


def _frees(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    live = {}
    for each in entries:
        if each["action"] == "alloc":
            live[each["addr"]] = each
        elif each["action"] == "free_completed":
            live.pop(each["addr"], None)
    actions = ("free_requested", "free_completed")
    return [{**each, "action": action, "time_us": entries[-1]["time_us"]} for each in live.values() for action in actions]


class Used(NamedTuple):
    """What a command used: wall and CPU seconds, of all its processes, and the peak MB of the largest."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def measured(command: list[str], cache: Path, checkout: Path | None = None) -> Used:
    """What a command uses with that cache, and with the code of a checkout if one is given.

    A small process starts it: one that has been larger would count its own memory as the command's.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"BRIDGE_PROFILING_CACHE": str(cache)} | ({"PYTHONPATH": str(checkout)} if checkout else {})
    asked = [sys.executable, "-c", _MEASURE, *command]
    done = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout)
    return Used(*map(float, done.stdout.split()))


def main() -> None:
    """Print a line for each side of each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--report-mb", type=float, default=1000)
    parser.add_argument("--snapshot-mb", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report, snapshot = Path(name, "rank-0.sqlite"), Path(name, "rank-0.pickle")
        began = time.perf_counter()
        write_report(options.report, report, options.report_mb)
        write_snapshot(options.snapshot, snapshot, options.snapshot_mb)
        print(f"both written in {time.perf_counter() - began:.0f} s")
        ours = [sys.executable, "-m", "bridge_profiling.cli"]
        for path, command, floor, code in (
            (report, "analyze", "SQLite's scan", SCAN),
            (snapshot, "memory", "unpickling", UNPICKLE),
        ):
            sides = {
                f"{command} --json": [*ours, command, str(path), "--json"],
                floor: [sys.executable, "-c", code, str(path)],
            }
            found: dict[str, list[Used]] = {side: [] for side in sides}
            for _ in range(options.rounds):
                for side, asked in sides.items():
                    with tempfile.TemporaryDirectory() as cache:
                        found[side].append(measured(asked, Path(cache)))
            for side, times in found.items():
                seconds, megabytes = median(each.wall_s for each in times), median(each.peak_mb for each in times)
                print(f"{path.stat().st_size / 1e6:>6.0f} MB  {side:16} {seconds:>6.1f} s {megabytes:>6.0f} MB", flush=True)


if __name__ == "__main__":
    main()
