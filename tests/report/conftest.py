"""Runs of the real captures, opened and closed, and captures made for a claim."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.run import Run
from tests.analysis.conftest import _cached_elsewhere, captures, real, run_of, write_trace
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import steps

__all__ = ["_cached_elsewhere", "captures", "real", "run_of", "write_trace"]


@pytest.fixture
def made(tmp_path: Path, write_trace: WriteTrace, run_of: Callable[..., Run]) -> Callable[..., Run]:
    """Opens a run of ranks with these events each: by default two iterations of 0.9 ms, from 0 and 1 ms, with a kernel."""

    def make(ranks: int = 1, events: list[dict[str, Any]] | None = None, folder: str = "run") -> Run:
        (tmp_path / folder).mkdir()
        for rank in range(ranks):
            write_trace(
                steps(250, 250) if events is None else events, f"{folder}/rank-{rank}.json.gz", distributedInfo={"rank": rank}
            )
        return run_of(tmp_path / folder)

    return make
