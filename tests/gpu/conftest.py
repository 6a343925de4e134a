"""The session's jobs: those that the chosen tests need, started at once and run beside one another."""

from __future__ import annotations

import functools

import pytest

from tests.conftest import NEEDS
from tests.gpu.catalog import JOBS
from tests.gpu.jobs import Job, Jobs, JobSpec, devices

_ENDED = pytest.StashKey[list[Job]]()


@pytest.fixture(scope="session")
def jobs(request, tmp_path_factory):
    """The jobs of every test that will run, started together."""
    named = [
        value
        for item in request.session.items
        if _runs(item) and hasattr(item, "callspec")
        for value in item.callspec.params.values()
    ]
    fitting = {name for name in named if isinstance(name, str) and name in JOBS and _why_not(JOBS[name]) is None}
    with Jobs(JOBS, tmp_path_factory.mktemp("jobs"), devices()) as running:
        running.start(fitting)
        yield running
        request.config.stash[_ENDED] = running.ended


_lacks = functools.cache(lambda need: NEEDS[need]() is not None)


def _runs(item: pytest.Item) -> bool:
    """Whether this machine has what a test needs: where it is skipped, its job must not run for nothing."""
    return not any(_lacks(need) for marker in item.iter_markers("needs") for need in marker.args)


@pytest.fixture
def job(request, jobs) -> Job:
    """The job that the test names, when it has ended."""
    return _ended(jobs, request.param)


@pytest.fixture
def reference(request, jobs) -> Job:
    """The training that it is compared with."""
    return _ended(jobs, request.param)


def _ended(jobs: Jobs, name: str) -> Job:
    missing = _why_not(JOBS[name])
    if missing is not None:
        pytest.skip(missing)
    return jobs.result(name)


def _why_not(spec: JobSpec) -> str | None:
    """Why a job cannot run on this machine, or None."""
    if spec.gpus > len(devices()):
        return f"it takes {spec.gpus} GPUs, and there are {len(devices())}"
    return NEEDS["nsys_on_path"]() if spec.profiler == "nsys" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A line a job, whatever became of its tests."""
    for job in sorted(config.stash.get(_ENDED, []), key=lambda job: list(JOBS).index(job.name)):
        try:
            figures = job.figures()
        except Exception as error:
            # A job that broke must not hide the figures of the others.
            figures = repr(error)
        head = f"{job.name:28} {job.spec.gpus} GPU {job.seconds:6.1f} s  exit {job.returncode!s:>4}"
        terminalreporter.write_line(f"{head} | {figures}")
