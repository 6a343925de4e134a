"""Every command that takes a RUN takes a NeMo-Run experiment, by id or title."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analysis.compared_runs import WrittenRun

pytestmark = pytest.mark.needs("nemo_run")

ROOT = Path(__file__).resolve().parents[2]

SUBMIT = """
import nemo_run as run
from bridge_profiling.plugins import PyTorchProfilerPlugin

if __name__ == "__main__":
    with run.Experiment("training") as experiment:
        experiment.add(
            run.Script("train.py", entrypoint="python"), executor=run.LocalExecutor(), name="job",
            plugins=[PyTorchProfilerPlugin(profile_step_start=10, profile_step_end=13)],
        )
        experiment.dryrun(delete_exp_dir=False)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NEMORUN_HOME with an experiment and its captures, among files that are none of them."""
    folder = tmp_path_factory.mktemp("submit")
    (folder / "submit.py").write_text(SUBMIT)
    environment = os.environ | {"NEMORUN_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "submit.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (job,) = (folder / "home" / "experiments" / "training").glob("*/job")
    WrittenRun(iterations=3, ranks=1).write(job / "profiles")
    WrittenRun(iterations=9, ranks=3).write(job / "code" / "tests" / "data")
    return folder / "home"


@pytest.mark.parametrize("command", ["analyze", "merge", "report", "memory", "compare"])
def test_the_experiments_captures_are_what_is_read(home: Path, tmp_path: Path, command: str) -> None:
    (experiment,) = (home / "experiments" / "training").iterdir()
    runs = [experiment.name, "training"] if command == "compare" else ["training"]
    typed = [sys.executable, "-m", "bridge_profiling.cli", command, *runs]
    environment = os.environ | {"NEMORUN_HOME": str(home)}
    done = subprocess.run(typed, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    if command == "memory":
        assert "job/profiles records no memory" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert {"analyze": "median of 3", "merge": "of 1 ranks", "report": "rank 0", "compare": "Nothing changed."}[
        command
    ] in done.stdout
