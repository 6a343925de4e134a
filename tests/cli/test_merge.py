"""`bridge-profiling merge`: one trace of all ranks on one clock, with every event of theirs."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.report.merged_trace import write_merged_trace
from bridge_profiling.run import Run
from bridge_profiling.traces import kineto
from tests.cli.test_analyze import write
from tests.traces.conftest import captures
from tests.traces.kineto_files import call, complete, document, kernel

__all__ = ["captures"]

Merge = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def merge(tmp_path: Path) -> Merge:
    """Runs the command in a fresh process, in a directory with two good ranks."""
    for rank in (0, 1):
        write(tmp_path / "run" / f"rank-{rank}.json.gz", rank)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "bridge_profiling.cli", "merge", "--no-findings", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    return run


def _read(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.name.endswith(".gz") else raw)


def _phase(merged: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in merged["traceEvents"] if event["ph"] == phase]


def test_every_rank_is_a_named_process_with_all_its_events(merge: Merge, tmp_path: Path) -> None:
    done = merge("run", "-o", "all.json.gz")
    assert done.returncode == 0, done.stderr
    assert "12 events of 2 ranks" not in done.stderr
    merged = _read(tmp_path / "all.json.gz")
    names = {event["pid"]: event["args"]["name"] for event in _phase(merged, "M") if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    events = Counter((event["pid"], event["cat"]) for event in _phase(merged, "X"))
    assert events == {(rank, cat): 2 for rank in (0, 1) for cat in ("kernel", "cuda_runtime", "user_annotation")}
    assert "12 events of 2 ranks" in done.stdout


def test_no_two_tracks_share_a_number_and_each_has_a_name(merge: Merge, tmp_path: Path) -> None:
    merge("run", "-o", "all.json")
    merged = _read(tmp_path / "all.json")
    named = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in _phase(merged, "M") if event["name"] == "thread_name"
    }
    used = {(event["pid"], event["tid"]) for event in _phase(merged, "X")}
    assert used == set(named)
    assert len({track for _, track in used}) == len(used)
    assert sorted(named.values()) == ["device 0 stream 7"] * 2 + ["thread 1"] * 2


def test_arrows_lead_from_launches_to_kernels(merge: Merge, tmp_path: Path) -> None:
    merge("run", "-o", "all.json")
    merged = _read(tmp_path / "all.json")
    starts = {event["id"]: event for event in _phase(merged, "s")}
    ends = {event["id"]: event for event in _phase(merged, "f")}
    assert set(starts) == set(ends)
    assert len(starts) == 4
    kernels = {(event["pid"], event["tid"], event["ts"]) for event in _phase(merged, "X") if event["cat"] == "kernel"}
    assert {(event["pid"], event["tid"], event["ts"]) for event in ends.values()} == kernels
    assert all(starts[number]["pid"] == ends[number]["pid"] for number in starts)


def test_without_the_host_there_is_device_work_alone(merge: Merge, tmp_path: Path) -> None:
    assert merge("run", "-o", "all.json", "--no-host").returncode == 0
    assert {event.get("cat") for event in _phase(_read(tmp_path / "all.json"), "X")} == {"kernel"}
    assert not _phase(_read(tmp_path / "all.json"), "s")


@pytest.mark.system
def test_a_merged_trace_of_real_ranks_holds_their_events_to_the_nanosecond(captures: Path, tmp_path: Path) -> None:
    with Run(captures / "kineto" / "pp2_dp2", parquet=tmp_path / "tables") as run:
        count = write_merged_trace(run.entries(), tmp_path / "all.json.gz")
    merged = _read(tmp_path / "all.json.gz")
    assert count == len(_phase(merged, "X"))
    base = merged["baseTimeNanoseconds"]
    for rank in range(4):
        tables = kineto.read(captures / "kineto" / "pp2_dp2" / f"rank-{rank}.json.gz")
        expected = Counter()
        for table in (tables.device_events, tables.host_events):
            expected.update(zip(*(table[name].to_pylist() for name in ("name", "start_ns", "end_ns")), strict=True))
        found = Counter(
            (event["name"], base + round(event["ts"] * 1000), base + round(event["ts"] * 1000) + round(event["dur"] * 1000))
            for event in _phase(merged, "X")
            if event["pid"] == rank
        )
        assert found == expected


def test_matched_collectives_put_ranks_on_one_clock(tmp_path: Path) -> None:
    """Rank 1's clock is 5 ms ahead; its collectives end with those of rank 0 all the same."""
    groups = [{"pg_name": "1", "pg_desc": "TP", "backend_config": "cuda:nccl", "ranks": [0, 1], "pg_size": 2}]
    for rank, ahead_us in ((0, 0), (1, 5000)):
        known = {
            "Collective name": "allreduce",
            "Process Group Name": "1",
            "Process Group Ranks": "[0, 1]",
            "Group size": 2,
            "In msg nelems": 1024,
            "Out msg nelems": 1024,
            "dtype": "Float",
        }
        events = [complete("user_annotation", "ProfilerStep#3", ahead_us, 9000)]
        for place in range(8):
            begin = ahead_us + 1000 * place + 7 * place**2
            events += [
                call("cudaLaunchKernel", begin, 2, place + 1),
                kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin + 20, 100 + place, correlation=place + 1, **known),
            ]
        information = {"rank": rank, "world_size": 2, "pg_config": groups}
        trace = document(events, distributedInfo=information, baseTimeNanoseconds=1_790_000_000_000_000_000)
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(trace))
    command = [sys.executable, "-m", "bridge_profiling.cli", "merge", str(tmp_path), "-o", str(tmp_path / "all.json.gz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    merged = _read(tmp_path / "all.json.gz")
    ends = {
        rank: [event["ts"] + event["dur"] for event in _phase(merged, "X") if event["pid"] == rank and event["cat"] == "kernel"]
        for rank in (0, 1)
    }
    assert len(ends[0]) == 8
    assert ends[0] == pytest.approx(ends[1], abs=0.01)


def test_a_bad_rank_is_named_and_the_others_are_merged(merge: Merge, tmp_path: Path) -> None:
    (tmp_path / "run" / "rank-2.json.gz").write_bytes(b"\x1f\x8bno gzip")
    done = merge("run", "-o", "all.json.gz")
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert "rank-2.json.gz" in error
    assert {event["pid"] for event in _phase(_read(tmp_path / "all.json.gz"), "X")} == {0, 1}


@pytest.mark.parametrize(("output", "said"), [("no/such/folder/all.json", "-o"), ("run", "-o")])
def test_a_place_that_cannot_be_written_is_a_usage_error(merge: Merge, output: str, said: str) -> None:
    done = merge("run", "-o", output)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_run_that_is_not_there_is_a_usage_error(merge: Merge) -> None:
    done = merge("nowhere", "-o", "all.json")
    assert done.returncode == 2
    assert "does not exist" in done.stderr


def test_nothing_half_written_is_left(merge: Merge, tmp_path: Path) -> None:
    merge("run", "-o", "all.json.gz")
    assert [path.name for path in tmp_path.iterdir() if "all" in path.name] == ["all.json.gz"]


@pytest.mark.system
def test_memory_does_not_grow_with_the_number_of_ranks(captures: Path, tmp_path: Path) -> None:
    """Eight ranks of 8,000 device and 54,000 host events, against one."""
    code = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from bridge_profiling.run import Run
from bridge_profiling.report.merged_trace import write_merged_trace
capture, tables, output, ranks = sys.argv[1:]
((info, entry),) = Run(capture, parquet=tables).entries()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_merged_trace([(replace(info, rank=rank), entry) for rank in range(int(ranks))], Path(output))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    capture = captures / "kineto" / "tp2_dp2" / "rank-0.json.gz"
    grown_kib = []
    # The first fills the cache.
    for ranks in ("1", "1", "8"):
        arguments = [str(capture), str(tmp_path / "tables"), str(tmp_path / "all.json.gz"), ranks]
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        grown_kib.append(int(done.stdout))
    assert grown_kib[2] < grown_kib[1] + 20 * 1024
    assert (tmp_path / "all.json.gz").stat().st_size > 5_000_000
