"""What manifests record: the profiler's own cost, which is subtracted from the host's, and slow iterations."""

import json

import pytest

from bridge_profiling.findings import Confidence
from tests.findings.simulated_jobs import MS
from tests.traces.kineto_files import call, complete, kernel, write_capture


@pytest.fixture
def find(tmp_path, run_of):
    """Findings of a rank with iterations 5 to 8 of 30 ms captured: 10 ms loading, 10 ms until the launch, 10 ms kernel."""

    def found(durations_ms, pause_in_7_us=0, pauses_in=None, **changed):
        events = []
        for place, begin in enumerate((0, 30_000, 60_000 + pause_in_7_us, 90_000 + pause_in_7_us)):
            longer = pause_in_7_us if place == 2 else 0
            events += [
                complete("user_annotation", f"ProfilerStep#{place + 5}", begin - longer, 30_000 + longer),
                *([complete("user_annotation", pauses_in, begin - longer, longer)] if pauses_in else []),
                complete("user_annotation", "dataloader", begin, 10_000),
                *(complete("cpu_op", "aten::empty", begin + 10_000 + each, 900) for each in range(0, 9_000, 1_000)),
                complete("cpu_op", "aten::mm", begin + 19_990, 8),
                call("cudaLaunchKernel", begin + 19_992, 5, place + 1),
                kernel("gemm", begin + 20_000, 10_000, correlation=place + 1),
            ]
        durations = {"iteration": [*durations_ms], "duration_ns": [round(each * 1e6) for each in durations_ms.values()]}
        write_capture(tmp_path, events, range(5, 9), **{"durations_ns": durations} | changed)
        return {finding.id: finding for finding in run_of().findings}

    return found


def _durations(plain_ms, count=20):
    """Of `count` iterations; those profiled take 30 ms."""
    return {number: 30.0 if number in range(5, 9) else plain_ms for number in range(count)}


_EVERY_TENTH = _durations(24, 60) | dict.fromkeys((19, 29, 39, 49, 59), 104.0)


def test_the_profilers_cost_is_subtracted_from_the_hosts_and_is_a_finding_that_saves_nothing(find):
    found = find(_durations(24))
    assert found["host_launch_bound"].recoverable_ns_per_iteration == pytest.approx((10 - 6) * MS, rel=0.02)
    assert found["host_launch_bound"].confidence is Confidence.high
    assert found["data_loading"].recoverable_ns_per_iteration == pytest.approx(10 * MS, rel=0.02)
    profiler = found["profiler_overhead"]
    assert (profiler.evidence["profiler_ns"], profiler.recoverable_ns_per_iteration) == ({"0": pytest.approx(6 * MS)}, None)


def test_the_bound_has_what_unprofiled_iterations_take_longer_on_average(find):
    # A third of them takes 4 ms more than the captured ones do without the profiler, and the longest of these take 6 more.
    found = find(_durations(24, 33) | dict.fromkeys(range(10, 33, 3), 28.0))
    exceeds_ms = 8 / 26 * 4  # the first one, and those next to the window do not count
    assert found["data_loading"].at_most_ns_per_iteration == pytest.approx((10 + exceeds_ms) * MS, rel=0.01)
    clipped = find(_durations(24, 33) | dict.fromkeys(range(10, 33, 3), 34.0))
    assert clipped["data_loading"].at_most_ns_per_iteration == pytest.approx((10 + 8 / 26 * 6) * MS, rel=0.01)


@pytest.mark.parametrize(
    ("durations", "not_found"),
    [
        (_durations(20), "host_launch_bound"),  # late for the profiler alone
        (_durations(29), "profiler_overhead"),
        # Unprofiled iterations overlap the profiled ones: warming up, few, or more than one in ten.
        (_durations(0.2) | {1: 80, 2: 31}, "profiler_overhead"),
        ({number: 0.2 if number == 3 else 30.0 for number in range(1, 10)}, "profiler_overhead"),
        (_durations(24, 33) | dict.fromkeys((12, 20, 28), 31.0), "profiler_overhead"),
        (_durations(24, 30) | {0: 5_000}, "slow_iterations"),  # the first of a run always is
        (_durations(24, 30) | {10: 104}, "slow_iterations"),  # the profiler frees what it recorded
    ],
)
def test_what_the_profiler_or_the_start_explains_is_no_finding(find, durations, not_found):
    assert not_found not in find(durations)


@pytest.mark.parametrize(
    ("durations", "changed"),
    [(dict.fromkeys(range(5, 9), 30.0), {}), (_durations(24), {"durations_ns": None}), (_durations(24), {"window": None})],
)
def test_too_few_unprofiled_iterations_or_a_damaged_manifest_leave_doubt(find, durations, changed):
    found = find(durations, **changed)
    assert "profiler_overhead" not in found
    assert found["host_launch_bound"].confidence is Confidence.low


def test_slow_iterations_at_a_fixed_distance(find):
    found = find(_EVERY_TENTH)["slow_iterations"]
    assert (found.evidence["every"], found.evidence["iterations"]) == (10, [19, 29, 39, 49, 59])
    # 80 ms more each, over the 53 iterations that the profiler left alone.
    assert found.recoverable_ns_per_iteration == pytest.approx(5 * 80 * MS / 53, rel=0.02)


def test_slow_iterations_now_and_then(find):
    found = find(_durations(24, 60) | {17: 104, 41: 64})["slow_iterations"]
    assert (found.evidence["every"], found.confidence) == (None, Confidence.medium)
    assert ("manual_gc" in found.action, found.events[0].iteration) == (True, 17)
    assert find(_durations(24, 60) | {10: 104, 41: 64})["slow_iterations"].evidence["iterations"] == [10, 41]


def test_one_slow_iteration_is_named_and_promises_nothing(find):
    for slow, counted in (({12: 104}, "1 iteration is"), ({12: 104, 13: 60}, "2 iterations are up to")):
        found = find(_durations(24) | slow)["slow_iterations"]
        assert found.title == f"{counted} 80 ms longer than the usual 24 ms"
        assert (found.confidence, found.recoverable_ns_per_iteration) == (Confidence.low, None)


@pytest.mark.parametrize(
    ("before", "cause", "saving_ns", "iterations"),
    [
        (24, "slow_iterations", 60 * MS / 17, 17),  # one of the 4 captured iterations and 13 others
        (90, "host_pause", 60 * MS / 4, 4),  # unprofiled iterations can be as long
    ],
)
def test_a_pause_that_no_unprofiled_iteration_has_counts_as_rarely_as_it_occurs(find, before, cause, saving_ns, iterations):
    found = find(_durations(24) | {7: 90, 2: before}, pause_in_7_us=60_000)
    assert {"host_pause", "slow_iterations"} & found.keys() >= {cause}
    assert found[cause].recoverable_ns_per_iteration == pytest.approx(saving_ns, rel=0.01)
    assert (found[cause].occurrence.of, found[cause].confidence) == (iterations, Confidence.low)


def test_manifests_alone_show_slow_iterations_and_the_profilers_cost(find, tmp_path, run_of):
    find(_EVERY_TENTH, status="failed", reason="the disk was full")
    next(tmp_path.rglob("*.gz")).unlink()
    run = run_of()
    assert {finding.id for finding in run.findings} == {"slow_iterations", "profiler_overhead"}
    assert any(
        "no capture" in sentence and sentence.endswith("; rank 0: the disk was full") for sentence in run.facts.limitations
    )
    assert json.loads(run.to_json())["ranks"] == []
