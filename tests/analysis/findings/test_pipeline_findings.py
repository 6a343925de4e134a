"""Pipeline stages that wait: for a longer stage, for want of microbatches; and what moving layers cannot mend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Confidence, Finding
from bridge_profiling.analysis.findings.ranks import pipeline_bubble
from tests.analysis.findings.simulated_jobs import Here, found_by
from tests.analysis.simulated_runs import MS, US, SimulatedRun, one_forward_one_backward

Found = Callable[..., list[Finding]]


@pytest.fixture
def found(tmp_path: Path, run_of: Callable[..., Run]) -> Found:
    """Findings of a pipeline of one rank a stage, each of whose passes is one kernel for each of its layers."""

    def find_in(
        layers: Sequence[int], microbatches: int, *, output_ns: int = 0, iterations: int = 4, layer_ns: int = 2 * MS
    ) -> list[Finding]:
        run = SimulatedRun(len(layers), transfer_ns=20 * US, communication_stream=7)
        stages = list(range(len(layers)))
        run.kernels = {
            rank: [layer_ns] * count + ([output_ns] if rank == stages[-1] and output_ns else [])
            for rank, count in enumerate(layers)
        }

        def step(_: int) -> None:
            forward = [sum(run.kernels[rank]) for rank in stages]
            one_forward_one_backward(run, stages, microbatches, forward, [2 * each for each in forward])
            run.meet(stages, group="DP")

        run.iterate(iterations, step)
        run.write(tmp_path)
        return found_by(run_of(tmp_path, engine=Here()), pipeline_bubble)

    return find_in


def test_even_stages_with_enough_microbatches_have_no_finding(found: Found) -> None:
    assert found([4, 4], 8) == []


def test_the_bubble_that_a_schedule_has_at_best_is_no_finding_until_it_wastes_a_quarter(found: Found) -> None:
    assert found([4, 4], 3) == []


def test_few_microbatches_are_told_with_what_the_schedule_loses(found: Found) -> None:
    (finding,) = found([2, 2, 2, 2], 4)
    assert finding.ranks == [0, 1, 2, 3]
    assert finding.evidence["ideal_bubble_fraction"] == pytest.approx(3 / 7)
    assert finding.evidence["longest_stage"] is None
    assert "4 microbatches" in finding.title
    assert "virtual_pipeline_model_parallel_size" in finding.action
    assert finding.recoverable_us_per_iteration == pytest.approx(3 * (2 + 4) * 2_000, rel=0.1)


def test_a_stage_with_more_layers_is_named_with_its_excess(found: Found) -> None:
    (finding,) = found([2, 6], 8)
    assert finding.ranks == [1]
    assert finding.evidence["longest_stage"] == 1
    # Six layers for four in the mean: two of 2 + 4 ms for each of eight microbatches, and one more for filling the pipeline.
    assert finding.evidence["uneven_stages_us"] == pytest.approx(2 * 6_000 * 9, rel=0.02)
    assert finding.recoverable_us_per_iteration == pytest.approx(2 * 6_000 * 9, rel=0.05)
    assert "num_layers_in_last_pipeline_stage" in finding.action
    assert finding.confidence is Confidence.high


def test_a_first_and_a_middle_stage_have_their_own_settings(found: Found) -> None:
    (first,) = found([6, 2], 8)
    assert "num_layers_in_first_pipeline_stage" in first.action


def test_a_middle_stage_is_named(found: Found) -> None:
    (finding,) = found([2, 6, 2], 12)
    assert finding.ranks == [1]
    assert "stage 1" in finding.action


def test_an_output_layer_shorter_than_a_layer_is_as_even_as_can_be(found: Found) -> None:
    assert found([4, 4], 8, output_ns=1 * MS) == []


def test_an_output_layer_of_several_layers_is_moved_for(found: Found) -> None:
    (finding,) = found([4, 4], 8, output_ns=6 * MS)
    assert finding.ranks == [1]
    assert "account_for_loss_in_pipeline_split" in finding.action


def test_two_iterations_leave_doubt(found: Found) -> None:
    (finding,) = found([2, 6], 8, iterations=2)
    assert finding.confidence is Confidence.medium


def test_without_a_pipeline_there_is_nothing_to_find(tmp_path: Path, run_of: Callable[..., Run]) -> None:
    run = SimulatedRun(2)
    run.iterate(3, lambda _: [run.compute(0, 5 * MS), run.compute(1, 9 * MS), run.meet([0, 1])])
    run.write(tmp_path)
    assert found_by(run_of(tmp_path, engine=Here()), pipeline_bubble) == []


def test_real_stages_that_differ_by_less_than_a_layer_are_as_even_as_can_be(captures: Path, run_of: Callable[..., Run]) -> None:
    assert found_by(run_of(captures / "kineto/pp2_dp2"), pipeline_bubble) == []
