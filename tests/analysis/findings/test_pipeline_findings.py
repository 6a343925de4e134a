"""Pipeline stages that wait: for a longer stage, for want of microbatches; and what moving layers cannot improve."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bridge_profiling.analysis.findings import Confidence, Finding
from bridge_profiling.analysis.findings.ranks import pipeline_bubble
from tests.analysis.findings.conftest import RunOf
from tests.analysis.findings.simulated_jobs import found_by
from tests.analysis.simulated_runs import MS, US, SimulatedRun, one_forward_one_backward

Find = Callable[..., list[Finding]]


@pytest.fixture
def find(tmp_path: Path, run_of: RunOf) -> Find:
    """Findings of a pipeline of one rank a stage, each of whose passes is one kernel for each of its layers."""

    def found(layers: Sequence[int], microbatches: int, output_ns: int = 0, iterations: int = 4) -> list[Finding]:
        run = SimulatedRun(len(layers), transfer_ns=20 * US, communication_stream=7)
        stages = list(range(len(layers)))
        run.kernels = {rank: [2 * MS] * count for rank, count in enumerate(layers)}
        run.kernels[stages[-1]] += [output_ns] if output_ns else []
        forward = [sum(run.kernels[rank]) for rank in stages]

        def step(_: int) -> None:
            one_forward_one_backward(run, stages, microbatches, forward, [2 * each for each in forward])
            run.meet(stages, group="DP")

        run.iterate(iterations, step)
        run.write(tmp_path)
        return found_by(run_of(), pipeline_bubble)

    return found


@pytest.mark.parametrize(
    ("layers", "microbatches", "output_ns"),
    [
        ([4, 4], 8, 0),
        ([4, 4], 3, 0),  # the bubble that the schedule has at best wastes less than a quarter
        ([4, 4], 8, 1 * MS),  # the output layer is shorter than a layer
    ],
)
def test_stages_as_even_as_can_be_have_no_finding(find: Find, layers: list[int], microbatches: int, output_ns: int) -> None:
    assert find(layers, microbatches, output_ns) == []


def test_few_microbatches_are_found_with_what_the_schedule_loses(find: Find) -> None:
    (finding,) = find([2, 2, 2, 2], 4)
    assert finding.ranks == [0, 1, 2, 3]
    assert finding.evidence["ideal_bubble_fraction"] == pytest.approx(3 / 7)
    assert finding.evidence["longest_stage"] is None
    assert "4 microbatches" in finding.title
    assert "virtual_pipeline_model_parallel_size" in finding.action
    assert finding.recoverable_us_per_iteration == pytest.approx(3 * (2 + 4) * 2_000, rel=0.1)


@pytest.mark.parametrize(("iterations", "confidence"), [(4, Confidence.high), (2, Confidence.medium)])
def test_a_stage_with_more_layers_is_named_with_its_excess(find: Find, iterations: int, confidence: Confidence) -> None:
    (finding,) = find([2, 6], 8, iterations=iterations)
    assert (finding.ranks, finding.evidence["longest_stage"], finding.confidence) == ([1], 1, confidence)
    assert "num_layers_in_last_pipeline_stage" in finding.action
    # Six layers for four in the mean: two of 2 + 4 ms for each of eight microbatches, and one more for filling the pipeline.
    assert finding.evidence["uneven_stages_us"] == pytest.approx(2 * 6_000 * 9, rel=0.02)
    assert finding.recoverable_us_per_iteration == pytest.approx(2 * 6_000 * 9, rel=0.05)


@pytest.mark.parametrize(
    ("layers", "output_ns", "rank", "setting"),
    [
        ([6, 2], 0, 0, "num_layers_in_first_pipeline_stage"),
        ([2, 6, 2], 0, 1, "stage 1"),
        ([4, 4], 6 * MS, 1, "account_for_loss_in_pipeline_split"),
    ],
)
def test_each_longer_stage_has_its_own_setting(find: Find, layers: list[int], output_ns: int, rank: int, setting: str) -> None:
    (finding,) = find(layers, 12, output_ns)
    assert finding.ranks == [rank]
    assert setting in finding.action
