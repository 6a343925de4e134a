"""The session's jobs: those that the chosen tests need, started at once and run beside one another."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from tests.conftest import NEEDS
from tests.gpu.catalog import JOBS
from tests.gpu.jobs import Job, Jobs, JobSpec, devices

#: Where the session's figures go as JSON, when it is set.
RESULTS_VARIABLE = "BRIDGE_PROFILING_GPU_RESULTS"

_STEPS = ("step_before_ms", "step_inside_ms", "step_after_ms", "step_that_pays_for_the_end_ms")

_ENDED = pytest.StashKey[list[Job]]()


@pytest.fixture(scope="session")
def jobs(request, tmp_path_factory):
    """The jobs of every test that will run, started together."""
    named = [
        value for item in request.session.items if _runs(item) for value in getattr(item, "callspec", _NoCall).params.values()
    ]
    fitting = {name for name in named if isinstance(name, str) and name in JOBS and _why_not(JOBS[name]) is None}
    with Jobs(JOBS, tmp_path_factory.mktemp("jobs"), devices()) as running:
        running.start(fitting)
        yield running
        request.config.stash[_ENDED] = running.ended


@functools.cache
def _lacks(need: str) -> bool:
    return NEEDS[need]() is not None


def _runs(item: pytest.Item) -> bool:
    """Whether this machine has what a test needs: where it is skipped, its job must not run for nothing."""
    return not any(_lacks(need) for marker in item.iter_markers("needs") for need in marker.args)


class _NoCall:
    params: dict[str, object] = {}


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
    """A line a job, whatever became of its tests; all figures as JSON where they are asked for."""
    ended = config.stash.get(_ENDED, [])
    if not ended:
        return
    figures = [_figures(job) for job in sorted(ended, key=lambda job: list(JOBS).index(job.name))]
    terminalreporter.section("jobs: step before, inside and after the window, and what pays for its end")
    for row in figures:
        steps = " ".join(f"{step:9.1f}" if (step := row.get(name)) is not None else f"{'-':>9}" for name in _STEPS)
        sizes = ", ".join(f"{suffix} {size:,}" for suffix, size in row.get("bytes_per_rank_and_iteration", {}).items())
        head = f"{row['job']:28} {row['gpus']} GPU {row['seconds']:6.1f} s  exit {row['returncode']!s:>4}"
        terminalreporter.write_line(f"{head} |{steps} ms | {sizes} {row.get('unread', '')}")
    if RESULTS_VARIABLE in os.environ:
        Path(os.environ[RESULTS_VARIABLE]).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _figures(job: Job) -> dict:
    try:
        return job.figures()
    except Exception as error:
        # A job that broke must not hide the figures of the others.
        known = {"job": job.name, "gpus": job.spec.gpus, "seconds": job.seconds, "returncode": job.returncode}
        return known | {"unread": repr(error)}
