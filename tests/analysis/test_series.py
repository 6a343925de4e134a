"""Runs in order: which changed, and whether they have a trend."""

import json

import pytest

from bridge_profiling.analysis.compare.series import compare_series
from bridge_profiling.analysis.compare.statistics import change_of_mean, slope_of
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.report.series_view import series_view
from tests.analysis.compared_runs import WrittenRun

QUIET = [5.0, 5.01, 4.99, 5.02, 5.0]


@pytest.fixture
def series(tmp_path_factory, run_of):
    return lambda *runs: compare_series([run_of(run.write(tmp_path_factory.mktemp("run"))) for run in runs])


def scaled(*factors, **more):
    return [WrittenRun(unprofiled_ms=[each * factor for each in QUIET], seed=n, **more) for n, factor in enumerate(factors)]


@pytest.mark.parametrize(
    ("factors", "verdicts", "trend"),
    [
        ((1, 1, 1, 1, 1), ["unchanged"] * 4, "contains zero"),
        ((1, 1.02, 1.04, 1.06, 1.08, 1.1), ["slower"] * 5, 100),
        # A jump is no slope, though a line through it rises.
        ((1, 1, 1, 1.1, 1.1, 1.1), ["unchanged", "unchanged", "slower", "unchanged", "unchanged"], "one jump fits"),
        ((1, 0.8, 0.7, 0.6), ["faster"] * 3, "a trend needs 5 runs"),
    ],
)
def test_runs_that_changed_and_a_slope_only_where_there_is_one(series, factors, verdicts, trend):
    found = series(*scaled(*factors))
    assert [run.against_previous.step.verdict for run in found.runs[1:]] == verdicts
    assert found.runs[-1].against_first.step.us.speedup == pytest.approx(1 / factors[-1])
    text = " ".join(series_view(found).verdict.sentences)
    if isinstance(trend, str):
        assert (found.trend, trend in found.no_trend, "Trend" in text) == (None, True, False)
    else:
        assert (found.trend.value, 0 < found.trend.low <= found.trend.high) == (pytest.approx(trend), True)
        assert "Trend over 6 runs: +0.1 ms per run" in text


def test_medians_of_all_runs_are_of_one_kind_of_iterations(series):
    """One night without manifests: nothing of it is set against iterations that no profiler slowed down."""
    found = series(*scaled(1, 1), WrittenRun(host_us=300, seed=7))
    assert found.evidence == "profiled"
    assert found.runs[0].step_us.value < 1000
    assert {run.against_first.step.evidence for run in found.runs[1:]} == {"profiled"}
    assert "has no iterations without profiling" in found.limitations[0]
    assert json.loads(found.to_json())["runs"][2]["against_previous"]["step"]["verdict"] == "slower"


def test_a_run_without_iterations_leaves_the_others_comparable(series):
    found = series(*scaled(1, 1.1), WrittenRun(iterations=1, marked=False))
    assert (found.evidence, found.runs[2].step_us, found.runs[2].against_first.step) == ("unprofiled", None, None)
    assert found.runs[1].against_previous.step.verdict == "slower"
    view = series_view(found)
    assert view.verdict.headline.startswith("It is unknown whether run 3 is slower or faster than run 1: the iteration times")
    assert view.verdict.sentences[-1].startswith("It is unknown whether run 3 differs")
    (table,) = view.sections[0].tables
    assert [row[2].text for row in table.rows] == ["5.00 ± 0.02", "5.50 ± 0.02", "–"]


def test_medians_are_of_the_ranks_that_all_runs_with_iterations_captured(series):
    found = series(*(WrittenRun(ranks=ranks, unprofiled_ms=QUIET) for ranks in (2, 1)), WrittenRun(iterations=1, marked=False))
    assert (found.runs[0].step_us, found.runs[0].parts) == (found.runs[1].step_us, found.runs[1].parts)


def test_two_runs_are_no_series(series):
    with pytest.raises(ProfilingConfigError, match="a series of 2 runs"):
        series(*scaled(1, 1))


def test_a_slope_between_two_groups_is_the_difference_of_their_means():
    values = [3.0, 4.0, 6.0]
    found = slope_of(values)
    assert found.value == pytest.approx(1.5)
    # Least squares by numpy: the same slope, and residuals of 1/6, -1/3, 1/6 with one degree of freedom.
    assert found.high - found.value == pytest.approx(12.706 * (1 / 6 / 2) ** 0.5, rel=1e-3)
    assert change_of_mean(values, values).speedup == 1
