"""Findings of simulated jobs and of real captures."""

from collections.abc import Callable
from typing import Any

import pytest

from bridge_profiling.analysis.attribution import profiler_cost
from bridge_profiling.analysis.findings import Find, Finding, Thresholds
from bridge_profiling.run import Run
from tests.analysis.findings.simulated_jobs import SimulatedJob, found_by

Findings = Callable[..., dict[str, Finding]]
RunOf = Callable[..., Run]


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, run_of: RunOf) -> Findings:
    """Findings of a simulated job, by id: all, or those that some find. Its hosts take no time to record an event."""
    monkeypatch.setattr(profiler_cost, "rates", lambda: profiler_cost.Rates(0.0, 0.0, 0.0, 0.0, 0.0, launch_us=5.0))

    def found(job: SimulatedJob, *finds: Find, thresholds: Thresholds | None = None, **written: Any) -> dict[str, Finding]:
        run = run_of(job.write(tmp_path_factory.mktemp("job"), **written))
        findings = found_by(run, *finds, thresholds=thresholds) if finds else run.findings(thresholds)
        return {finding.id: finding for finding in findings}

    return found
