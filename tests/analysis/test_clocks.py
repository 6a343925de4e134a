"""Offsets between ranks' clocks come from the operations they end together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge_profiling.analysis import Run
from tests.analysis.simulated_runs import MS, US, SimulatedRun


def _chain(run: SimulatedRun, count: int = 8, seed: int = 1) -> SimulatedRun:
    """Groups of neighbours only: the first and the last rank share none."""
    chance = random.Random(seed)

    def step(_: int) -> None:
        for rank in range(run.ranks):
            run.compute(rank, chance.randrange(1 * MS, 5 * MS))
        for rank in range(run.ranks - 1):
            run.meet([rank, rank + 1], group="CP")

    run.iterate(count, step)
    return run


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-(10**12), 10**12), min_size=2, max_size=9))
def test_offsets_are_found_to_the_nanosecond_along_a_chain_of_groups(
    tmp_path_factory: pytest.TempPathFactory, clocks: list[int]
) -> None:
    run = _chain(SimulatedRun(len(clocks), offsets_ns=dict(enumerate(clocks))))
    asked = run.captured(tmp_path_factory.mktemp("run"))
    found = asked.clock_offsets().to_pylist()
    assert [row["offset_ns"] for row in found] == pytest.approx([clocks[0] - clock for clock in clocks], abs=1)
    assert {row["component"] for row in found} == {0}
    assert max(row["max_residual_ns"] for row in found) <= 1


def test_one_operation_that_ends_far_apart_moves_no_clock_and_shows_in_the_residual(tmp_path: Path) -> None:
    run = _chain(SimulatedRun(3, offsets_ns={1: 5 * MS, 2: -300}))
    run.operations[1][4]["end_ns"] += 800 * US
    asked = run.captured(tmp_path)
    found = asked.clock_offsets().to_pylist()
    assert [row["offset_ns"] for row in found] == [0, -5 * MS, 300]
    assert found[1]["max_residual_ns"] == 400 * US
    assert found[1]["residual_ns"] == 0


def test_ranks_that_share_no_operation_keep_their_clocks_and_it_is_said(tmp_path: Path) -> None:
    run = SimulatedRun(4, offsets_ns={1: 1 * MS, 3: 2 * MS})

    def step(_: int) -> None:
        run.meet([0, 1])
        run.meet([2, 3])

    run.iterate(3, step)
    asked = run.captured(tmp_path)
    found = asked.clock_offsets().to_pylist()
    assert [(row["component"], row["reference"], row["offset_ns"]) for row in found] == [
        (0, 0, 0),
        (0, 0, -1 * MS),
        (1, 2, 0),
        (1, 2, -2 * MS),
    ]
    assert [each.code for each in asked.caveats("clock_offsets")] == ["clocks_unrelated"]


def test_clocks_that_count_from_an_unknown_moment_cannot_be_related_without_operations(tmp_path: Path) -> None:
    run = SimulatedRun(2)
    run.iterate(2, lambda _: run.compute(0, 1 * MS))
    asked = run.captured(tmp_path, clock="unknown")
    found = asked.clock_offsets().to_pylist()
    assert [(row["operations"], row["residual_ns"]) for row in found] == [(0, None), (0, None)]
    assert [each.code for each in asked.caveats("clock_offsets")] == ["clocks_unrelated"]


def test_sends_relate_clocks_that_no_collective_does(tmp_path: Path) -> None:
    run = SimulatedRun(2, offsets_ns={1: 70 * MS})
    run.iterate(4, lambda _: (run.compute(0, 2 * MS), run.exchange(0, 1, [0, 1])))
    asked = run.captured(tmp_path)
    assert asked.clock_offsets()["offset_ns"].to_pylist() == [0, -70 * MS]


def test_ranks_of_one_host_whose_collectives_end_apart_are_doubted(tmp_path: Path) -> None:
    run = _chain(SimulatedRun(2, offsets_ns={1: 3 * MS}))
    asked = run.captured(tmp_path, host="node-7")
    (caveat,) = asked.caveats("clock_offsets")
    assert caveat.code == "one_host_apart"
    assert "3000 us" in caveat.text


@pytest.mark.parametrize("name", ["tp2_dp2", "tp2_dp2_overlap", "pp2_dp2", "plant_data", "plant_straggler"])
def test_the_gpus_of_one_real_host_agree_within_microseconds(captures: Path, name: str) -> None:
    with Run(captures / "kineto" / name) as run:
        found = run.clock_offsets().to_pylist()
    assert max(abs(row["offset_ns"]) for row in found) < 25 * US
    assert max(row["residual_ns"] for row in found) < 15 * US
