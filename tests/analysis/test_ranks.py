"""Who waits for whom, who is slow, and whether it stays the same rank."""

import random

import pytest

from bridge_profiling.analysis.ranks.ranks import verdict
from tests.analysis.ranks_in_hand import values
from tests.analysis.simulated_runs import MS, SimulatedRun

SLOW = 3 * MS


def _training(slow, *, count=10, ranks=4, **how):
    """Ranks compute 20 ms an iteration within 0.5%, some more than that, in tensor pairs and across all."""
    run, chance = SimulatedRun(ranks, **how), random.Random(3)

    def step(number):
        for rank in range(ranks):
            run.compute(rank, chance.randrange(19_950_000, 20_050_000) + slow(number).get(rank, 0))
        for pair in range(0, ranks, 2):
            run.meet([pair, pair + 1])
        run.meet(range(ranks), "reduce_scatter", group="DP")

    return run.iterate(count, step)


def _codes(run, question):
    return {caveat.code for caveat in run.caveats(question)}


def test_the_matrix_names_the_rank_that_came_last(tmp_path):
    run = SimulatedRun(3, offsets_ns={0: -900 * MS, 2: 44 * MS})

    def step(_):
        for rank, work in enumerate((1 * MS, 5 * MS, 2 * MS)):
            run.compute(rank, work)
        run.meet(range(3))

    assert run.iterate(2, step, first=100).captured(tmp_path).waits().to_pylist() == [
        {"iteration": number, "rank": rank, "waits_for": 1, "wait_us": wait, "operations": 1}
        for number in (100, 101)
        for rank, wait in ((0, 4000.0), (2, 3000.0))
    ]


@pytest.mark.parametrize(
    ("slow", "how", "word", "rows"),
    [
        # Rank, its verdict, confidence, times slow; the slowest first.
        # Always one.
        (lambda _: {2: SLOW}, {}, "stable", [(2, "stable", "high", 10)]),
        # A host, whose ranks take turns in being the slowest.
        (lambda _: {4: SLOW, 5: SLOW}, {"ranks": 8}, "stable", [(4, "stable", "high", 10), (5, "stable", "high", 10)]),
        # Each in turn.
        (lambda number: {number % 4: SLOW}, {"count": 12}, "rotating", [(rank, "sometimes", "low", 3) for rank in range(4)]),
        # Once.
        (lambda number: {1: SLOW} if number == 12 else {}, {}, "occasional", [(1, "sometimes", "low", 1)]),
        # Noise.
        (lambda _: {}, {}, "none", []),
        # In two iterations.
        (lambda _: {1: SLOW}, {"count": 2}, "stable", [(1, "stable", "low", 2)]),
    ],
)
def test_a_slow_rank_is_stable_if_it_is_slow_in_most_iterations(tmp_path, slow, how, word, rows):
    asked = _training(slow, **how).captured(tmp_path)
    found = asked.stragglers()
    judged = values(found, "rank", "verdict", "confidence", "times_slow")
    assert (verdict(found), sorted(row for row in judged if row[1] != "no")) == (word, rows)
    assert {row[2:] for row in judged if row[1] == "no"} <= {(None, 0)}
    count = how.get("count", 10)
    assert set(found["iterations"].to_pylist()) == {count}
    for times in ("times_slowest", "times_fastest"):
        assert sum(found[times].to_pylist()) == count
    assert ("few_iterations_of_ranks" in _codes(asked, "stragglers")) == (count < 3)
    if len(rows) == 1 and word == "stable":
        assert found["rank"][0].as_py() == rows[0][0]
        assert found["excess_own_us"][0].as_py() == pytest.approx(3000, abs=100)
        assert found["excess_compute_us"][0].as_py() == pytest.approx(3000, abs=100)


def test_a_slow_rank_is_found_through_one_that_waits_for_it(tmp_path):
    """Rank 3 is late in the last collective, because it waited for rank 2 before."""
    run = SimulatedRun(4)

    def step(_):
        for rank in range(4):
            run.compute(rank, 20 * MS + (5 * MS if rank == 2 else 0))
        run.meet([0, 1])
        run.meet([2, 3])
        run.compute(3, 1 * MS)
        run.meet(range(4), group="DP")

    asked = run.iterate(6, step).captured(tmp_path)
    assert {waits_for for rank, waits_for in values(asked.waits(), "rank", "waits_for") if rank == 0} == {3}
    assert {rank for rank, place in values(asked.ranks(), "rank", "place") if place == "slowest"} == {2}


def test_one_rank_cannot_be_compared(tmp_path):
    asked = _training(lambda _: {}).captured(tmp_path, ranks=[2])
    assert verdict(asked.stragglers()) == "unknown"
    assert "ranks_not_comparable" in _codes(asked, "stragglers")


def test_ranks_whose_communication_cannot_be_matched_are_not_called_slow(tmp_path):
    run = _training(lambda _: {2: SLOW})
    run.change_operations(group_name=None, group_ranks=None, group=None)
    asked = run.captured(tmp_path)
    assert set(values(asked.ranks(), "own_us", "place")) == {(None, None)}
    assert min(asked.ranks()["compute_us"].to_pylist()) > 19_000
    assert verdict(asked.stragglers()) == "unknown"
    assert "waiting_of_rank_unknown" in _codes(asked, "ranks")


def test_a_capture_that_starts_late_is_not_a_late_rank(tmp_path):
    rows = _training(lambda _: {2: SLOW}, offsets_ns={1: 77 * MS}).captured(tmp_path, skip={3: 8}).start_skew().to_pylist()
    assert rows[3]["capture_start_us"] > 80_000
    assert rows[1]["capture_start_us"] < 1000
    assert rows[1]["clock_offset_us"] == pytest.approx(-77_000, abs=1)
    assert max(rows, key=lambda row: row["median_late_us"])["rank"] == 2


def test_waiting_during_compute_is_own_time(tmp_path):
    run = SimulatedRun(2)

    def step(_):
        begin = run.now_ns[0]
        run.compute(1, 10 * MS)
        run.meet([0, 1], "reduce_scatter", group="DP")
        run.ran(0, "compute", begin, begin + 6 * MS)

    found = values(run.iterate(3, step).captured(tmp_path).ranks(), "rank", "waiting_us", "compute_us")
    assert set(found) == {(0, 4000, 6000), (1, 0, 10_000)}


def test_captures_without_iterations_are_compared_as_wholes(tmp_path):
    asked = _training(lambda _: {0: SLOW}).captured(tmp_path, marked=False)
    assert values(asked.ranks(), "rank", "iteration", "place")[0] == (0, None, "slowest")
    assert "iterations_not_marked" in _codes(asked, "ranks")
