"""The captures with planted causes, each read once for all tests. What is kept of them lies outside the repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.workers import Outcome, call
from bridge_profiling.traces.cache import open_entry
from bridge_profiling.traces.types import RankTables
from tests.planted.cases import CASES

RunOf = Callable[[str], Run]
TablesOf = Callable[[str], dict[int, RankTables]]


class _Here:
    """An engine that works in this process: to start others takes longer than to read captures as small as these."""

    def map(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Outcome[Any]]:
        for place, task in enumerate(tasks):
            answer, error = call(function, task)
            yield Outcome(place, answer, error)


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """The captures of a case, by its name."""
    runs: dict[str, Run] = {}

    def open_run(name: str) -> Run:
        if name not in runs:
            runs[name] = Run(CASES[name].folder, parquet=tmp_path_factory.mktemp(name), engine=_Here())
        return runs[name]

    return open_run


@pytest.fixture(scope="session")
def tables_of(run_of: RunOf) -> TablesOf:
    """The tables of each rank of a case."""

    def read(name: str) -> dict[int, RankTables]:
        found = {}
        for info, entry in run_of(name).entries():
            tables = open_entry(entry)
            assert tables is not None
            found[info.rank] = tables
        return found

    return read
