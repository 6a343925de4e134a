"""Small ranks made for a claim, and the real captures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge_profiling.run import Run
from bridge_profiling.traces import cache
from tests.traces.conftest import captures, write_trace

__all__ = ["captures", "write_trace"]


@pytest.fixture(autouse=True)
def _cached_elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures lie in read-only folders, and tests leave nothing in the user's cache."""
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path_factory.getbasetemp() / "analysis-cache"))


@pytest.fixture
def run_of(tmp_path: Path) -> Iterator[object]:
    """Opens runs, and closes them."""
    opened: list[Run] = []

    def open_run(path: Path = tmp_path, **options: object) -> Run:
        opened.append(Run(path, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_run
    for run in opened:
        run.close()
