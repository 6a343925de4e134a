"""What manifests tell: the profiler's own cost, which is taken off what the host is blamed for, and slow iterations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bridge_profiling.analysis.findings import Confidence, Finding
from bridge_profiling.run import Run
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import call, complete, kernel

MS = 1_000_000

OpenRun = Callable[..., Run]


@pytest.fixture
def find(tmp_path: Path, write_trace: WriteTrace, run_of: OpenRun) -> Callable[..., dict[str, Finding]]:
    """Findings of a rank with iterations 5 to 8 of 30 ms captured: 10 ms loading, 10 ms until the launch, 10 ms kernel."""

    def found(durations_ms: Mapping[int, float], captured: int = 4) -> dict[str, Finding]:
        (tmp_path / "torch/iter-5-9").mkdir(parents=True)
        trace = write_trace(_trace(captured), name="torch/iter-5-9/rank-0.pt.trace.json.gz", distributedInfo={"rank": 0})
        artifacts = [{"path": str(trace.relative_to(tmp_path)), "bytes": trace.stat().st_size}]
        manifest = {
            "schema_version": 1,
            "status": "complete",
            "reason": None,
            "rank": 0,
            "world_size": 1,
            "window": {"start": 5, "end": 9},
            "captured": {"first": 5, "last": 8, "iterations": [5, 6, 7, 8]},
            "profilers": [{"name": "torch", "status": "complete", "reason": None, "artifacts": artifacts}],
            "durations_ns": {
                "iteration": list(durations_ms),
                "duration_ns": [round(duration * MS) for duration in durations_ms.values()],
            },
        }
        (tmp_path / "manifest/iter-5-9").mkdir(parents=True)
        (tmp_path / "manifest/iter-5-9/rank-0.json").write_text(json.dumps(manifest))
        return {finding.id: finding for finding in run_of(tmp_path).findings()}

    return found


Find = Callable[..., dict[str, Finding]]


def _trace(captured: int) -> list[dict]:
    events = []
    for place in range(captured):
        begin = 30_000 * place
        events += [
            complete("user_annotation", f"ProfilerStep#{place + 5}", begin, 30_000),
            complete("user_annotation", "dataloader", begin, 10_000),
            complete("cpu_op", "aten::mm", begin + 19_990, 8),
            call("cudaLaunchKernel", begin + 19_992, 5, place + 1),
            kernel("gemm", begin + 20_000, 10_000, correlation=place + 1),
        ]
    return events


def _durations(profiled_ms: float, plain_ms: float, count: int = 20) -> dict[int, float]:
    return {number: profiled_ms if number in range(5, 9) else plain_ms for number in range(count)}


def test_what_the_profiler_cost_is_taken_off_what_the_host_is_blamed_for(find: Find) -> None:
    found = find(_durations(30, 24))
    assert found["host_launch_bound"].recoverable_us_per_iteration == pytest.approx(10_000 - 6_000, rel=0.02)
    assert found["host_launch_bound"].confidence is Confidence.high
    assert found["data_loading"].recoverable_us_per_iteration == pytest.approx(10_000, rel=0.02)
    assert found["data_loading"].evidence["share_of_iteration"] == pytest.approx(10 / 30, rel=0.02)


def test_a_host_that_is_late_for_the_profiler_alone_is_not_blamed(find: Find) -> None:
    assert "host_launch_bound" not in find(_durations(30, 20))


def test_the_profilers_cost_is_a_finding_of_its_own_and_gives_nothing_back(find: Find) -> None:
    found = find(_durations(30, 24))["profiler_overhead"]
    assert found.evidence["profiler_us"] == {"0": pytest.approx(6_000)}
    assert "25%" in found.title
    assert found.recoverable_us_per_iteration is None


def test_a_profiler_that_costs_little_is_none(find: Find) -> None:
    assert not {"profiler_overhead", "slow_iterations"} & set(find(_durations(30, 29)))


def test_too_few_unprofiled_iterations_tell_nothing_of_the_profilers_cost(find: Find) -> None:
    found = find(dict.fromkeys(range(5, 9), 30.0))
    assert "profiler_overhead" not in found
    assert found["host_launch_bound"].confidence is Confidence.low


def test_slow_iterations_at_a_fixed_distance(find: Find) -> None:
    durations = _durations(30, 24, count=60) | dict.fromkeys((19, 29, 39, 49, 59), 104.0)
    found = find(durations)["slow_iterations"]
    assert found.evidence["every"] == 10
    assert found.evidence["iterations"] == [19, 29, 39, 49, 59]
    # 80 ms more each, over the 53 iterations that the profiler left alone.
    assert found.recoverable_us_per_iteration == pytest.approx(5 * 80_000 / 53, rel=0.02)
    assert "save_interval" in found.action


def test_slow_iterations_now_and_then(find: Find) -> None:
    found = find(_durations(30, 24, count=60) | {17: 104.0, 41: 64.0})["slow_iterations"]
    assert found.evidence["every"] is None
    assert found.confidence is Confidence.medium
    assert "manual_gc" in found.action
    assert found.events[0].iteration == 17


def test_manifests_alone_tell_of_slow_iterations_and_of_the_profilers_cost(find: Find, tmp_path: Path, run_of: OpenRun) -> None:
    find(_durations(30, 24, count=60) | dict.fromkeys((19, 29, 39, 49, 59), 104.0))
    (tmp_path / "torch/iter-5-9/rank-0.pt.trace.json.gz").unlink()
    manifest = tmp_path / "manifest/iter-5-9/rank-0.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"status": "failed", "reason": "planted"}))
    run = run_of(tmp_path)
    assert {finding.id for finding in run.findings()} == {"slow_iterations", "profiler_overhead"}
    assert any("no capture" in sentence and sentence.endswith("; rank 0: planted") for sentence in run.limitations)
    assert json.loads(run.to_json())["ranks"] == []


def test_a_damaged_manifest_tells_nothing(find: Find, tmp_path: Path, run_of: OpenRun) -> None:
    find(_durations(30, 24))
    manifest = tmp_path / "manifest/iter-5-9/rank-0.json"
    whole = json.loads(manifest.read_text())
    for damaged in (whole | {"durations_ns": None}, {name: whole[name] for name in whole if name != "window"}):
        manifest.write_text(json.dumps(damaged))
        run = run_of(tmp_path)
        found = {finding.id: finding for finding in run.findings()}
        assert found["host_launch_bound"].confidence is Confidence.low
        assert "profiler_overhead" not in found


def test_the_first_iteration_of_a_run_is_slow_and_no_finding(find: Find) -> None:
    assert "slow_iterations" not in find(_durations(30, 24, count=30) | {0: 5_000.0})
