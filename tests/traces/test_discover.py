"""RUN can be any directory or file: captures of any origin are found, and each says where its rank comes from."""

import json
import os
import subprocess
import sys

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import find_run
from tests.traces.kineto_files import kernel, packed


def _trace(path, rank=None, time=None):
    """A trace of a rank, last changed at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed([kernel("k", 1, 1)], distributedInfo={} if rank is None else {"backend": "nccl", "rank": rank}))
    if time is not None:
        os.utime(path, (time, time))
    return path


def _manifest(root, folder, rank, artifact, **keys):
    path = root / "manifest" / folder / f"rank-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    artifacts = [{"path": str(artifact.relative_to(root)), "bytes": 1}]
    content = {"rank": rank, "profilers": [{"name": "torch", "artifacts": artifacts}], "status": "complete", **keys}
    path.write_text(json.dumps(content))


def _found(root):
    return [(each.source, each.rank, each.rank_source, each.path.name) for each in find_run(root).captures]


@pytest.mark.integration
def test_discovery_imports_no_pyarrow():
    code = "import sys, bridge_profiling.traces.discover, bridge_profiling.traces.types; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_come_from_the_trace_then_the_manifest_then_the_name(tmp_path):
    """Every file says rank 9 by its name; two manifests and one trace know better."""
    folder = tmp_path / "torch" / "iter-2-4"
    for sub, rank in (("a", 5), ("b", None), ("c", None)):
        _trace(folder / sub / "rank-9.pt.trace.json.gz", rank)
    _manifest(tmp_path, "iter-2-4", 6, folder / "a" / "rank-9.pt.trace.json.gz")
    _manifest(tmp_path, "iter-2-4", 7, folder / "b" / "rank-9.pt.trace.json.gz")
    assert [found[1:3] for found in _found(tmp_path)] == [(5, "trace"), (7, "manifest"), (9, "file name")]


def test_the_manifest_adds_what_the_trace_does_not_say(tmp_path):
    path = _trace(tmp_path / "torch" / "iter-2-4" / "rank-1.pt.trace.json.gz")
    keys = {"coordinates": {"tp": [1, 2], "dp": [0, 4]}, "host": "node-7", "world_size": 8, "status": "partial"}
    _manifest(tmp_path, "iter-2-4", 1, path, **keys, versions={"torch": "2.11.0+cu130"}, reason="SIGTERM")
    for run in (tmp_path, path):
        info = load(find_run(run).captures[0], cached=False).info
        assert (info.rank, info.rank_source, info.coordinates) == (1, "manifest", {"tp": (1, 2), "dp": (0, 4)})
        assert (info.host, info.world_size, info.versions["torch"], info.partial) == ("node-7", 8, "2.11.0+cu130", True)
        assert "the capture is partial: SIGTERM" in [each.text for each in info.caveats]


def test_captures_of_any_origin_are_found_and_nothing_else(tmp_path):
    _trace(tmp_path / "tensorboard" / "node1_4711.1712345678.pt.trace.json.gz", 2)
    _trace(tmp_path / "plain" / "trace_rank3.json.gz")
    _trace(tmp_path / "rank_4" / "trace.json.gz")
    _trace(tmp_path / ".hidden" / "rank-5.json.gz", 5)
    binary = "nsys/rank-0.nsys-rep nsys/rank-0.sqlite nsys/rank-1.nsys-rep memory/snapshot_0.pickle memory/rank_1.pkl"
    others = {"rank-0.chakra.json": '{"schema": "1.1.1-chakra.0.0.4", "nodes": []}', "config.json": "{}", "notes.txt": "rank-1"}
    for name, content in (dict.fromkeys(binary.split(), "x") | others).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert _found(tmp_path) == [
        ("memory", 0, "file name", "snapshot_0.pickle"),
        ("nsys", 0, "file name", "rank-0.sqlite"),
        ("memory", 1, "file name", "rank_1.pkl"),
        ("nsys", 1, "file name", "rank-1.nsys-rep"),
        ("kineto", 2, "trace", "node1_4711.1712345678.pt.trace.json.gz"),
        ("kineto", 3, "file name", "trace_rank3.json.gz"),
        ("kineto", 4, "file name", "trace.json.gz"),
    ]


def test_files_that_nothing_names_are_numbered_in_order_and_that_is_said(tmp_path):
    for name in ("bert__1016001.json.gz", "prefill.json.gz", "train.json.gz"):
        _trace(tmp_path / name)
    assert [found[1:3] for found in _found(tmp_path)] == [(0, "order"), (1, "order"), (2, "order")]
    assert [each.code for each in find_run(tmp_path).caveats] == ["ranks_guessed"]


def test_two_runs_with_the_same_window_are_not_shown_as_one(tmp_path):
    for rank, name in enumerate(("first", "second")):
        path = _trace(tmp_path / name / "torch" / "iter-2-4" / f"rank-{rank}.pt.trace.json.gz", rank, time=rank + 1)
        _manifest(tmp_path / name, "iter-2-4", rank, path)
    run = find_run(tmp_path)
    assert [capture.rank for capture in run.captures] == [1]
    assert "showing second/torch/iter-2-4, the newest; 1 older kineto capture skipped" in run.caveats[0].text
    snapshot = tmp_path / "first" / "memory" / "rank-1.pickle"
    snapshot.parent.mkdir()
    snapshot.write_bytes(b"x")
    _manifest(tmp_path / "first", "iter-2-4", 1, snapshot)
    assert [caveat.code for caveat in find_run(tmp_path).caveats] == ["captures_skipped", "several_windows"]
    late = {"profilers": [], "status": "missed", "reason": "training ended"}
    for folder, codes in (("iter-2-4.1", []), ("iter-8-9", ["newer_captured_nothing"])):  # a restart, and another request
        _manifest(tmp_path / "first", folder, 1, snapshot, **late)
        assert [caveat.code for caveat in find_run(tmp_path).caveats] == [*codes, "captures_skipped", "several_windows"]
    assert find_run(tmp_path).caveats[0].text == "the newest attempt, iter-8-9, captured nothing: training ended"


T = "host_{}.17958175{}.pt.trace.json"  # by tensorboard_trace_handler: process and time in ns

#: Files by rank, oldest first; those shown, by rank, and how many cycles there are. None: the file does not say its rank.
CYCLES = {
    "a folder of each rank": (
        {0: [f"rank_0/{T.format(7, 28057925763)}", f"rank_0/{T.format(7, 28064277373)}"]}
        | {1: [f"rank_1/{T.format(8, 27983672226)}", f"rank_1/{T.format(8, 28050000000)}"]},
        {0: 1, 1: 1},
        2,
    ),
    "folders of ranks by other names, where clocks differ": (
        {5: ["gpu-a/t-1.json", "gpu-a/t-2.json"], 6: ["gpu-b/t-3.json", "gpu-b/t-4.json"]},
        {5: 1, 6: 1},
        2,
    ),
    "one folder of all": (
        {0: ["rank0_step1.json", "rank0_step2.json"], 1: ["rank1_step1.json", "rank1_step2.json"]},
        {0: 1, 1: 1},
        2,
    ),
    "a folder of each step and rank": (
        {0: ["step_10/rank_0/t.json", "step_20/rank_0/t.json"], 1: ["step_10/rank_1/t.json", "step_20/rank_1/t.json"]},
        {0: 1, 1: 1},
        2,
    ),
    "what an older job of more ranks left": (
        {0: [f"rank_0/{T.format(3, '10000000000')}"] + [f"rank_0/{T.format(7, f'{time}0000000000')}" for time in (2, 3)]}
        | {1: [f"rank_1/{T.format(4, '10000000000')}"] + [f"rank_1/{T.format(8, f'{time}0000000000')}" for time in (2, 3)]}
        | {2: [f"rank_2/{T.format(5, '10000000000')}"]},
        {0: 2, 1: 2},
        3,
    ),
    "one process whose files do not say its rank": (
        {None: [T.format(7, f"{time}0000000000") for time in (1, 2, 3)]},
        {0: 2},
        3,
    ),
}


@pytest.mark.parametrize(("written", "shown", "count"), CYCLES.values(), ids=CYCLES)
def test_of_a_schedule_that_repeats_every_rank_is_shown_with_the_same_cycle(tmp_path, written, shown, count):
    for rank, names in written.items():
        for place, name in enumerate(names):
            _trace(tmp_path / name, rank, time=1000 * (1 + place) + (rank or 0))
    run = find_run(tmp_path)
    names = {0 if rank is None else rank: of_rank for rank, of_rank in written.items()}
    assert {each.rank: str(each.path.relative_to(tmp_path)) for each in run.captures} == {
        rank: names[rank][place] for rank, place in shown.items()
    }
    (text,) = [caveat.text for caveat in run.caveats if caveat.code == "captures_skipped"]
    assert f"of {count}" in text
    oldest = find_run(tmp_path, cycle=1).captures
    assert {str(each.path.relative_to(tmp_path)) for each in oldest} == {of_rank[0] for of_rank in names.values()}
    with pytest.raises(ProfilingConfigError, match=f"--cycle {count + 1} is not in .*; it holds cycles 1 to {count}"):
        find_run(tmp_path, cycle=count + 1)


def test_a_copy_named_after_another_rank_does_not_replace_the_rank_it_claims(tmp_path):
    whole = _trace(tmp_path / "rank-0.json.gz", 0)
    (tmp_path / "rank-1.json.gz").write_bytes(whole.read_bytes()[:-20])
    assert [name for *_, name in _found(tmp_path)] == ["rank-0.json.gz", "rank-1.json.gz"]
