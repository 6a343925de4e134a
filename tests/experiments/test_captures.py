"""An experiment's captures are found, and brought here through its tunnel: only what is needed, and only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_profiling.errors import ProfilingConfigError, TraceError
from bridge_profiling.experiments.captures import captures_of, fetch
from bridge_profiling.experiments.jobs import experiment_of, read_jobs

pytestmark = pytest.mark.needs("nemo_run")

ROOT = Path(__file__).resolve().parents[2]

#: The far side's directory is named by the test.
SUBMIT = """
import sys
import nemo_run as run
from bridge_profiling.plugins import PyTorchProfilerPlugin

if __name__ == "__main__":
    far = sys.argv[1]
    ssh = run.SSHTunnel(host="login", user="me", job_dir=far, port=2222)
    shared = dict(account="team", packager=run.Packager())
    script = run.Script("train.py", entrypoint="python", args=[])
    chosen = run.Script("train.py", entrypoint="python", args=["profiling.output_dir=/scratch/mine"])
    plugin = dict(plugins=[PyTorchProfilerPlugin(profile_step_start=2, profile_step_end=4)])
    with run.Experiment("far") as experiment:
        experiment.add(script, executor=run.SlurmExecutor(**shared, tunnel=ssh), name="bare", **plugin)
        contained = run.SlurmExecutor(**shared, tunnel=ssh, container_image="image.sqsh")
        experiment.add(script, executor=contained, name="contained", **plugin)
        experiment.add(chosen, executor=run.SlurmExecutor(**shared, tunnel=ssh), name="chosen", **plugin)
        experiment.add(run.Script(inline="echo"), executor=run.LocalExecutor(), name="unprofiled")
        experiment.dryrun(delete_exp_dir=False)
    with run.Experiment("near") as experiment:
        experiment.add(script, executor=run.LocalExecutor(), name="near", **plugin)
        experiment.dryrun(delete_exp_dir=False)
"""


class FarSide:
    """A tunnel to this machine: the same commands, and a record of what was copied."""

    def __init__(self) -> None:
        self.copied: list[str] = []
        self.closed = False

    def run(self, command: str, hide: bool = True, warn: bool = False) -> SimpleNamespace:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        return SimpleNamespace(stdout=done.stdout, ok=done.returncode == 0)

    def get(self, remote_path: str, local_path: str) -> None:
        self.copied.append(Path(remote_path).name)
        Path(local_path.format()).write_bytes(Path(remote_path).read_bytes())

    def cleanup(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NEMORUN_HOME with experiments that NeMo-Run wrote, and that were never submitted."""
    folder = tmp_path_factory.mktemp("submit")
    (folder / "submit.py").write_text(SUBMIT)
    environment = os.environ | {"NEMORUN_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "submit.py", str(folder / "far")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "home"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """What a job has written: two attempts, a nsys report with its export, logs and a checkpoint."""
    # In a hidden directory, as NeMo-Run's own ~/.nemo_run is.
    root = tmp_path / ".home" / "far {side}"
    for folder, content in (("iter-2-4", "first"), ("iter-2-4.1", "second attempt")):
        _attempt(root, folder, content)
        _age(root, 100 if folder == "iter-2-4" else 50)
    (root / "checkpoint").mkdir()
    (root / "checkpoint" / "model.pt").write_text("weights" * 1000)
    (root / "log.out").write_text("loss")
    return root


def _attempt(root: Path, folder: str, content: str) -> None:
    paths = [f"torch/{folder}/rank-0.pt.trace.json.gz", f"nsys/{folder}/rank-0.nsys-rep", f"nsys/{folder}/rank-0.sqlite"]
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    artifacts = [{"path": path, "bytes": len(content)} for path in paths]
    manifest = root / "manifest" / folder / "rank-0.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"rank": 0, "status": "complete", "profilers": [{"name": "torch", "artifacts": artifacts}]}))


def _age(root: Path, seconds: float) -> None:
    for path in root.rglob("*"):
        stat = path.stat()
        os.utime(path, (stat.st_atime - seconds, stat.st_mtime - seconds))


def test_the_files_of_the_newest_attempt_come_and_no_others(far: Path, tmp_path: Path) -> None:
    tunnel, here = FarSide(), tmp_path / "here"
    copied = fetch(tunnel, str(far), here)
    assert sorted(path.relative_to(here).as_posix() for path in copied) == [
        "nsys/iter-2-4.1/rank-0.sqlite",
        "torch/iter-2-4.1/rank-0.pt.trace.json.gz",
    ]
    assert sorted(path.name for path in here.rglob("*") if path.is_file()) == sorted(
        ["rank-0.json", "rank-0.json", "rank-0.pt.trace.json.gz", "rank-0.sqlite"]
    )
    trace = "torch/iter-2-4.1/rank-0.pt.trace.json.gz"
    assert (here / trace).read_text() == "second attempt"
    assert (here / trace).stat().st_mtime == pytest.approx((far / trace).stat().st_mtime, abs=1)


def test_what_is_here_is_not_copied_again(far: Path, tmp_path: Path) -> None:
    tunnel, here = FarSide(), tmp_path / "here"
    fetch(tunnel, str(far), here)
    progress: list[tuple[int, int]] = []
    assert fetch(tunnel, str(far), here, on_progress=lambda *done: progress.append(done)) == []
    assert progress == [(0, 0)]
    (here / "torch/iter-2-4.1/rank-0.pt.trace.json.gz").write_text("cut")
    assert [path.name for path in fetch(tunnel, str(far), here)] == ["rank-0.pt.trace.json.gz"]


def test_without_manifests_files_named_like_captures_come(tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.mkdir()
    for name in ("rank0.pt.trace.json.gz", "snapshot_0.pickle", "model.pt", "train.log", ".hidden.json.gz", "config.json"):
        (far / name).write_text(name)
    copied = fetch(FarSide(), str(far), tmp_path / "here")
    assert sorted(path.name for path in copied) == ["rank0.pt.trace.json.gz", "snapshot_0.pickle"]


def test_a_snapshot_with_a_place_of_its_own_comes_too(far: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "elsewhere" / "snapshot_0.pickle"
    snapshot.parent.mkdir()
    snapshot.write_text("memory")
    path = far / "manifest" / "iter-2-4.1" / "rank-0.json"
    manifest = json.loads(path.read_text())
    manifest["profilers"][0]["artifacts"].append({"path": str(snapshot), "bytes": 6})
    path.write_text(json.dumps(manifest))
    copied = fetch(FarSide(), str(far), tmp_path / "here")
    assert (tmp_path / "here" / "elsewhere" / "snapshot_0.pickle") in copied


def test_a_copy_that_breaks_off_leaves_no_capture(far: Path, tmp_path: Path) -> None:
    class Breaks(FarSide):
        def get(self, remote_path: str, local_path: str) -> None:
            super().get(remote_path, local_path)
            if remote_path.endswith(".gz"):
                raise OSError("the connection is gone")

    with pytest.raises(OSError, match="gone"):
        fetch(Breaks(), str(far), tmp_path / "here")
    assert not list((tmp_path / "here").rglob("rank-0.pt.trace.json.gz"))


def test_a_directory_that_is_not_there_or_empty_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has written no captures"):
        fetch(FarSide(), str(tmp_path / "nowhere"), tmp_path / "here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="holds no captures"):
        fetch(FarSide(), str(tmp_path / "empty"), tmp_path / "here")


def test_each_job_says_where_it_writes(home: Path) -> None:
    experiment, _ = experiment_of(Path("far"), {"NEMORUN_HOME": str(home)})
    jobs = {job.name: job for job in read_jobs(experiment)}
    far = home.parent / "far" / "far" / experiment.name
    assert jobs["bare"].captures_path() == str(far / "bare" / "profiles")
    assert jobs["contained"].captures_path() == str(far / "contained" / "profiles")
    assert jobs["chosen"].captures_path() == "/scratch/mine"
    assert jobs["bare"].ssh_tunnel.get("host") == "login"
    assert jobs["unprofiled"].captures_path() is None


def test_a_jobs_captures_come_below_the_experiment(home: Path) -> None:
    experiment, job = experiment_of(Path("far/contained"), {"NEMORUN_HOME": str(home)})
    far = home.parent / "far" / "far" / experiment.name / "contained" / "profiles"
    _attempt(far, "iter-2-4", "content")
    reached, tunnel = [], FarSide()

    def tunnel_to(built) -> FarSide:
        reached.append((built.get("user"), built.get("host"), built.get("port")))
        return tunnel

    found = captures_of(experiment, job, tunnel_to=tunnel_to)
    assert reached == [("me", "login", 2222)]
    assert tunnel.closed
    assert found == experiment / "contained" / "profiles"
    assert (found / "torch/iter-2-4/rank-0.pt.trace.json.gz").read_text() == "content"


def test_several_profiled_jobs_are_asked_about(home: Path) -> None:
    experiment, job = experiment_of(Path("far"), {"NEMORUN_HOME": str(home)})
    with pytest.raises(ProfilingConfigError, match=f"Name one of them: {experiment.name}/bare"):
        captures_of(experiment, job)
    with pytest.raises(ProfilingConfigError, match="has no job 'nobody'"):
        captures_of(experiment, "nobody")
    with pytest.raises(ProfilingConfigError, match="no job of the experiment"):
        captures_of(experiment, "unprofiled")


def test_what_ran_here_is_read_where_it_is(home: Path) -> None:
    experiment, job = experiment_of(Path("near"), {"NEMORUN_HOME": str(home)})
    with pytest.raises(TraceError, match="has written no captures"):
        captures_of(experiment, job)
    (experiment / "near" / "profiles").mkdir(parents=True)
    assert captures_of(experiment, job) == experiment / "near" / "profiles"


def test_a_directory_of_captures_wins_over_an_experiment_of_its_name(home: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "near").mkdir()
    monkeypatch.chdir(tmp_path)
    assert experiment_of(Path("near"), {"NEMORUN_HOME": str(home)}) is None
    assert experiment_of(Path("nowhere"), {"NEMORUN_HOME": str(home)}) is None


def test_a_tunnel_that_leads_nowhere_is_one_error(home: Path) -> None:
    """NeMo-Run ends the program when nobody answers, or lets us in."""
    experiment, _ = experiment_of(Path("far"), {"NEMORUN_HOME": str(home)})
    code = f"""
import socket
from pathlib import Path
from bridge_profiling.experiments.captures import captures_of, ssh_tunnel
from bridge_profiling.experiments.jobs import Built
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
arguments = {{"host": "127.0.0.1", "user": "me", "port": port, "job_dir": "/nowhere"}}
try:
    captures_of(Path({str(experiment)!r}), "bare", tunnel_to=lambda _: ssh_tunnel(Built("SSHTunnel", arguments)))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "ProfilingConfigError the tunnel to me@127.0.0.1 cannot be opened" in done.stdout, done.stdout + done.stderr
