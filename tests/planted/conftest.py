"""The captures with known causes, each read once for all tests. What is kept of them is outside the repository."""

import functools

import pytest

from bridge_profiling.run import Run
from tests.findings.simulated_jobs import Here
from tests.planted.cases import CASES


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """The captures of a case, by its name."""
    return functools.cache(lambda name: Run(CASES[name].folder, parquet=tmp_path_factory.mktemp(name), engine=Here()))
