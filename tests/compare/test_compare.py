"""What changed between two runs or along many: injected changes are found with their size, and intervals hold the truth."""

import json
from contextlib import ExitStack
from statistics import fmean, stdev

import numpy as np
import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.compare import changed, compare, compare_series
from bridge_profiling.compare.events import EventSide, comparable, without_arguments
from bridge_profiling.facts.statistics import change_of_mean, change_of_median, welch_p
from bridge_profiling.report.comparison_view import series_view
from bridge_profiling.run import Run
from tests.compare.compared_runs import WrittenRun, quiet


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Opens what is written, once for all tests."""
    opened = {}
    with ExitStack() as every:

        def run(written):
            if repr(written) not in opened:
                opened[repr(written)] = every.enter_context(Run(written.write(tmp_path_factory.mktemp("run"))))
            return opened[repr(written)]

        yield run


@pytest.fixture
def compared(written):
    """Compares two runs, or several of each side."""
    return lambda *sides: compare(*([written(run) for run in (side if isinstance(side, list) else [side])] for side in sides))


def test_kernels_that_came_went_and_run_more_often_are_distinguished(compared):
    base = WrittenRun(kernels={"gemm": [300.0] * 2, "softmax": [50.0], "scale": [5.0] * 2})
    found = compared(base, WrittenRun(kernels={"gemm": [300.0] * 2, "fused": [40.0], "scale": [5.0] * 6}))
    changes = {row["name"]: row["change"] for row in changed(found.kernels)}
    assert changes == {"softmax": "went", "fused": "came", "scale": "more"}


def test_the_parts_add_up_to_the_change_of_the_median_to_rounding(compared):
    """Also with an iteration out of line, which the mean feels and the median does not."""
    found = compared(WrittenRun(iterations=5), WrittenRun(iterations=5, host_us=180, slow={3: 5000.0}, seed=3))
    for parts in (found.by_cause, found.by_activity):
        assert sum(part.change for part in parts.values()) == pytest.approx(found.profiled.change, abs=1e-3)
    assert found.step.ns.change == found.profiled.change == pytest.approx(80_000, abs=4_000)
    assert found.by_cause["outlying_iterations_ns"].change == pytest.approx(-1_000_000, rel=0.05)
    assert found.explains_most[0] == "host_launch_ns"
    assert not changed(found.kernels) + changed(found.copies)


def test_several_runs_a_side_are_samples_of_one_each(compared):
    base, noisy, slower = (
        [WrittenRun(iterations=3, unprofiled_ms=[each, each + 0.01, each + 0.02]) for each in centers]
        for centers in ((10.0, 10.4, 9.6), (10.3, 10.7, 9.9), (14.0, 14.4, 13.6))
    )
    # Two iterations without profiling are too few on one side.
    assert compared(base[0], WrittenRun(unprofiled_ms=[10.0, 10.0])).step.evidence == "profiled"
    found = compared(base, noisy).step
    assert (found.method, found.samples, found.verdict) == ("welch", (3, 3), "unchanged")
    assert compared(base, slower).step.verdict == "slower"
    # One of each against the other would have been certain.
    assert compared(base[0], noisy[0]).step.verdict == "slower"
    with pytest.raises(ProfilingConfigError, match="2 base runs against 1"):
        compared(base[:2], base[0])


def test_what_is_not_the_same_work_is_said_first(compared):
    base = WrittenRun(ranks=2, iterations=3, unprofiled_ms=[5.0, 5.0], manifest={"work": {"tokens": 4096}})
    changes = {"versions": {"torch": "2.12.0"}, "host": "node2", "work": {"tokens": 8192}, "config": {"record_shapes": False}}
    other = WrittenRun(ranks=3, iterations=3, shapes="[[128, 64], [64, 64]]", unprofiled_ms=[5.0, 5.0], manifest=changes)
    found = compared(base, other)
    assert not found.same_work
    concerns = {"work": ["ranks of the job", "layout", "tokens of an iteration", "shapes of matrix products"]}
    concerns |= {"conditions": ["torch", "hosts"], "measurement": ["ranks captured", "record_shapes"]}
    expected = [(concern, topic) for concern, topics in concerns.items() for topic in topics]
    assert [(each.concerns, each.topic) for each in found.differences] == expected
    assert found.differences[1].other == "cp=1 dp=3 ep=1 pp=1 tp=1"
    # Of the ranks only those that both have are compared.
    assert sorted(found.ranks["rank"].to_pylist()) == [0, 1]


# The same kernels, as Kineto and as nsys demangle them.
@pytest.mark.parametrize(
    ("kineto", "nsys"),
    [
        (
            "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4>(int)",
            "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char *, (int)3>",
        ),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
            "void at::native::<unnamed>::vectorized_layer_norm_kernel<float, float, (bool)0>(int, T2)",
        ),
        ("ncclDevKernel_AllReduce(ncclArgs<4096ul>)", "ncclDevKernel_AllReduce(ncclArgs<(unsigned long)4096>)"),
    ],
)
def test_a_kernel_is_the_same_however_its_profiler_spells_it(kineto, nsys):
    assert without_arguments(("compute", kineto)) == without_arguments(("compute", nsys))
    assert without_arguments(("compute", kineto))[1]


def test_communication_is_compared_by_operation_where_one_side_knows_no_groups():
    def side(count, kernel_ns):
        return EventSide({"count": count, "ns": 10.0, "kernel_ns": kernel_ns, "wait_ns": 5.0, "bytes": 100.0})

    known = {("all_reduce", "TP", 2): side(4, 40), ("all_reduce", "DP", 2): side(1, 10)}
    base, other = comparable(known, {("all_reduce", "", 0): side(5, 55)})
    ((key, merged),) = base.items()
    assert merged.amounts == {"count": 5, "ns": 50, "kernel_ns": 50, "wait_ns": 0, "bytes": 200}
    assert key in other
    assert comparable(known, known) == (known, known)


def test_an_interval_of_medians_holds_the_truth_as_often_as_it_says():
    """Of iterations with a slow one now and then; the true change is 7."""
    chance = np.random.default_rng(11)

    def draw(count, center):
        return (center + chance.normal(0, 3, count) + (chance.random(count) < 0.1) * 200).tolist()

    trials = [change_of_median(draw(12, 100), draw(7, 107)) for _ in range(150)]
    assert sum(each.low <= 7 <= each.high for each in trials) >= 0.92 * len(trials)


def test_welch_is_that_of_its_worked_example():
    """Ten of mean 19.4 and twenty of mean 21.6: t = -2.22, 24.5 degrees of freedom, p = 0.036.

    https://en.wikipedia.org/wiki/Welch%27s_t-test, the third example.
    """
    first = np.array([198, 204, 196, 178, 185, 189, 183, 189, 195, 220]) / 10
    second = np.array([282, 266, 201, 233, 252, 221, 177, 276, 206, 137, 232, 175, 206, 180, 239, 216, 243, 204, 240, 132]) / 10
    assert welch_p(first, second) == pytest.approx(0.0360, abs=2e-4)
    change = change_of_mean(first, second)
    assert (change.significant, change.low < 2.2 < change.high) == (True, True)


@pytest.fixture
def series(written):
    return lambda *runs: compare_series([written(run) for run in runs])


@pytest.mark.parametrize(
    ("factors", "verdicts", "trend"),
    [
        ((1, 1, 1, 1, 1), ["unchanged"] * 4, "contains zero"),
        ((1, 1.02, 1.04, 1.06, 1.08, 1.1), ["slower"] * 5, 100_000),
        # A jump is no slope, though a line through it rises.
        ((1, 1, 1, 1.1, 1.1, 1.1), ["unchanged", "unchanged", "slower", "unchanged", "unchanged"], "one jump fits"),
        ((1, 0.8, 0.7, 0.6), ["faster"] * 3, "a trend needs 5 runs"),
    ],
)
def test_runs_that_changed_and_a_slope_only_where_there_is_one(series, factors, verdicts, trend):
    found = series(*(quiet(factor, seed=place) for place, factor in enumerate(factors)))
    assert [run.against_previous.step.verdict for run in found.runs[1:]] == verdicts
    assert found.runs[-1].against_first.step.ns.speedup == pytest.approx(1 / factors[-1])
    text = " ".join(series_view(found).verdict.sentences)
    if isinstance(trend, str):
        assert (found.trend, trend in found.no_trend, "Trend" in text) == (None, True, False)
    else:
        assert (found.trend.value, 0 < found.trend.low <= found.trend.high) == (pytest.approx(trend), True)
        assert "Trend over 6 runs: +0.1 ms per run" in text
    medians = [run.step_ns.value / 1e3 for run in found.runs]
    expected = {"n": len(medians), "mean": fmean(medians), "std": stdev(medians), "min": min(medians), "max": max(medians)}
    assert found.document()["over_runs_us"] == pytest.approx(expected)
    assert f"Over {len(medians)} runs, the median iteration has a mean of" in text
    assert all(run.spread_ns.min < run.step_ns.value < run.spread_ns.max for run in found.runs)


def test_medians_of_all_runs_are_of_one_kind_of_iterations(series):
    """One night without manifests: nothing of it is set against iterations that no profiler slowed down."""
    found = series(quiet(), quiet(seed=2), WrittenRun(host_us=300, seed=7))
    assert (found.evidence, found.runs[0].step_ns.value < 1_000_000) == ("profiled", True)
    assert {run.against_first.step.evidence for run in found.runs[1:]} == {"profiled"}
    assert "has no iterations without profiling" in found.limitations[0]
    assert json.loads(found.to_json())["runs"][2]["against_previous"]["step"]["verdict"] == "slower"


def test_a_run_without_iterations_leaves_the_others_comparable(series):
    found = series(quiet(), quiet(1.1, seed=2), WrittenRun(iterations=1, marked=False))
    assert (found.evidence, found.runs[2].step_ns, found.runs[2].against_first.step) == ("unprofiled", None, None)
    assert found.runs[1].against_previous.step.verdict == "slower"
    view = series_view(found)
    assert view.verdict.headline.startswith("It is unknown whether run 3 is slower or faster than run 1: the iteration times")
    assert [row[2].text for row in view.sections[0].tables[0].rows] == ["5.00 ± 0.02", "5.50 ± 0.02", "–"]
