"""Questions across 1,024 ranks: kernel statistics, and who waits for whom; time and memory by number of ranks.

    python benchmarks/many_ranks.py CAPTURES [--ranks 8,64,256,1024] [--copies 1] [--work DIR] [--engines]

CAPTURES is a folder of real captures of one run, as kineto/tp2_dp2. Its ranks are read once, and written again as Parquet
under the requested number of ranks, a block at a time: every block has groups of its own, except for one group of the whole
job; every rank has a clock of its own, up to a second off. --copies repeats each rank in time: 9 copies of an H200 rank of two
iterations equal 270 MB of JSON. Each question runs in a process of its own, on files that were just written.
Answers are checked: the clocks' offsets equal the injected ones, and every block waits like the first.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bridge_profiling.run import Run
from bridge_profiling.traces import cache
from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import find_run
from bridge_profiling.traces.types import RankInfo, RankTables

_TABLES = ("device_events", "collectives", "iterations")
_TIMES = ("start_ns", "end_ns", "launch_start_ns", "launch_end_ns")
_CLOCKS_NS = 1_000_000_000
_OFFSET_NS = 100_000


def planted_ns(rank: int) -> int:
    """The error of a rank's clock; rank 0's has none."""
    return random.Random(rank).randrange(-_CLOCKS_NS, _CLOCKS_NS) if rank else 0


def write_ranks(captures: Path, work: Path, count: int, copies: int) -> list[Path]:
    """Entries of this many ranks, made from the captured ones."""
    captured = [load(capture, cached=False) for capture in find_run(captures).captures]
    begins = min(pc.min(rank["iterations"]["start_ns"]).as_py() for rank in captured)
    ends = max(pc.max(rank["iterations"]["end_ns"]).as_py() for rank in captured)
    repeated = [{name: _repeated(rank, name, copies, ends - begins) for name in _TABLES} for rank in captured]
    entries = []
    for rank in range(count):
        source = repeated[rank % len(captured)]
        entry = work / f"rank{rank:05d}"
        entries.append(entry)
        if entry.is_dir():
            continue
        block = rank - rank % len(captured)
        tables = {name: _shifted(table, rank, block, len(captured), count) for name, table in source.items()}
        known = RankInfo(rank=rank, rank_source="file name", source="kineto", files=[], clock="unix", host=f"host-{block}")
        cache.write(RankTables(known, tables), entry)
    return entries


def _repeated(rank: RankTables, name: str, copies: int, span: int) -> pa.Table:
    """A table several times over, each later by the span of the run, so that ranks still end operations together."""
    steps = rank["iterations"].num_rows
    ids = rank["collectives"].num_rows
    parts = []
    for copy in range(copies):
        table = rank[name]
        for column, amount in [(each, copy * span) for each in _TIMES] + [
            ("iteration", copy * steps),
            ("collective", copy * ids),
        ]:
            table = _added(table, column, amount)
        if name == "collectives":
            table = _added(table, "sequence", copy * ids)
        parts.append(table)
    return pa.concat_tables(parts).unify_dictionaries()


def _added(table: pa.Table, column: str, amount: int) -> pa.Table:
    if column not in table.column_names or not amount:
        return table
    place = table.column_names.index(column)
    kind = table.schema.field(column).type
    return table.set_column(place, table.schema.field(column), pc.add(table[column], pa.scalar(amount, kind)))


def _shifted(table: pa.Table, rank: int, block: int, size: int, count: int) -> pa.Table:
    """A captured rank's table as another rank's: its number, its groups, its clock."""
    for column in _TIMES:
        table = _added(table, column, planted_ns(rank))
    table = table.set_column(0, table.schema.field("rank"), pa.repeat(pa.scalar(rank, pa.int32()), table.num_rows))
    if "group_ranks" not in table.column_names:
        return table
    members = [None if text is None else json.loads(text) for text in table["group_ranks"].to_pylist()]
    everybody = json.dumps(list(range(count)), separators=(",", ":"))
    moved = [
        None if each is None else everybody if len(each) == size else json.dumps([member + block for member in each])
        for each in members
    ]
    names = [
        name if each is None or len(each) == size else f"{name}-{block}"
        for name, each in zip(table["group_name"].to_pylist(), members, strict=True)
    ]
    sizes = [None if each is None else count if len(each) == size else len(each) for each in members]
    columns = {
        "group_ranks": pa.array(moved, pa.string()).dictionary_encode(),
        "group_name": pa.array(names, pa.string()).dictionary_encode(),
        "group_size": pa.array(sizes, pa.int32()),
    }
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), table.schema.field(name), values)
    return table


def ask(question: str, entries: Sequence[Path], size: int) -> dict[str, float]:
    """One question's time, rows and peak memory; runs in a process of its own."""
    begin = time.perf_counter()
    with Run(entries[0].parent) as run:
        found = getattr(run.facts, {"kernels": "kernels_by_rank", "waits": "waits", "straggler": "stragglers"}[question])
        took = time.perf_counter() - begin
        if question == "waits":
            _check(found, run.facts.clock_offsets, size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": took, "rows": found.num_rows, "peak_mb": peak}


def on_engine(engine: str, work: Path) -> dict[str, float]:
    """Time of the per-rank answers (breakdown and iterations of every rank) on an engine, and the parent's peak memory."""
    begin = time.perf_counter()
    with Run(work, engine=engine) as run:
        rows = run.facts.breakdown.num_rows
        assert rows == len(set(run.facts.iterations["rank"].to_pylist())) == len(list(work.glob("rank*")))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": time.perf_counter() - begin, "rows": rows, "peak_mb": peak}


def _check(waits: pa.Table, offsets: pa.Table, size: int) -> None:
    """Check that the injected clocks are found, and that each block waits within itself like the first."""
    for row in offsets.to_pylist():
        error = abs(row["offset_ns"] + planted_ns(row["rank"]))
        assert error < _OFFSET_NS, f"rank {row['rank']}: clock wrong by {error} ns"
    within: dict[int, float] = {}
    for row in waits.to_pylist():
        if row["rank"] // size == row["waits_for"] // size:
            within[row["rank"]] = within.get(row["rank"], 0.0) + row["wait_ns"]
    for rank, wait_ns in within.items():
        assert abs(wait_ns - within[rank % size]) <= 0.05 * within[rank % size] + 10_000_000, f"rank {rank} waits {wait_ns} ns"


def main() -> None:
    """Write the ranks, ask each question at each size, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("captures", type=Path)
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--work", type=Path, help="where the Parquet goes, and stays; a temporary directory otherwise")
    parser.add_argument("--engines", action="store_true", help="the per-rank answers too, on processes and on a local Ray")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        entries = sorted(options.work.glob("rank*"))
        if options.ask in ("process", "ray"):
            print(json.dumps(on_engine(options.ask, options.work)))
            return
        print(json.dumps(ask(options.ask, entries, len(find_run(options.captures).captures))))
        return
    print(f"duckdb {version('duckdb')}, pyarrow {version('pyarrow')}, {options.copies} copies of each rank in time")
    print(f"{'ranks':>6} {'device events':>14} {'Parquet':>9}  question    seconds  rows  peak memory")
    with tempfile.TemporaryDirectory() as temporary:
        for count in (int(each) for each in options.ranks.split(",")):
            work = (options.work or Path(temporary)) / f"{count}-ranks-{options.copies}-copies"
            entries = write_ranks(options.captures, work, count, options.copies)
            size = sum(file.stat().st_size for entry in entries for file in entry.iterdir()) / 1e6
            events = sum(pq.read_metadata(entry / "device_events.parquet").num_rows for entry in entries)
            for question in ("kernels", "waits", "straggler", *(("process", "ray") if options.engines else ())):
                command = [sys.executable, __file__, str(options.captures), "--work", str(work), "--ask", question]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
                print(
                    f"{count:>6} {events:>14,} {size:>6.0f} MB  {question:<10} {found['seconds']:>8.2f}"
                    f" {found['rows']:>5} {found['peak_mb']:>9.0f} MB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
