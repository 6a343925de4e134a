"""The manifest is true when it cannot be rewritten."""

import os
import resource
import signal
from contextlib import suppress

import pytest

from bridge_profiling.capture import manifest_file
from bridge_profiling.manifest import find_captures, read_manifest
from bridge_profiling.traces.files import RunFiles
from tests.capture.conftest import at, raising, run
from tests.hostile.runs import manifest_of, write_run

__all__ = ["run"]

FULL = OSError(28, "No space left on device")


def _left(run):
    return sorted(path.name for path in run.root.rglob("*") if path.name.startswith("."))


def _fill(monkeypatch):
    """From here on, no manifest can be written."""
    monkeypatch.setattr(manifest_file, "write_manifest", raising(FULL))


@pytest.fixture(params=["unnamed", "named"])
def _spares(request, monkeypatch):
    """Spare files as file systems have them: without a name, and with one as on NFS."""
    if request.param == "named":
        monkeypatch.setattr(os, "O_TMPFILE", os.O_WRONLY | os.O_DIRECTORY)  # EISDIR


@pytest.mark.usefixtures("_spares")
@pytest.mark.parametrize("full_from", [1, 2, 3, 5])
@pytest.mark.parametrize("iterations", [4, 8])
def test_a_disk_that_becomes_full_changes_no_word_of_the_manifest(run, monkeypatch, full_from, iterations):
    """From an iteration on, nothing new can be written; the trace itself is written elsewhere."""
    run.train(run.config(2, 5), range(iterations))
    expected = run.manifest("iter-2-5")

    run.train(run.config(2, 5), range(iterations), on_iteration=at(full_from, lambda: _fill(monkeypatch)))
    monkeypatch.undo()
    manifest = run.manifest("iter-2-5.1")
    same = ("status", "reason", "final", "captured", "interrupted", "window", "rank")
    assert [manifest[key] for key in same] == [expected[key] for key in same]
    assert manifest["profilers"][0]["status"] == expected["status"]
    assert _left(run) == []


def test_a_limit_of_file_sizes_leaves_a_shorter_manifest_that_is_true(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(iteration, hook):
        hook.facts["more"] = ["x" * 100] * 1000
        if iteration == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))

    try:
        run.train(run.config(2, 5), range(8), between=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    manifest = run.manifest("iter-2-5")
    assert (manifest["status"], manifest["final"], manifest["framework"]) == ("failed", True, None)
    assert "File too large" in manifest["reason"] or "whole trace" in manifest["reason"]
    assert _left(run) == []


def test_a_manifest_that_cannot_be_written_at_all_says_so(run, monkeypatch):
    def fill():
        _fill(monkeypatch)
        monkeypatch.setattr(os, "pwrite", raising(FULL))

    run.train(run.config(2, 5), range(8), on_iteration=at(1, fill))
    monkeypatch.undo()
    manifest = run.manifest("iter-2-5")
    assert (manifest["status"], manifest["captured"]) == ("failed", None)
    assert "could not be rewritten" in manifest["reason"]
    assert _left(run) == []


def test_a_disk_without_room_for_spares_is_no_error(run, monkeypatch, caplog):
    monkeypatch.setattr(os, "posix_fallocate", raising(FULL))
    run.train(run.config(2, 5), range(8))
    assert run.outcome("iter-2-5") == ("complete", [2, 3, 4])
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert _left(run) == []


@pytest.mark.integration
def test_named_spares_of_a_killed_rank_count_for_no_reader_and_go_when_it_starts_again_a_day_later(run, monkeypatch):
    """As on NFS; younger ones, which may be of a living process, and other ranks' stay."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_WRONLY | os.O_DIRECTORY)
    path = run.root / "manifest" / "iter-0-2" / "rank-0.json"
    manifest = read_manifest(manifest_of(write_run(run.root.with_name("other")), 0))
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            manifest_file.ManifestFile(path).create(manifest)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    left = _left(run)
    assert len(left) == 4
    assert [path.name for path in RunFiles(run.root).files] == ["rank-0.json"]
    assert [found.rank for found in find_captures(run.root)] == [0]

    kept = [left[0], left[1].replace("rank-0", "rank-1")]
    (path.parent / kept[1]).touch()
    for name in {*left, *kept} - {left[0]}:
        os.utime(path.parent / name, (0, 0))
    run.train(run.config(2, 5), range(8))
    assert run.outcome("iter-2-5") == ("complete", [2, 3, 4])
    assert _left(run) == sorted(kept)
