"""Findings of simulated jobs and of real captures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.analysis.findings import Find, Finding, Thresholds
from bridge_profiling.run import Run
from tests.analysis.findings.simulated_jobs import Here, SimulatedJob, found_by

Findings = Callable[..., dict[str, Finding]]
RunOf = Callable[..., Run]


@pytest.fixture
def run_of(tmp_path: Path) -> Iterator[RunOf]:
    """Opens runs, whose captures are read in this process, and closes them."""
    with ExitStack() as opened:
        yield lambda path=tmp_path, **options: opened.enter_context(Run(path, engine=Here(), **options))


@pytest.fixture
def find(tmp_path_factory: pytest.TempPathFactory, run_of: RunOf) -> Findings:
    """Findings of a simulated job, by id: all, or those that some find."""

    def found(job: SimulatedJob, *finds: Find, thresholds: Thresholds | None = None, **written: Any) -> dict[str, Finding]:
        run = run_of(job.write(tmp_path_factory.mktemp("job"), **written))
        findings = found_by(run, *finds, thresholds=thresholds) if finds else run.findings(thresholds)
        return {finding.id: finding for finding in findings}

    return found


@pytest.fixture(scope="session")
def real(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    """The real captures by their folder's name, each opened once."""
    with ExitStack() as opened:
        yield functools.cache(
            lambda name: opened.enter_context(Run(captures / name, parquet=tmp_path_factory.mktemp("real"), engine=Here()))
        )
