"""RUN may be a local NeMo-Run experiment, by id or title. tests/capture/control tests that a job carries out requests."""

import re
from dataclasses import replace

import pytest

from bridge_profiling.capture.control.directory import RequestDirectory
from tests.capture.control.conftest import STATUS
from tests.compare.compared_runs import WrittenRun
from tests.experiments.conftest import home

__all__ = ["home"]

pytestmark = pytest.mark.needs("nemo_run")


@pytest.fixture
def experiment(home, monkeypatch):
    """A local experiment with captures, among files that are none of them."""
    monkeypatch.setenv("NEMORUN_HOME", str(home))
    (folder,) = (home / "experiments" / "near").iterdir()
    WrittenRun(iterations=3).write(folder / "near" / "profiles")
    WrittenRun(iterations=9, ranks=3).write(folder / "near" / "code" / "tests" / "data")
    return folder


@pytest.mark.integration
def test_the_experiments_captures_are_what_is_read(experiment, typed):
    assert "median of 3" in typed("analyze", "near").stdout
    done = typed("compare", f"{experiment.name}/near", "near")
    assert (done.returncode, "Nothing changed." in done.stdout) == (0, True), done.stderr


@pytest.mark.integration
def test_an_experiment_that_cannot_be_triggered_here_says_why(experiment, typed):
    done = typed("trigger", "far/bare")
    assert (done.returncode, done.stdout) == (2, "")
    there = r"remote side of a tunnel, me@login.*Type it there: bridge-profiling trigger /.*/far/far/far_\d+/bare"
    assert re.search(there, done.stderr), done.stderr


@pytest.mark.integration
def test_a_local_experiment_is_triggered_where_its_job_writes(experiment, typed):
    captures = experiment / "near" / "profiles"
    RequestDirectory(captures).write("progress.json", replace(STATUS, ended="training ended after iteration 9"))
    for run in ("near", str(experiment / "near"), str(captures)):
        assert "the job has ended: training ended after iteration 9" in typed("trigger", run).stderr
