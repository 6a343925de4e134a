"""Findings of simulated jobs and of real captures."""

import pytest

from bridge_profiling.facts import profiler_cost
from tests.facts.conftest import _cached_elsewhere, planted, run_of, write_trace
from tests.findings.simulated_jobs import found_by
from tests.traces.conftest import captures

__all__ = ["_cached_elsewhere", "captures", "planted", "run_of", "write_trace"]


@pytest.fixture
def open_job(monkeypatch, tmp_path_factory, run_of):
    """Opens a simulated job. Its hosts take no time to record an event."""
    monkeypatch.setattr(
        profiler_cost, "rates", lambda _: profiler_cost.Rates(*[0.0] * 6, launch_ns=5_000, gap_ns=0.0, entry_ns=0.0)
    )
    return lambda job, thresholds=None, **written: run_of(
        job.write(tmp_path_factory.mktemp("job"), **written), thresholds=thresholds
    )


@pytest.fixture
def find(open_job):
    """Findings of a simulated job, by id: all, or those that some find."""

    def found(job, *finds, thresholds=None, **written):
        run = open_job(job, thresholds=thresholds, **written)
        findings = found_by(run, *finds, thresholds=thresholds) if finds else run.findings
        return {finding.id: finding for finding in findings}

    return found
