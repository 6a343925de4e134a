"""`bridge-profiling merge`: one trace of all ranks on one clock, with every event of theirs."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.conftest import write
from tests.facts.simulated_runs import MS, SimulatedRun


@pytest.fixture(autouse=True)
def second_rank(folder):
    write(folder / "run" / "rank-1.json.gz", 1)


def _read(path):
    return json.loads(gzip.decompress(Path(path).read_bytes()))


def _phase(merged, phase):
    return [event for event in merged["traceEvents"] if event["ph"] == phase]


def _names(merged, kind):
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in _phase(merged, "M") if event["name"] == kind}


def test_every_rank_is_a_process_whose_tracks_and_arrows_are_its_own(typed, folder):
    done = typed("merge", "--no-findings", "run", "-o", "all.json.gz")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in folder.iterdir() if "all" in path.name] == ["all.json.gz"], "nothing half-written"
    merged = _read("all.json.gz")
    events = _phase(merged, "X")
    assert {rank: name for (rank, _), name in _names(merged, "process_name").items()} == {0: "rank 0", 1: "rank 1"}
    assert Counter((event["pid"], event["cat"]) for event in events) == {
        (rank, cat): 2 for rank in (0, 1) for cat in ("kernel", "cuda_runtime", "user_annotation")
    }
    tracks = _names(merged, "thread_name")
    assert sorted(tracks.values()) == ["device 0 stream 7"] * 2 + ["thread 1"] * 2
    assert {(event["pid"], event["tid"]) for event in events} == set(tracks)
    starts, ends = ({event["id"]: event for event in _phase(merged, phase)} for phase in "sf")
    assert {arrow: event["pid"] for arrow, event in starts.items()} == {arrow: event["pid"] for arrow, event in ends.items()}
    places = [[event[key] for key in ("pid", "tid", "ts")] for event in events if event["cat"] == "kernel"]
    assert sorted([event[key] for key in ("pid", "tid", "ts")] for event in ends.values()) == sorted(places)


def test_without_the_host_there_is_device_work_alone(typed):
    assert typed("merge", "--no-findings", "run", "-o", "all.json", "--no-host").returncode == 0
    merged = json.loads(Path("all.json").read_text())
    assert {event.get("cat") for event in _phase(merged, "X")} == {"kernel"}
    assert not _phase(merged, "s")


def test_it_annotates_what_analyze_finds(typed):
    found = {each["title"] for each in json.loads(typed("analyze", "run", "--json").stdout)["findings"]}
    assert f"and {len(found)} findings" in typed("merge", "run", "-o", "all.json.gz").stdout
    assert {event["name"] for event in _phase(_read("all.json.gz"), "X") if event["cat"] == "finding"} == found


def test_matched_collectives_put_ranks_on_one_clock(typed, folder):
    """Rank 1's clock is 5 ms ahead; its collectives end with those of rank 0 all the same."""
    run = SimulatedRun(2, offsets_ns={1: 5 * MS})
    run.iterate(4, lambda number: [run.compute(0, number * MS), run.meet([0, 1]), run.compute(1, 7 * MS), run.meet([0, 1])])
    run.write(folder / "two")
    assert typed("merge", "two", "-o", "all.json.gz").returncode == 0
    events = [event for event in _phase(_read("all.json.gz"), "X") if event["name"] == "communication"]
    ends = [[event["ts"] + event["dur"] for event in events if event["pid"] == rank] for rank in range(2)]
    assert len(ends[0]) == 8
    assert ends[0] == pytest.approx(ends[1], abs=0.01)
