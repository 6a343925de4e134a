"""The manifest's types: what a rank writes is what every reader gets, and nothing else passes for one."""

from pathlib import Path

import pytest

from bridge_profiling.manifest import (
    Artifact,
    Captured,
    Durations,
    Manifest,
    ProfilerRecord,
    RankCapture,
    Window,
    amend_manifest,
    read_manifest,
    write_manifest,
)
from tests.hostile.runs import manifest_with_everything


def test_what_is_written_is_read(tmp_path):
    path, written = tmp_path / "rank-1.json", manifest_with_everything(1, Path("torch/a"))
    write_manifest(path, written)
    assert read_manifest(path) == written


def test_keys_of_a_newer_release_are_skipped_and_an_older_one_wrote_manifests_once(tmp_path):
    path = tmp_path / "rank-0.json"
    path.write_text('{"rank": 0, "status": "complete", "new": [1], "job": {"id": "7", "queue": "x"}, "garbage_collection": {}}')
    read = read_manifest(path)
    assert (read.job.id, read.job.attempt, read.final) == ("7", 0, True)
    assert (read.garbage_collection.duration_ns, read.garbage_collection.longest_ns) == ([0, 0, 0], 0)


def test_iterations_that_a_profiler_slowed_down_are_not_unprofiled():
    manifest = Manifest(rank=1, status="partial", window=Window(10, 12), other_windows=[[20, 22]])
    manifest.captured = Captured(first=10, last=10, iterations=[10])
    manifest.durations_ns = Durations(iteration=list(range(24)), duration_ns=list(range(24)))
    capture = RankCapture(Path(), "iter-10-12", manifest)
    assert list(capture.durations_by_iteration(profiled=True)) == [10]
    unprofiled = list(capture.durations_by_iteration(profiled=False))
    # The first, the warm-up, the window with its flush, and the same around the other window.
    assert unprofiled == [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 14, 15, 16, 17, 18, 23]


@pytest.mark.parametrize(
    ("written", "reason", "status"), [(True, None, "partial"), (True, "ended early", "partial"), (False, "lost", "failed")]
)
def test_a_profiler_that_outlives_its_rank_corrects_the_manifest(tmp_path, written, reason, status):
    path = tmp_path / "manifest" / "iter-10-12" / "rank-1.json"
    report = tmp_path / "nsys" / "rank-1.nsys-rep"
    report.parent.mkdir()
    report.write_text("report")
    outcome = ProfilerRecord(name="nsys", status="partial", reason="it ended")
    write_manifest(path, Manifest(rank=1, status="partial", profilers=[outcome], captured=Captured(iterations=[10])))
    amend_manifest(path, "nsys", artifacts=[report] if written else [], reason=reason)
    amended = read_manifest(path)
    assert amended.status == status
    assert amended.reason == (reason or "it ended")
    assert amended.artifacts == ([Artifact(path="nsys/rank-1.nsys-rep", bytes=6)] if written else [])
