"""The session's jobs: those that the chosen tests need, started at once and run beside one another."""

import functools
from pathlib import Path

import pytest

from tests.conftest import NEEDS
from tests.gpu.catalog import JOBS
from tests.gpu.jobs import Jobs, devices

_HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The tests of jobs come last: others measure rates, or need memory that the job which runs out of it takes."""
    items.sort(key=lambda item: item.path.parent == _HERE and "jobs" in item.fixturenames)


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


_lacks = functools.cache(lambda need: NEEDS[need]() is not None)


def _runs(item):
    """Whether this machine has what a test needs: where it is skipped, its job must not run for nothing."""
    return not any(_lacks(need) for marker in item.iter_markers("needs") for need in marker.args)


def _ended(request, jobs):
    """The job that the test names, when it has ended."""
    missing = _why_not(JOBS[request.param])
    if missing is not None:
        pytest.skip(missing)
    return jobs.result(request.param)


#: `reference` is the training that `job` is compared with.
job, reference = (pytest.fixture(name=name)(_ended) for name in ("job", "reference"))


def _why_not(spec):
    """Why a job cannot run on this machine, or None."""
    if spec.gpus > len(devices()):
        return f"it takes {spec.gpus} GPUs, and there are {len(devices())}"
    return NEEDS["nsys_on_path"]() if spec.profiler == "nsys" else None
