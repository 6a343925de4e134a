"""Who waits for whom, who is slow, and whether it stays the same rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.ranks.ranks import verdict
from tests.analysis.simulated_runs import MS, SimulatedRun

Slowness = Callable[[int], dict[int, int]]


def _training(slow: Slowness, *, count: int = 10, ranks: int = 4, seed: int = 3, **how: Any) -> SimulatedRun:
    """Ranks compute 20 ms an iteration within 0.5 %, some more as told, in tensor pairs and across all."""
    run, chance = SimulatedRun(ranks, **how), random.Random(seed)

    def step(number: int) -> None:
        more = slow(number)
        for rank in range(ranks):
            run.compute(rank, chance.randrange(19_950_000, 20_050_000) + more.get(rank, 0))
        for pair in range(0, ranks, 2):
            run.meet([pair, pair + 1])
        run.meet(range(ranks), "reduce_scatter", group="DP")

    run.iterate(count, step)
    return run


def _judged(run: SimulatedRun, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    found = run.captured(folder).stragglers()
    return verdict(found), found.to_pylist()


def _codes(run: Run, question: str) -> set[str]:
    return {caveat.code for caveat in run.caveats(question)}


def test_the_matrix_names_the_rank_that_came_last(tmp_path: Path) -> None:
    run = SimulatedRun(3, offsets_ns={0: -900 * MS, 2: 44 * MS})

    def step(_: int) -> None:
        for rank, work in enumerate((1 * MS, 5 * MS, 2 * MS)):
            run.compute(rank, work)
        run.meet(range(3))

    run.iterate(2, step, first=100)
    asked = run.captured(tmp_path)
    assert asked.waits().to_pylist() == [
        {"iteration": number, "rank": rank, "waits_for": 1, "wait_us": wait, "operations": 1}
        for number in (100, 101)
        for rank, wait in ((0, 4000.0), (2, 3000.0))
    ]


def test_a_rank_that_is_always_slow_is_stable_and_certain(tmp_path: Path) -> None:
    word, rows = _judged(_training(lambda _: {2: 3 * MS}), tmp_path)
    assert word == "stable"
    assert rows[0] | {"chance": None} == rows[0] | {
        "rank": 2,
        "verdict": "stable",
        "confidence": "high",
        "times_slow": 10,
        "times_slowest": 10,
        "iterations": 10,
        "chance": None,
    }
    assert rows[0]["excess_own_us"] == pytest.approx(3000, abs=100)
    assert rows[0]["excess_compute_us"] == pytest.approx(3000, abs=100)
    assert {row["verdict"] for row in rows[1:]} == {"no"}


def test_a_slow_rank_is_found_through_one_that_waits_for_it(tmp_path: Path) -> None:
    """Rank 3 is late in the last collective, because it waited for rank 2 before."""
    run = SimulatedRun(4)

    def step(_: int) -> None:
        for rank in range(4):
            run.compute(rank, 20 * MS + (5 * MS if rank == 2 else 0))
        run.meet([0, 1])
        run.meet([2, 3])
        run.compute(3, 1 * MS)
        run.meet(range(4), group="DP")

    run.iterate(6, step)
    asked = run.captured(tmp_path)
    assert {row["waits_for"] for row in asked.waits().to_pylist() if row["rank"] == 0} == {3}
    slowest = {row["rank"] for row in asked.ranks().to_pylist() if row["place"] == "slowest"}
    assert slowest == {2}


def test_slowness_that_goes_round_is_rotating(tmp_path: Path) -> None:
    word, rows = _judged(_training(lambda number: {number % 4: 3 * MS}, count=12), tmp_path)
    assert word == "rotating"
    assert {row["verdict"] for row in rows} == {"sometimes"}
    assert {row["times_slowest"] for row in rows} == {3}


def test_ranks_that_differ_by_noise_are_not_stragglers(tmp_path: Path) -> None:
    word, rows = _judged(_training(lambda _: {}), tmp_path)
    assert word == "none"
    assert sum(row["times_slowest"] for row in rows) == 10


def test_a_host_of_slow_ranks_is_stable_though_they_take_turns_in_being_slowest(tmp_path: Path) -> None:
    word, rows = _judged(_training(lambda _: {4: 3 * MS, 5: 3 * MS}, ranks=8), tmp_path)
    assert word == "stable"
    assert {row["rank"] for row in rows if row["verdict"] == "stable"} == {4, 5}


def test_with_two_iterations_nothing_is_certain(tmp_path: Path) -> None:
    asked = _training(lambda _: {1: 3 * MS}, count=2).captured(tmp_path)
    found = asked.stragglers()
    word, rows = verdict(found), found.to_pylist()
    assert (word, rows[0]["rank"], rows[0]["confidence"]) == ("stable", 1, "low")
    assert "few_iterations_of_ranks" in _codes(asked, "stragglers")


def test_boundary_iterations_do_not_count_where_three_others_are_captured(tmp_path: Path) -> None:
    run = _training(lambda number: {0: 30 * MS} if number == 10 else {1: 3 * MS}, count=5)
    for rank in range(4):
        run.iterations[rank][0]["boundary"] = True
    _, rows = _judged(run, tmp_path)
    assert [(row["rank"], row["times_slow"], row["iterations"]) for row in rows[:1]] == [(1, 4, 4)]


def test_one_rank_cannot_be_compared(tmp_path: Path) -> None:
    run = _training(lambda _: {})
    asked = run.captured(tmp_path, ranks=[2])
    found = asked.stragglers()
    assert verdict(found) == "unknown"
    assert "ranks_not_comparable" in _codes(asked, "stragglers")


def test_ranks_whose_communication_cannot_be_matched_are_not_called_slow(tmp_path: Path) -> None:
    run = _training(lambda _: {2: 3 * MS})
    for rank in range(4):
        for row in run.operations[rank]:
            row |= {"group_name": None, "group_ranks": None, "group": None}
    asked = run.captured(tmp_path)
    rows = asked.ranks().to_pylist()
    assert {(row["own_us"], row["place"]) for row in rows} == {(None, None)}
    assert {row["compute_us"] > 19_000 for row in rows} == {True}
    assert verdict(asked.stragglers()) == "unknown"
    assert "waiting_of_rank_unknown" in _codes(asked, "ranks")


def test_a_capture_that_starts_late_is_not_a_late_rank(tmp_path: Path) -> None:
    run = _training(lambda _: {2: 3 * MS}, offsets_ns={1: 77 * MS})
    asked = run.captured(tmp_path, skip={3: 8})
    rows = asked.start_skew().to_pylist()
    assert rows[3]["capture_start_us"] > 80_000
    assert rows[1]["capture_start_us"] < 1000
    assert rows[1]["clock_offset_us"] == pytest.approx(-77_000, abs=1)
    assert max(rows, key=lambda row: row["median_late_us"])["rank"] == 2


def test_waiting_beside_compute_is_own_time(tmp_path: Path) -> None:
    run = SimulatedRun(2)

    def step(_: int) -> None:
        begin = run.now_ns[0]
        run.compute(1, 10 * MS)
        run.meet([0, 1], "reduce_scatter", group="DP")
        run._device(0, "compute", begin, begin + 6 * MS, None)

    run.iterate(3, step)
    asked = run.captured(tmp_path)
    waiting = {row["waiting_us"] for row in asked.ranks().to_pylist() if row["rank"] == 0}
    assert waiting == {4000}


def test_captures_without_iterations_are_compared_as_wholes(tmp_path: Path) -> None:
    run = _training(lambda _: {0: 3 * MS})
    asked = run.captured(tmp_path, marked=False)
    rows = asked.ranks().to_pylist()
    assert [(row["iteration"], row["place"]) for row in rows if row["rank"] == 0] == [(None, "slowest")]
    assert "iterations_not_marked" in _codes(asked, "ranks")


@pytest.mark.parametrize(("name", "expected"), [("tp2_dp2", {1, 3}), ("plant_straggler", {2})])
def test_the_ranks_that_real_runs_wait_for(captures: Path, name: str, expected: set[int]) -> None:
    with Run(captures / "kineto" / name) as run:
        rows = run.stragglers().to_pylist()
        cells = run.waits().to_pylist()
    assert {row["rank"] for row in rows if row["verdict"] == "stable"} == expected
    assert {row["confidence"] for row in rows if row["verdict"] == "stable"} == {"low"}
    waited_for: dict[int, float] = {}
    for cell in cells:
        waited_for[cell["waits_for"]] = waited_for.get(cell["waits_for"], 0) + cell["wait_us"]
    most = sorted(waited_for, key=lambda rank: -waited_for[rank])[: len(expected)]
    assert set(most) == expected


def test_the_planted_straggler_computes_more_in_every_iteration_and_nobody_else_does(captures: Path) -> None:
    """40 extra matrix products per micro-batch, 52 ms of them in two iterations."""
    with Run(captures / "kineto" / "plant_straggler") as run:
        rows = {row["rank"]: row for row in run.stragglers().to_pylist()}
    assert rows[2]["excess_compute_us"] == pytest.approx(26_000, abs=1_500)
    assert max(abs(rows[rank]["excess_compute_us"]) for rank in (0, 1, 3)) < 1_500
