"""RUN is a directory, or a local NeMo-Run experiment. tests/capture/control tests that a job carries out requests."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bridge_profiling.capture.control.client import TriggerResult
from bridge_profiling.capture.control.planning import plan_capture
from bridge_profiling.capture.control.protocol import CaptureRequest, RankAnswer, RequestDirectory
from tests.capture.control.conftest import STATUS as PUBLISHED

STATUS = replace(
    PUBLISHED, run="r", world_size=2, pipeline_ranks=[0], train_iters=None, fastest_ns=10**9, median_ns=10**9, cuda=False
)

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


def test_a_local_experiment_is_triggered_where_its_job_writes(home: Path) -> None:
    assert "does not exist" in refusal(home, "near"), "it has not started"
    (job,) = (home / "experiments" / "near").glob("*/job")
    status = replace(STATUS, ended="training ended after iteration 9")
    RequestDirectory(job / "profiles").write("progress.json", status)
    for run in ("near", str(job), str(job / "profiles")):
        assert "the job has ended: training ended after iteration 9" in refusal(home, run)


def test_a_job_behind_a_tunnel_must_be_triggered_there(home: Path) -> None:
    said = refusal(home, "far")
    assert "the job runs on the remote side of a tunnel, me@login" in said
    assert "Type it there: bridge-profiling trigger /far/" in said


def test_an_experiment_with_several_jobs_needs_a_job_name(home: Path) -> None:
    (experiment,) = (home / "experiments" / "two").iterdir()
    assert f"Name one of them: {experiment.name}/one" in refusal(home, "two")
    assert "does not exist" in refusal(home, "two/other"), "it has not started"


def test_neither_a_directory_nor_an_experiment_is_refused(home: Path, tmp_path: Path) -> None:
    assert "no job listens in" in refusal(home, str(tmp_path))
    assert "does not exist" in refusal(home, "nowhere")


def test_a_user_without_a_name_is_identified_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert cli._user() == str(os.getuid())


def test_the_printed_command_can_be_typed(tmp_path: Path) -> None:
    request = CaptureRequest(iterations=2, start=115, ranks=[0, 1])
    answers = {rank: RankAnswer(rank=rank, status="refused", reason="too late") for rank in (0, 1)}
    result = TriggerResult(request, STATUS, plan_capture(request, STATUS), {0: answers[0]})
    typed = cli._in_words(result, tmp_path / "my job").splitlines()[-1]
    assert shlex.split(typed.partition(": ")[2])[-1] == str(tmp_path / "my job" / "torch" / "iter-115-117")
    nobody = cli._in_words(replace(result, answers=answers), tmp_path)
    assert nobody.splitlines()[-1] == "rank 1 cannot capture: too late"
