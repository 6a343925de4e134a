"""The unprofiled iteration, estimated from recorded events alone, against iterations that the run timed outside its window."""

from statistics import median

import pytest

from tests.planted.cases import CASES
from tests.planted.conftest import RunOf

pytestmark = pytest.mark.integration  # reads all captures


def test_the_estimate_is_close_to_the_unprofiled_iterations(run_of: RunOf) -> None:
    errors = {}
    for name in CASES:
        run = run_of(name)
        evidence = run.evidence()
        profiled_us = median(median(times) for times in evidence.duration_us.tolist())
        timed_us = median(median(manifest.durations_ns(profiled=False)) for manifest in run.manifests) / 1e3
        errors[name] = (profiled_us - evidence.profiler.estimated_us) / timed_us - 1.0
    assert median(abs(error) for error in errors.values()) < 0.05
    assert {name: round(error, 2) for name, error in errors.items() if abs(error) > 0.15} == {}
