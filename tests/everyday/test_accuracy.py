"""The findings on everyday trainings are at least as accurate as they were, and docs/concepts/everyday-causes.md shows them."""

from __future__ import annotations

from statistics import median

import pytest

from bridge_profiling.analysis import Run
from tests.analysis.findings.simulated_jobs import Here
from tools import everyday_causes

# Minutes of reading.
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def open_run(tmp_path_factory):
    """Opens a run in this process. What is kept of it is outside the repository."""
    return lambda path: Run(path, parquet=tmp_path_factory.mktemp("tables"), engine=Here())


@pytest.fixture(scope="module")
def found(tmp_path_factory, open_run):
    """The answers about everyday trainings."""
    return everyday_causes.answers(tmp_path_factory.mktemp("everyday"), open_run)


def test_no_answer_is_lost(found):
    """Floors of what held when this was written; raise them with each finding that gets better."""
    causes = [one for one in found if one.capture.findings]
    healthy = [one for one in found if not one.capture.findings]
    assert sum(one.right for one in causes) >= 156
    assert sum(one.right_beyond_baseline for one in causes) >= 168
    assert sum(one.bounded is True for one in causes) >= 168
    # A bound that holds because it is vacuous says nothing.
    assert median(one.bound_over_gain for one in causes if one.bound_over_gain is not None) <= 1.5
    assert sum(one.right for one in healthy) >= 47
    assert not any(one.alone for one in healthy)
    errors = [abs(one.saving_error) for one in causes if one.right and one.saving_error is not None]
    assert median(errors) <= 0.20
    steady = [one for one in found if one.capture.unprofiled.spread <= everyday_causes.STEADY]
    assert median(abs(one.iteration_error) for one in steady if one.iteration_error is not None) <= 0.05


def test_the_page_is_current(found, open_run):
    of_megatron = everyday_causes.megatron(open_run)
    assert {one.capture.name: one.contradictions for one in [*found, *of_megatron] if one.contradictions} == {}
    page = everyday_causes.page(found, of_megatron)
    assert page == everyday_causes.PAGE.read_text(encoding="utf-8"), "type: python tools/everyday_causes.py"
