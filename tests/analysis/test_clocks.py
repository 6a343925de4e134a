"""Offsets between ranks' clocks come from the operations they end together."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.ranks_in_hand import values
from tests.analysis.simulated_runs import MS, US, SimulatedRun


def _chain(clocks, ranks):
    """Groups of neighbours only: the first and the last rank share none."""
    run, chance = SimulatedRun(ranks, offsets_ns=clocks), random.Random(1)

    def step(_):
        for rank in range(ranks):
            run.compute(rank, chance.randrange(1 * MS, 5 * MS))
        for rank in range(ranks - 1):
            run.meet([rank, rank + 1], group="CP")

    return run.iterate(8, step)


@settings(max_examples=8)
@given(st.lists(st.integers(-(10**12), 10**12), min_size=2, max_size=7))
def test_offsets_are_found_to_the_nanosecond_along_a_chain_of_groups(tmp_path_factory, clocks):
    run = _chain(dict(enumerate(clocks)), len(clocks)).captured(tmp_path_factory.mktemp("run"))
    found = run.clock_offsets()
    assert found["offset_ns"].to_pylist() == pytest.approx([clocks[0] - clock for clock in clocks], abs=1)
    assert set(found["component"].to_pylist()) == {0}
    assert max(found["max_residual_ns"].to_pylist()) <= 1


def test_one_operation_that_ends_far_apart_moves_no_clock_and_shows_in_the_residual(tmp_path):
    run = _chain({1: 5 * MS, 2: -300}, 3)
    run.operations[1][4]["end_ns"] += 800 * US
    found = values(run.captured(tmp_path).clock_offsets(), "offset_ns", "residual_ns", "max_residual_ns")
    assert found[:2] == [(0, 0, 400 * US), (-5 * MS, 0, 400 * US)]
    assert found[2][0] == 300


@pytest.mark.parametrize(("clock", "consequence"), [("unix", "by the hosts' clocks"), ("unknown", "different sets cannot")])
def test_ranks_that_share_no_operation_keep_their_clocks(tmp_path, clock, consequence):
    run = SimulatedRun(5, offsets_ns={1: 1 * MS, 3: 2 * MS, 4: 3 * MS})
    run.iterate(3, lambda _: [run.meet([0, 1]), run.meet([2, 3]), run.compute(4, 1 * MS)])
    asked = run.captured(tmp_path, clock=clock)
    found = values(asked.clock_offsets(), "component", "reference", "offset_ns", "operations", "residual_ns")
    related = [(0, 0, 0, 3, 0), (0, 0, -1 * MS, 3, 0), (1, 2, 0, 3, 0), (1, 2, -2 * MS, 3, 0)]
    assert found == [*related, (2, 4, 0, 0, None)]
    (caveat,) = asked.caveats("clock_offsets")
    assert caveat.code == "clocks_unrelated"
    assert consequence in caveat.text


def test_sends_relate_clocks_that_no_collective_does(tmp_path):
    run = SimulatedRun(2, offsets_ns={1: 70 * MS})
    run.iterate(4, lambda _: [run.compute(0, 2 * MS), run.exchange(0, 1)])
    assert run.captured(tmp_path).clock_offsets()["offset_ns"].to_pylist() == [0, -70 * MS]


def test_ranks_of_one_host_whose_collectives_end_apart_are_doubted(tmp_path):
    (caveat,) = _chain({1: 3 * MS}, 2).captured(tmp_path, host="node-7").caveats("clock_offsets")
    assert caveat.code == "one_host_apart"
    assert "3000 us" in caveat.text
