"""Small ranks made for a claim, and captures with known causes."""

import functools
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

from bridge_profiling.run import Run
from bridge_profiling.traces import cache
from tests.findings.simulated_jobs import Here
from tests.planted.cases import CASES
from tests.traces.conftest import write_trace

__all__ = ["write_trace"]

# A loaded machine is slow, and nothing is wrong.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _cached_elsewhere(tmp_path_factory, monkeypatch):
    """Captures lie in read-only folders, and tests leave nothing in the user's cache."""
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path_factory.getbasetemp() / "analysis-cache"))


@pytest.fixture
def run_of(tmp_path):
    """Opens runs, and closes them."""
    with ExitStack() as opened:
        yield lambda path=tmp_path, **options: opened.enter_context(Run(path, **options))


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    """Opens each capture with a known cause once: all tests share its answers."""
    with ExitStack() as opened:
        yield functools.cache(
            lambda name: opened.enter_context(Run(CASES[name].folder, parquet=tmp_path_factory.mktemp(name), engine=Here()))
        )
