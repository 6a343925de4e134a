"""`bridge-profiling merge`: one trace of all ranks on one clock, with every event of theirs."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.ranks import write
from tests.traces.kineto_files import call, complete, document, kernel


@pytest.fixture(autouse=True)
def second_rank(folder):
    write(folder / "run" / "rank-1.json.gz", 1)


def _read(path):
    return json.loads(gzip.decompress(Path(path).read_bytes()))


def _phase(merged, phase):
    return [event for event in merged["traceEvents"] if event["ph"] == phase]


def _names(merged, kind):
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in _phase(merged, "M") if event["name"] == kind}


def _track(event):
    return event["pid"], event["tid"]


def test_every_rank_is_a_process_whose_tracks_and_arrows_are_its_own(typed, folder):
    done = typed("merge", "--no-findings", "run", "-o", "all.json.gz")
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 events of 2 ranks" in done.stdout
    assert [path.name for path in folder.iterdir() if "all" in path.name] == ["all.json.gz"], "nothing half-written"
    merged = _read("all.json.gz")
    events = _phase(merged, "X")
    assert {rank: name for (rank, _), name in _names(merged, "process_name").items()} == {0: "rank 0", 1: "rank 1"}
    assert Counter((event["pid"], event["cat"]) for event in events) == {
        (rank, cat): 2 for rank in (0, 1) for cat in ("kernel", "cuda_runtime", "user_annotation")
    }
    tracks = _names(merged, "thread_name")
    assert sorted(tracks.values()) == ["device 0 stream 7"] * 2 + ["thread 1"] * 2
    assert set(map(_track, events)) == set(tracks)
    assert len({number for _, number in tracks}) == len(tracks)
    starts, ends = ({event["id"]: event for event in _phase(merged, phase)} for phase in "sf")
    assert len(starts) == 4
    assert {arrow: event["pid"] for arrow, event in starts.items()} == {arrow: event["pid"] for arrow, event in ends.items()}
    kernels = {(*_track(event), event["ts"]) for event in events if event["cat"] == "kernel"}
    assert {(*_track(event), event["ts"]) for event in ends.values()} == kernels


def test_without_the_host_there_is_device_work_alone(typed):
    assert typed("merge", "--no-findings", "run", "-o", "all.json", "--no-host").returncode == 0
    merged = json.loads(Path("all.json").read_text())
    assert {event.get("cat") for event in _phase(merged, "X")} == {"kernel"}
    assert not _phase(merged, "s")


def test_matched_collectives_put_ranks_on_one_clock(typed, folder):
    """Rank 1's clock is 5 ms ahead; its collectives end with those of rank 0 all the same."""
    groups = [{"pg_name": "1", "pg_desc": "TP", "backend_config": "cuda:nccl", "ranks": [0, 1], "pg_size": 2}]
    known = {
        **{"Collective name": "allreduce", "Process Group Name": "1", "Process Group Ranks": "[0, 1]", "Group size": 2},
        **{"In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float"},
    }
    (folder / "two").mkdir()
    for rank, ahead_us in ((0, 0), (1, 5000)):
        events = [complete("user_annotation", "ProfilerStep#3", ahead_us, 9000)]
        for place in range(8):
            begin = ahead_us + 1000 * place + 7 * place**2
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            events.append(call("cudaLaunchKernel", begin, 2, place + 1))
            events.append(kernel(name, begin + 20, 100 + place, correlation=place + 1, **known))
        information = {"rank": rank, "world_size": 2, "pg_config": groups}
        trace = document(events, distributedInfo=information, baseTimeNanoseconds=1_790_000_000_000_000_000)
        (folder / "two" / f"rank-{rank}.json").write_text(json.dumps(trace))
    assert typed("merge", "two", "-o", "all.json.gz").returncode == 0
    ends = {0: [], 1: []}
    for event in _phase(_read("all.json.gz"), "X"):
        if event["cat"] == "kernel":
            ends[event["pid"]].append(event["ts"] + event["dur"])
    assert len(ends[0]) == 8
    assert ends[0] == pytest.approx(ends[1], abs=0.01)
