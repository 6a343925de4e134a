"""Pipeline bubbles against the schedule's own."""

import pytest

from tests.analysis.ranks_in_hand import values
from tests.analysis.simulated_runs import MS, SimulatedRun, one_forward_one_backward


def _pipelines(stages, microbatches, *, last=1.0):
    """Two pipelines of data-parallel replicas; a transfer takes a thousandth of a forward pass."""
    run = SimulatedRun(2 * stages, transfer_ns=1_000, offsets_ns={stages - 1: 300 * MS})
    forward = [1 * MS] * (stages - 1) + [int(last * MS)]

    def step(_):
        for replica in range(2):
            members = [replica * stages + stage for stage in range(stages)]
            one_forward_one_backward(run, members, microbatches, forward, [2 * each for each in forward])
        for stage in range(stages):
            run.meet([stage, stages + stage], "reduce_scatter", group="DP")

    return run.iterate(3, step)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 2), (3, 12)])
def test_even_stages_have_the_schedules_bubble_and_no_more(tmp_path, stages, microbatches):
    found = _pipelines(stages, microbatches).captured(tmp_path).pipeline().to_pylist()
    ideal = (stages - 1) / (microbatches + stages - 1)
    assert [row["stage"] for row in found] == list(range(stages))
    for row in found:
        assert row["microbatches"] == microbatches
        assert row["ideal_bubble_fraction"] == pytest.approx(ideal)
        assert row["bubble_fraction"] == pytest.approx(ideal, abs=0.005)
        assert row["excess_compute_us"] == pytest.approx(0, abs=1)
        assert row["warm_up_us"] + row["steady_us"] + row["cool_down_us"] == pytest.approx(row["bubble_us"])
        assert row["other_idle_us"] < 0.01 * row["pipeline_us"]
        assert microbatches < stages or row["steady_us"] < 0.005 * row["pipeline_us"]
    assert found[-1]["warm_up_us"] == pytest.approx((stages - 1) * 1000, rel=0.01)


def test_a_stage_with_more_work_is_the_uneven_one_and_the_others_wait_in_the_steady_phase(tmp_path):
    asked = _pipelines(2, 8, last=1.5).captured(tmp_path)
    light, heavy = asked.pipeline().to_pylist()
    assert heavy["excess_compute_us"] == pytest.approx(6000, rel=0.01)
    assert light["bubble_fraction"] > light["ideal_bubble_fraction"] + 0.1
    assert light["steady_us"] > 6000
    assert heavy["steady_us"] < 100
    # The number of microbatches given is used in place of the one counted.
    assert set(asked.ask("pipeline_by_rank", microbatches=16)["microbatches"].to_pylist()) == {16}


def test_stages_that_are_not_captured_are_named(tmp_path):
    asked = _pipelines(3, 6).captured(tmp_path, ranks=[0, 3])
    assert values(asked.pipeline(), "stage", "stages", "ranks") == [(0, 3, [0, 3])]
    assert asked.pipeline()["bubble_us"][0].as_py() > 0
    (caveat,) = [each for each in asked.caveats("pipeline") if each.code == "stages_not_captured"]
    assert "stages 1, 2" in caveat.text
