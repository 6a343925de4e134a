"""Pipeline stages that wait: for a longer stage, for want of microbatches; and what moving layers cannot improve."""

import pytest

from bridge_profiling.findings import Confidence
from bridge_profiling.findings.ranks import pipeline_bubble
from tests.facts.simulated_runs import MS, US, SimulatedRun, one_forward_one_backward
from tests.findings.simulated_jobs import found_by


@pytest.fixture
def find(tmp_path_factory, run_of):
    """Findings of a pipeline of one rank a stage, each of whose passes is one kernel for each of its layers."""

    def found(layers, microbatches, output_ns=0, iterations=4):
        run = SimulatedRun(len(layers), transfer_ns=20 * US, communication_stream=7)
        stages = list(range(len(layers)))
        run.kernels = {rank: [2 * MS] * count for rank, count in enumerate(layers)}
        run.kernels[stages[-1]] += [output_ns] if output_ns else []
        forward = [sum(run.kernels[rank]) for rank in stages]

        def step(_):
            one_forward_one_backward(run, stages, microbatches, forward, [2 * each for each in forward])
            run.meet(stages, group="DP")

        folder = tmp_path_factory.mktemp("pipeline")
        run.iterate(iterations, step).write(folder)
        return found_by(run_of(folder), pipeline_bubble)

    return found


@pytest.mark.parametrize(
    ("microbatches", "output_ns"),
    [
        (8, 0),
        (3, 0),  # the bubble that the schedule has at best wastes less than a quarter
        (8, 1 * MS),  # the output layer is shorter than a layer
    ],
)
def test_stages_as_even_as_can_be_have_no_finding(find, microbatches, output_ns):
    assert find([4, 4], microbatches, output_ns) == []


def test_few_microbatches_are_found_with_what_the_schedule_loses(find):
    (finding,) = find([2, 2, 2, 2], 4)
    evidence = finding.evidence
    assert (evidence["ideal_bubble_fraction"], evidence["longest_stage"]) == (pytest.approx(3 / 7), None)
    assert finding.recoverable_ns_per_iteration == pytest.approx(3 * (2 + 4) * 2 * MS, rel=0.1)


@pytest.mark.parametrize(
    ("layers", "output_ns", "rank", "setting"),
    [
        ([2, 6], 0, 1, "num_layers_in_last_pipeline_stage"),
        ([2, 6, 2], 0, 1, "stage 1"),
        ([4, 4], 6 * MS, 1, "account_for_loss_in_pipeline_split"),
    ],
)
def test_each_longer_stage_is_named_with_its_excess_and_its_own_setting(find, layers, output_ns, rank, setting):
    (finding,) = find(layers, 8, output_ns)
    assert (finding.ranks, finding.evidence["longest_stage"], finding.confidence) == ([rank], rank, Confidence.high)
    assert setting in finding.action
    if len(layers) == 2 and not output_ns:
        # Six layers for four in the mean: two of 2 + 4 ms for each of eight microbatches, and one to fill the pipeline.
        assert finding.evidence["uneven_stages_ns"] == pytest.approx(2 * 6 * 9 * MS, rel=0.02)
        assert finding.recoverable_ns_per_iteration == pytest.approx(2 * 6 * 9 * MS, rel=0.05)
        assert find(layers, 8, iterations=2)[0].confidence is Confidence.medium
