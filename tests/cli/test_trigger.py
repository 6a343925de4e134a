"""What may be typed for RUN: a directory, or a local NeMo-Run experiment. That a job does as asked is in tests/capture."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bridge_profiling.capture.control.client import Asked
from bridge_profiling.capture.control.mailbox import Mailbox
from bridge_profiling.capture.control.planning import JobState
from bridge_profiling.capture.control.request import CaptureRequest

#: The module: the package calls the command by the same name.
cli = importlib.import_module("bridge_profiling.cli.trigger")

pytestmark = pytest.mark.needs("nemo_run")

ROOT = Path(__file__).resolve().parents[2]

SUBMIT = """
import nemo_run as run
from bridge_profiling.plugins import PyTorchProfilerPlugin

if __name__ == "__main__":
    script = run.Script("train.py", entrypoint="python")
    plugins = [PyTorchProfilerPlugin(profile_step_start=2, profile_step_end=4)]
    ssh = run.SSHTunnel(host="login", user="me", job_dir="/far")
    with run.Experiment("near") as experiment:
        experiment.add(script, executor=run.LocalExecutor(), name="job", plugins=plugins)
        experiment.dryrun(delete_exp_dir=False)
    with run.Experiment("far") as experiment:
        executor = run.SlurmExecutor(account="team", packager=run.Packager(), tunnel=ssh)
        experiment.add(script, executor=executor, name="job", plugins=plugins)
        experiment.dryrun(delete_exp_dir=False)
    with run.Experiment("two") as experiment:
        for name in ("one", "other"):
            experiment.add(script, executor=run.LocalExecutor(), name=name, plugins=plugins)
        experiment.dryrun(delete_exp_dir=False)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NEMORUN_HOME with experiments that were never submitted."""
    folder = tmp_path_factory.mktemp("submit")
    (folder / "submit.py").write_text(SUBMIT)
    environment = os.environ | {"NEMORUN_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "submit.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "home"


def refusal(home: Path, *words: str) -> str:
    typed = [sys.executable, "-m", "bridge_profiling.cli", "trigger", *words]
    done = subprocess.run(typed, env=os.environ | {"NEMORUN_HOME": str(home)}, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_local_experiment_is_asked_where_its_job_writes(home: Path) -> None:
    assert "no directory" in refusal(home, "near"), "it has not started"
    (job,) = (home / "experiments" / "near").glob("*/job")
    # A job that ran, and said so when it ended.
    state = {"ended": "training ended after iteration 9", "run": "r", "open": None}
    empty = ("launch", "host", "profile_ranks", "profilers", "windows", "pipeline_ranks")
    state |= dict.fromkeys(("job_id", "pid_space", "iteration", "fastest_ns", "median_ns", "train_iters")) | {
        key: [] for key in empty
    }
    state |= dict.fromkeys(("pid", "completed", "world_size", "nsys_captures_left"), 1)
    state |= {"poll_seconds": 1.0, "records_memory": False, "cuda": False, "under_nsys": False}
    Mailbox(job / "profiles").write("progress.json", state)
    for run in ("near", str(job), str(job / "profiles")):
        assert "the job has ended: training ended after iteration 9" in refusal(home, run)


def test_a_job_at_the_other_end_of_a_tunnel_is_to_be_asked_there(home: Path) -> None:
    said = refusal(home, "far")
    assert "the job runs at the other end of a tunnel, me@login" in said
    assert "Type it there: bridge-profiling trigger /far/" in said


def test_an_experiment_of_several_jobs_is_to_be_named_with_one(home: Path) -> None:
    (experiment,) = (home / "experiments" / "two").iterdir()
    assert f"Name one of them: {experiment.name}/one" in refusal(home, "two")
    assert "no directory" in refusal(home, "two/other"), "it has not started"


def test_what_is_neither_a_directory_nor_an_experiment_is_refused(home: Path, tmp_path: Path) -> None:
    assert "no job listens in" in refusal(home, str(tmp_path))
    assert "is no directory" in refusal(home, "nowhere")


def test_a_user_without_a_name_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert cli._user() == str(os.getuid())


def test_the_command_that_is_told_can_be_typed(tmp_path: Path) -> None:
    accepted = {"start": 5, "end": 7, "attempt": 0, "ranks": [0, 1], "profilers": ["torch"], "accepted_at_iteration": 1}
    state = cast(JobState, SimpleNamespace(median_ns=10**9))
    asked = Asked(CaptureRequest(iterations=2), state, accepted, {0: {"status": "refused", "reason": "too late"}})
    [*_, typed] = cli._told(asked, tmp_path / "my job")
    assert shlex.split(typed.partition(": ")[2])[-1] == str(tmp_path / "my job" / "torch" / "iter-5-7")
    nobody = replace(asked, answers={rank: {"status": "refused", "reason": "too late"} for rank in (0, 1)})
    assert cli._told(nobody, tmp_path)[-1] == "rank 1 cannot: too late"
