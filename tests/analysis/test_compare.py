"""What changed between two runs: planted changes are found with their size, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.compare import Comparison, changed, compare
from bridge_profiling.analysis.compare.events import EventSide, comparable, without_arguments
from bridge_profiling.errors import ProfilingConfigError
from tests.analysis.compared_runs import WrittenRun
from tests.traces.conftest import captures

__all__ = ["captures"]

GEMM, SOFTMAX = [300.0, 300.0], [50.0]


@pytest.fixture
def compared(tmp_path: Path):
    """Compares two runs, or several of each side."""

    def run(base: WrittenRun | list[WrittenRun], other: WrittenRun | list[WrittenRun]) -> Comparison:
        sides = []
        for name, side in (("base", base), ("other", other)):
            written = side if isinstance(side, list) else [side]
            sides.append([Run(each.write(tmp_path / f"{name}{place}"), workers=1) for place, each in enumerate(written)])
        return compare(*sides)

    return run


def _words(comparison: Comparison, table: str = "kernels") -> dict[str, str]:
    return {row["name"]: row["change"] for row in changed(getattr(comparison, table))}


def _added_up(parts: dict) -> float:
    return sum(part.change for part in parts.values())


def test_a_slower_kernel_is_the_change_and_nothing_else_is(compared) -> None:
    found = compared(WrittenRun(), WrittenRun(kernels={"gemm": [330.0, 330.0], "softmax": SOFTMAX}, seed=2))
    assert found.step.verdict == "slower"
    assert found.step.us.change == pytest.approx(60, abs=3)
    assert found.step.us.low > 50
    assert found.step.us.high < 70
    assert found.explains_most[0] == "compute_us"
    assert found.by_cause["compute_us"].change == pytest.approx(60, abs=3)
    assert found.by_cause["compute_us"].significant
    assert _words(found) == {"gemm": "slower"}
    (row,) = changed(found.kernels)
    assert (row["base_count"], row["other_count"]) == (2, 2)
    assert row["change_us"] == pytest.approx(60, abs=3)
    assert not found.differences
    assert not changed(found.copies)


def test_kernels_that_came_went_and_run_more_often_are_told_apart(compared) -> None:
    other = WrittenRun(kernels={"gemm": GEMM, "fused": [40.0], "scale": [5.0] * 6})
    found = compared(WrittenRun(kernels={"gemm": GEMM, "softmax": SOFTMAX, "scale": [5.0] * 2}), other)
    assert _words(found) == {"softmax": "went", "fused": "came", "scale": "more"}


def test_the_parts_add_up_to_the_change_of_the_median_to_rounding(compared) -> None:
    """Also with an iteration out of line, which the mean feels and the median does not."""
    found = compared(WrittenRun(iterations=5), WrittenRun(iterations=5, host_us=180, slow={3: 5000.0}, seed=3))
    for parts in (found.by_cause, found.by_activity):
        assert _added_up(parts) == pytest.approx(found.profiled.change, abs=1e-6)
    assert found.step.us.change == found.profiled.change
    assert found.step.us.change == pytest.approx(80, abs=4)
    assert found.by_cause["outlying_iterations_us"].change == pytest.approx(-1000, rel=0.05)
    assert found.explains_most[0] == "host_launch_us"


def test_a_run_compared_with_itself_finds_nothing(tmp_path: Path) -> None:
    run = Run(WrittenRun(unprofiled_ms=[5.0, 6.0, 7.0]).write(tmp_path / "run"), workers=1)
    found = compare(run, run)
    assert found.empty
    assert found.same_work
    assert found.step.verdict == "unchanged"
    assert not found.regressed(0.0)
    assert json.loads(found.to_json())["kernels"] == []


def test_two_runs_that_differ_by_noise_alone_are_unchanged(compared) -> None:
    found = compared(WrittenRun(noise_us=30), WrittenRun(noise_us=30, seed=2))
    assert found.step.verdict == "unchanged"
    assert found.step.us.low < 0 < found.step.us.high
    assert not _words(found)


def test_two_iterations_give_numbers_and_no_verdict(compared) -> None:
    found = compared(WrittenRun(iterations=2), WrittenRun(iterations=2, kernels={"gemm": [600.0, 600.0], "softmax": SOFTMAX}))
    assert found.step.verdict == "unknown"
    assert "2 steady iterations" in found.step.reason
    assert found.step.us.low is None
    assert found.step.us.change == pytest.approx(600, abs=5)
    assert _words(found) == {"gemm": "slower"}
    assert not found.regressed(0.05)


def test_unprofiled_iterations_are_the_better_evidence(compared) -> None:
    """The profiler slows one side down by half; outside its window nothing changed."""
    quiet = [10.0, 10.1, 9.9, 10.0, 10.2]
    found = compared(WrittenRun(unprofiled_ms=quiet), WrittenRun(host_us=600, unprofiled_ms=quiet[::-1]))
    assert (found.step.evidence, found.step.samples) == ("unprofiled", (5, 5))
    assert found.step.verdict == "unchanged"
    assert found.profiled.change == pytest.approx(500, abs=5)
    only_one = compared(WrittenRun(unprofiled_ms=quiet), WrittenRun(unprofiled_ms=[10.0, 10.0]))
    assert only_one.step.evidence == "profiled"


def test_several_runs_a_side_are_samples_of_one_each(compared) -> None:
    base = [WrittenRun(unprofiled_ms=[center, center + 0.01, center + 0.02], seed=2) for center in (10.0, 10.4, 9.6)]
    noisy = [WrittenRun(unprofiled_ms=[center, center + 0.01, center + 0.02], seed=3) for center in (10.3, 10.7, 9.9)]
    slower = [WrittenRun(unprofiled_ms=[center, center + 0.01, center + 0.02], seed=4) for center in (14.0, 14.4, 13.6)]
    found = compared(base, noisy)
    assert (found.step.method, found.step.samples, found.step.verdict) == ("welch", (3, 3), "unchanged")
    assert compared(base, slower).step.verdict == "slower"
    # One of each against the other would have been sure.
    assert compared(base[0], noisy[0]).step.verdict == "slower"


def test_one_run_against_several_is_refused(compared) -> None:
    with pytest.raises(ProfilingConfigError, match="2 base runs against 1"):
        compared([WrittenRun(), WrittenRun()], WrittenRun())


def test_what_is_not_the_same_work_is_said_first(compared) -> None:
    base = WrittenRun(ranks=2, unprofiled_ms=[5.0, 5.0], manifest={"work": {"tokens": 4096}})
    other = WrittenRun(
        ranks=4,
        shapes="[[128, 64], [64, 64]]",
        unprofiled_ms=[5.0, 5.0],
        manifest={
            "versions": {"torch": "2.12.0"},
            "host": "node2",
            "work": {"tokens": 8192},
            "config": {"record_shapes": False},
        },
    )
    found = compared(base, other)
    topics = [each.topic for each in found.differences]
    assert not found.same_work
    assert topics[:4] == ["ranks of the job", "layout", "tokens of an iteration", "shapes of matrix products"]
    assert {"torch", "hosts", "record_shapes", "ranks captured"} <= set(topics)
    assert [each.concerns for each in found.differences] == sorted(
        (each.concerns for each in found.differences), key=["work", "conditions", "measurement"].index
    )
    by_topic = {each.topic: (each.base, each.other) for each in found.differences}
    assert by_topic["layout"] == ("cp=1 dp=2 ep=1 pp=1 tp=1", "cp=1 dp=4 ep=1 pp=1 tp=1")
    assert by_topic["tokens of an iteration"] == ("4,096", "8,192")
    # Of the ranks only those that both have are compared.
    assert found.ranks["rank"].to_pylist() in ([0, 1], [1, 0])


def test_the_iterations_at_the_profilers_edges_are_left_out(compared, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge_profiling.analysis.compare import steps as compare_steps

    def with_edges(*tables):
        rows = original(*tables)
        return [row | {"boundary": row["iteration"] in (10, 15)} for row in rows]

    original = compare_steps.parts_of_iterations
    monkeypatch.setattr(compare_steps, "parts_of_iterations", with_edges)
    found = compared(WrittenRun(slow={0: 900.0}), WrittenRun(slow={5: 900.0}, seed=2))
    assert found.step.samples == (4, 4)
    assert abs(found.by_cause["host_launch_us"].change) < 5


def test_captures_without_iterations_are_compared_as_wholes(tmp_path: Path) -> None:
    sides = []
    for name, times in (("base", GEMM), ("other", [450.0, 450.0])):
        path = WrittenRun(iterations=1, kernels={"gemm": times}, ranks=1).write(tmp_path / name)
        (trace,) = path.rglob("*.json")
        document = json.loads(trace.read_text())
        document["traceEvents"] = [each for each in document["traceEvents"] if "ProfilerStep" not in each["name"]]
        trace.write_text(json.dumps(document))
        sides.append(Run(path, workers=1))
    found = compare(*sides)
    assert (found.step, found.profiled, found.by_cause) == (None, None, {})
    assert _words(found) == {"gemm": "slower"}
    assert any("no marked iterations" in each for each in found.limitations)


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
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        ),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
    ],
)
def test_a_kernel_is_the_same_however_its_profiler_spells_it(kineto: str, nsys: str) -> None:
    assert without_arguments(("compute", kineto)) == without_arguments(("compute", nsys))
    assert without_arguments(("compute", kineto))[1]


def test_communication_is_compared_by_operation_where_one_side_knows_no_groups() -> None:
    def side(count: float, kernel_us: float) -> EventSide:
        return EventSide(count, 10.0, extra={"kernel_us": kernel_us, "wait_us": 5.0, "bytes": 100.0})

    known = {("all_reduce", "TP", 2): side(4, 40), ("all_reduce", "DP", 2): side(1, 10)}
    base, other = comparable(known, {("all_reduce", "", 0): side(5, 55)})
    ((key, merged),) = base.items()
    assert key in other
    assert (merged.count, merged.us, merged.extra["bytes"], merged.extra["wait_us"]) == (5, 50, 200, 0)
    assert comparable(known, known) == (known, known)


@pytest.mark.system
def test_overlap_splits_the_same_gradients_into_more_messages(captures: Path, tmp_path: Path) -> None:
    """Real captures, of two iterations each: too few to say how sure, enough to say what changed."""
    base, other = (Run(captures / "kineto" / name, parquet=tmp_path / name) for name in ("tp2_dp2", "tp2_dp2_overlap"))
    found = compare(base, other)
    assert found.step.verdict == "unknown"
    assert found.step.us.change == pytest.approx(18_745, rel=0.01)
    assert _added_up(found.by_cause) == pytest.approx(found.step.us.change, abs=1e-3)
    assert found.same_work
    moved = {row["operation"]: row for row in changed(found.communication)}
    assert {name: (row["base_count"], row["other_count"]) for name, row in moved.items()} == {
        "reduce_scatter": (1, 6),
        "all_gather": (1, 6),
    }
    assert moved["reduce_scatter"]["change_bytes"] == 0
    assert found.explains_most[0] == "waiting_us"
    itself = compare(base, base)
    assert itself.empty
    base.close()
    other.close()
