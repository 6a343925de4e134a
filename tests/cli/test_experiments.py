"""RUN may be a local NeMo-Run experiment, by id or title. tests/capture/control tests that a job carries out requests."""

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
from tests.analysis.compared_runs import WrittenRun
from tests.capture.control.conftest import STATUS as PUBLISHED
from tests.cli.conftest import Typed

STATUS = replace(
    PUBLISHED, run="r", world_size=2, pipeline_ranks=[0], train_iters=None, fastest_ns=10**9, median_ns=10**9, cuda=False
)

#: The module: the package calls the command by the same name.
trigger = importlib.import_module("bridge_profiling.cli.trigger")

pytestmark = pytest.mark.needs("nemo_run")

SUBMIT = """
import nemo_run as run
from bridge_profiling.plugins import PyTorchProfilerPlugin

if __name__ == "__main__":
    tunnel = run.SSHTunnel(host="login", user="me", job_dir="/far")
    slurm = run.SlurmExecutor(account="team", packager=run.Packager(), tunnel=tunnel)
    local = run.LocalExecutor()
    for title, executor, jobs in (("near", local, ["job"]), ("far", slurm, ["job"]), ("two", local, ["one", "other"])):
        with run.Experiment(title) as experiment:
            for name in jobs:
                plugins = [PyTorchProfilerPlugin(profile_step_start=2, profile_step_end=4)]
                script = run.Script("train.py", entrypoint="python")
                experiment.add(script, executor=executor, name=name, plugins=plugins)
            experiment.dryrun(delete_exp_dir=False)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NEMORUN_HOME with experiments that were never submitted; captures of one, among files that are none of them."""
    folder = tmp_path_factory.mktemp("submit")
    (folder / "submit.py").write_text(SUBMIT)
    environment = os.environ | {"NEMORUN_HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "submit.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (job,) = (folder / "home" / "experiments" / "two").glob("*/one")
    WrittenRun(iterations=3).write(job / "profiles")
    WrittenRun(iterations=9, ranks=3).write(job / "code" / "tests" / "data")
    return folder / "home"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("analyze two/one", "median of 3"),
        ("merge two/one", "of 1 ranks"),
        ("memory two/one", "one/profiles records no memory"),
        ("compare {id}/one two/one", "Nothing changed."),
    ],
)
def test_the_experiments_captures_are_what_is_read(home: Path, typed: Typed, command: str, said: str) -> None:
    (experiment,) = (home / "experiments" / "two").iterdir()
    done = typed(*command.format(id=experiment.name).split(), NEMORUN_HOME=str(home))
    assert done.returncode == (1 if "memory" in command else 0), done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("near", "does not exist"),  # It has not started.
        ("nowhere", "does not exist"),
        (".", "no job listens in"),
        ("far", "the job runs on the remote side of a tunnel, me@login"),
        ("far", "Type it there: bridge-profiling trigger /far/"),
        ("two", "Name one of them: {id}/one"),
    ],
)
def test_an_experiment_that_cannot_be_triggered_here_says_why(home: Path, typed: Typed, run: str, said: str) -> None:
    (experiment,) = (home / "experiments" / "two").iterdir()
    done = typed("trigger", run, NEMORUN_HOME=str(home))
    assert (done.returncode, done.stdout) == (2, "")
    assert said.format(id=experiment.name) in done.stderr


@pytest.mark.integration
def test_a_local_experiment_is_triggered_where_its_job_writes(home: Path, typed: Typed) -> None:
    (job,) = (home / "experiments" / "two").glob("*/one")
    RequestDirectory(job / "profiles").write("progress.json", replace(STATUS, ended="training ended after iteration 9"))
    for run in ("two/one", str(job), str(job / "profiles")):
        done = typed("trigger", run, NEMORUN_HOME=str(home))
        assert "the job has ended: training ended after iteration 9" in done.stderr


def test_the_printed_command_can_be_typed(tmp_path: Path) -> None:
    request = CaptureRequest(iterations=2, start=115, ranks=[0, 1])
    answers = {rank: RankAnswer(rank=rank, status="refused", reason="too late") for rank in (0, 1)}
    result = TriggerResult(request, STATUS, plan_capture(request, STATUS), {0: answers[0]})
    words = trigger._in_words(result, tmp_path / "my job", captured=False).splitlines()[-1]
    assert shlex.split(words.partition(": ")[2])[-1] == str(tmp_path / "my job" / "torch" / "iter-115-117")
    nobody = trigger._in_words(replace(result, answers=answers), tmp_path, captured=False)
    assert nobody.splitlines()[-1] == "rank 1 cannot capture: too late"
