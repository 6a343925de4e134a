"""The manifest's types: what a rank writes is what every reader gets, and nothing else passes for one."""

from pathlib import Path

import pytest

from bridge_profiling.errors import TraceError
from bridge_profiling.manifest import (
    Artifact,
    Captured,
    Clock,
    Durations,
    Manifest,
    ProfilerRecord,
    RankCapture,
    Trigger,
    Window,
    Work,
    amend_manifest,
    read_manifest,
    write_manifest,
)


def _full():
    return Manifest(
        status="partial",
        reason="SIGTERM",
        window=Window(10, 12),
        trigger=Trigger(kind="request", requested_by="me", number=1),
        other_windows=[[20, 22]],
        captured=Captured(first=10, last=10, iterations=[10]),
        interrupted=[11],
        profilers=[ProfilerRecord(name="torch", status="partial", artifacts=[Artifact(path="torch/a", bytes=3)], notes=["n"])],
        rank=1,
        world_size=2,
        coordinates={"tp": [1, 2]},
        host="node",
        command=["python", "t.py"],
        config={"profile_ranks": "all"},
        versions={"torch": "2.15.0", "cuda": None},
        framework={"name": "ray"},
        work=Work(model_flops=1e12, tokens=4, devices=2, precision="bf16"),
        durations_ns=Durations(iteration=[9, 10], duration_ns=[5, 6], mfu=[0.5, 0.25]),
        clock=Clock(unix_ns=1, perf_counter_ns=2),
    )


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "rank-1.json"
    write_manifest(path, _full())
    assert read_manifest(path) == _full()


def test_keys_of_a_newer_release_are_skipped_and_an_older_one_wrote_manifests_once(tmp_path):
    path = tmp_path / "rank-0.json"
    path.write_text('{"rank": 0, "status": "complete", "new": [1], "job": {"id": "7", "queue": "x"}}')
    read = read_manifest(path)
    assert (read.job.id, read.final) == ("7", True)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"rank": 0}', b"\xff", b"[" * 100_000])
def test_a_file_that_is_something_else_is_refused(tmp_path, content):
    (tmp_path / "rank-0.json").write_bytes(content)
    with pytest.raises(TraceError, match="is not a manifest"):
        read_manifest(tmp_path / "rank-0.json")


def test_iterations_that_a_profiler_slowed_down_are_not_unprofiled():
    manifest = _full()
    manifest.durations_ns = Durations(iteration=list(range(24)), duration_ns=list(range(24)))
    capture = RankCapture(Path(), "iter-10-12", manifest)
    assert list(capture.durations_by_iteration(profiled=True)) == [10]
    unprofiled = list(capture.durations_by_iteration(profiled=False))
    # The first, the warm-up, the window with its flush, and the same around the other window.
    assert unprofiled == [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 14, 15, 16, 17, 18, 23]


@pytest.mark.parametrize(
    ("written", "reason", "status"),
    [(True, None, "partial"), (True, "ended early", "partial"), (False, "lost", "failed")],
)
def test_a_profiler_that_outlives_its_rank_corrects_the_manifest(tmp_path, written, reason, status):
    path = tmp_path / "manifest" / "iter-10-12" / "rank-1.json"
    report = tmp_path / "nsys" / "rank-1.nsys-rep"
    report.parent.mkdir()
    report.write_text("report")
    manifest = _full()
    manifest.profilers = [ProfilerRecord(name="nsys", status="partial", reason="it ended")]
    write_manifest(path, manifest)
    amend_manifest(path, "nsys", artifacts=[report] if written else [], reason=reason)
    amended = read_manifest(path)
    assert amended.status == status
    assert amended.reason == (reason or "it ended")
    assert amended.artifacts == ([Artifact(path="nsys/rank-1.nsys-rep", bytes=6)] if written else [])
