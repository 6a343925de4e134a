"""Runs of the real captures, opened and closed, and captures made for a claim."""

import pytest

from tests.facts.conftest import _cached_elsewhere, planted, run_of, write_trace
from tests.traces.kineto_files import steps

__all__ = ["_cached_elsewhere", "planted", "run_of", "write_trace"]


@pytest.fixture
def made(tmp_path, write_trace, run_of):
    """Opens a run of ranks with these events each: by default two iterations of 0.9 ms, from 0 and 1 ms, with a kernel."""

    def make(ranks=1, events=None, folder="run"):
        for rank in range(ranks):
            write_trace(events or steps(250, 250), f"{folder}/rank-{rank}.json.gz", distributedInfo={"rank": rank})
        return run_of(tmp_path / folder)

    return make
