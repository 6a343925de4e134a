"""An experiment's captures are found, and brought here through its tunnel: only what is needed, and only once."""

import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_profiling.common.errors import ProfilingConfigError, TraceError
from bridge_profiling.experiments.captures import captures_of, fetch
from bridge_profiling.experiments.jobs import experiment_of, read_jobs

run = pytest.importorskip("nemo_run")

# Tunnels and NeMo-Run's experiments start shells.
pytestmark = pytest.mark.integration

TRACE, REPORT, EXPORT = "torch/{}/rank-0.pt.trace.json.gz", "nsys/{}/rank-0.nsys-rep", "nsys/{}/rank-0.sqlite"


class FarSide:
    """A tunnel to this machine: the same commands, and a record of whether it is open."""

    def __init__(self, breaks_at="nothing"):
        self.closed, self.breaks_at = False, breaks_at

    def run(self, command, hide=True, warn=False):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        return SimpleNamespace(stdout=done.stdout, ok=done.returncode == 0)

    def get(self, remote_path, local_path):
        Path(local_path.format()).write_bytes(Path(remote_path).read_bytes())
        if remote_path.endswith(self.breaks_at):
            raise OSError("the connection is gone")

    def cleanup(self):
        self.closed = True


@pytest.fixture
def far(tmp_path):
    """What a job has written: two attempts, a nsys report with its export, logs and a checkpoint."""
    # In a hidden directory, as NeMo-Run's own ~/.nemo_run is.
    root = tmp_path / ".home" / "far {side}"
    _attempt(root, "iter-2-4", "first", age=100)
    _attempt(root, "iter-2-4.1", "second attempt", age=50)
    (root / "model.pt").write_text("weights" * 1000)
    return root


def _attempt(root, folder, content, age=0, elsewhere=()):
    paths = [path.format(folder) for path in (TRACE, REPORT, EXPORT)]
    artifacts = [{"path": path, "bytes": len(content)} for path in (*paths, *elsewhere)]
    manifest = {"rank": 0, "status": "complete", "profilers": [{"name": "torch", "artifacts": artifacts}]}
    for path in (*paths, f"manifest/{folder}/rank-0.json"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(json.dumps(manifest) if path.startswith("manifest") else content)
        os.utime(root / path, (time.time() - age, time.time() - age))


def test_the_files_of_the_newest_attempt_come_once_and_no_others(far, tmp_path):
    here, progress, snapshot = tmp_path / "here", [], tmp_path / "snapshot_0.pickle"
    snapshot.write_text("memory")
    _attempt(far, "iter-2-4.1", "second attempt", age=50, elsewhere=(str(snapshot),))
    newest = ["elsewhere/snapshot_0.pickle", EXPORT.format("iter-2-4.1"), TRACE.format("iter-2-4.1")]
    copied = fetch(FarSide(), str(far), here)
    assert sorted(path.relative_to(here).as_posix() for path in copied) == newest
    manifests = ["manifest/iter-2-4.1/rank-0.json", "manifest/iter-2-4/rank-0.json"]
    files = [path for path in here.rglob("*") if path.is_file()]
    assert sorted(path.relative_to(here).as_posix() for path in files) == sorted([*manifests, *newest])
    assert (here / newest[-1]).read_text() == "second attempt"
    assert (here / newest[-1]).stat().st_mtime == pytest.approx((far / newest[-1]).stat().st_mtime, abs=1)
    assert fetch(FarSide(), str(far), here, on_progress=lambda *done: progress.append(done)) == []
    assert progress == [(0, 0)]
    (here / newest[-1]).write_text("cut")
    assert fetch(FarSide(), str(far), here) == [here / newest[-1]]


def test_without_manifests_files_named_like_captures_come(tmp_path):
    (tmp_path / "far").mkdir()
    for name in ("rank0.pt.trace.json.gz", "snapshot_0.pickle", "model.pt", "train.log", ".hidden.json.gz", "config.json"):
        (tmp_path / "far" / name).write_text(name)
    copied = fetch(FarSide(), str(tmp_path / "far"), tmp_path / "here")
    assert sorted(path.name for path in copied) == ["rank0.pt.trace.json.gz", "snapshot_0.pickle"]


def test_a_copy_that_breaks_off_leaves_no_capture(far, tmp_path):
    with pytest.raises(OSError, match="gone"):
        fetch(FarSide(breaks_at=".gz"), str(far), tmp_path / "here")
    assert not list((tmp_path / "here").rglob("rank-0.pt.trace.json.gz"))


@pytest.mark.parametrize(("name", "message"), [("nowhere", "has written no captures"), ("empty", "holds no captures")])
def test_a_directory_that_is_not_there_or_empty_is_one_error(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=message):
        fetch(FarSide(), str(tmp_path / name), tmp_path / "here")


def test_each_job_says_where_it_writes_and_one_must_be_named(home):
    experiment, _ = experiment_of(Path("far"), {"NEMORUN_HOME": str(home)})
    far = home.parent / "far" / "far" / experiment.name
    jobs = read_jobs(experiment)
    assert {job.name: job.captures_path() for job in jobs} == {
        "bare": str(far / "bare" / "profiles"),
        "contained": str(far / "contained" / "profiles"),
        "chosen": "/scratch/mine",
        "unprofiled": None,
    }
    assert jobs[0].ssh_tunnel.get("host") == "login"
    for job, message in (
        (None, r"Name one of them: far_\d+/bare"),
        ("nobody", r"no job 'nobody'. Type far_\d+/ and one of bare, contained, chosen, unprofiled"),
        ("unprofiled", "no job of the"),
    ):
        with pytest.raises(ProfilingConfigError, match=message):
            captures_of(experiment, job)


def test_a_jobs_captures_come_below_the_experiment(home):
    experiment, job = experiment_of(Path("far/contained"), {"NEMORUN_HOME": str(home)})
    _attempt(home.parent / "far" / "far" / experiment.name / "contained" / "profiles", "iter-2-4", "content")
    reached, tunnel = [], FarSide()
    with pytest.raises(ProfilingConfigError, match=r"in .* at me@login; nothing is copied from there without --fetch"):
        captures_of(experiment, job, tunnel_to=reached.append)
    assert reached == []
    found = captures_of(experiment, job, remote=True, tunnel_to=lambda built: reached.append(built) or tunnel)
    assert ([built.get("host") for built in reached], tunnel.closed) == (["login"], True)
    assert found == experiment / "contained" / "profiles"
    assert (found / TRACE.format("iter-2-4")).read_text() == "content"


def test_what_ran_here_is_read_where_it_is(home):
    experiment, job = experiment_of(Path("near"), {"NEMORUN_HOME": str(home)})
    captures = experiment / "near" / "profiles"
    with pytest.raises(TraceError, match="captured nothing: the script does not read profiling overrides"):
        captures_of(experiment, job)
    captures.mkdir(parents=True)
    (captures / "rank0.pt.trace.json.gz").touch()
    assert captures_of(experiment, job) == captures
