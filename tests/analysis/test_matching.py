"""Operations of different ranks are matched when they are one and the same, and only then."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge_profiling.analysis.ranks.matching import RankClocks, Sequence, fitting, match
from tests.analysis.simulated_runs import MS, US, SimulatedRun


def _training(run: SimulatedRun, iterations: int = 3, seed: int = 0, **how: Any) -> SimulatedRun:
    """Tensor parallelism in pairs, data parallelism over everybody; no two iterations last equally long."""
    chance = random.Random(seed)
    everybody = list(range(run.ranks))
    pairs = [everybody[place : place + 2] for place in range(0, run.ranks, 2)]

    def step(_: int) -> None:
        for layer in range(4):
            for rank in everybody:
                run.compute(rank, chance.randrange(2 * MS, 6 * MS))
            for pair in pairs:
                run.meet(pair, size=1 << (18 + layer % 2))
        run.meet(everybody, "reduce_scatter", 1 << 28, "DP")
        run.meet(everybody, "all_gather", 1 << 27, "DP")

    run.iterate(iterations, step, **how)
    return run


def _matches(connection: Any, truths: dict[int, list[int]]) -> tuple[list[set[int]], list[int]]:
    """What each match's rows really are, and how many rows it has."""
    match(connection)
    really: dict[int, set[int]] = {}
    rows: dict[int, int] = {}
    for number, rank, collective in connection.execute("select match, rank, collective from matched").fetchall():
        really.setdefault(number, set()).add(truths[rank][collective])
        rows[number] = rows.get(number, 0) + 1
    return list(really.values()), list(rows.values())


def test_operations_of_an_iteration_match_by_their_place_in_it(tmp_path: Path) -> None:
    run = _training(SimulatedRun(4))
    connection = run.connected(tmp_path)
    really, rows = _matches(connection, {rank: run.truth(rank) for rank in range(4)})
    assert all(len(each) == 1 for each in really)
    assert sorted(rows) == [2] * (3 * 4 * 2) + [4] * (3 * 2)


def test_a_rank_that_is_not_captured_leaves_the_others_matched_and_is_mentioned(tmp_path: Path) -> None:
    run = _training(SimulatedRun(4))
    connection = run.connected(tmp_path, ranks=[0, 1, 3])
    codes = [caveat.code for caveat in match(connection)]
    really, rows = _matches(connection, {rank: run.truth(rank) for rank in range(4)})
    assert all(len(each) == 1 for each in really)
    assert sorted(rows) == [2] * (3 * 4) + [3] * (3 * 2)
    assert codes == ["groups_partly_captured"]


def test_captures_that_begin_in_the_middle_of_an_iteration_match_where_they_overlap(tmp_path: Path) -> None:
    run = _training(SimulatedRun(4, offsets_ns={1: 40 * MS, 2: -7 * MS}))
    skip = {1: 3, 3: 8}
    connection = run.connected(tmp_path, skip=skip)
    really, rows = _matches(connection, {rank: run.truth(rank, skip.get(rank, 0)) for rank in range(4)})
    assert all(len(each) == 1 for each in really)
    assert sorted(rows) == [2] * (9 + 6) + [3] * 2 + [4] * 4


def test_without_marked_iterations_a_capture_that_begins_a_whole_iteration_later_is_not_shifted(tmp_path: Path) -> None:
    """The same operations recur in each iteration: only the moments at which they end tell which is which."""
    run = _training(SimulatedRun(2, offsets_ns={1: 3_000 * MS}), iterations=5)
    connection = run.connected(tmp_path, skip={1: 6}, marked=False, clock="unknown")
    codes = [caveat.code for caveat in match(connection)]
    really, rows = _matches(connection, {0: run.truth(0), 1: run.truth(1, 6)})
    assert all(len(each) == 1 for each in really)
    assert len(rows) == 4 * 6
    assert "captures_aligned" in codes


def test_iterations_of_nearly_one_length_are_told_apart_by_the_ends_of_their_operations(tmp_path: Path) -> None:
    """Steps that differ by 0.1 ms, ends that scatter by 5 us, clocks 40 s apart, nothing marked."""
    run, chance = SimulatedRun(2, offsets_ns={1: 40_000 * MS}), random.Random(4)

    def step(_: int) -> None:
        for _ in range(6):
            for rank in range(2):
                run.compute(rank, chance.randrange(4_000 * US, 4_020 * US))
            run.meet([0, 1])

    run.iterate(6, step)
    for rank in range(2):
        for row in run.operations[rank]:
            row["end_ns"] += chance.randrange(-5 * US, 5 * US)
    connection = run.connected(tmp_path, skip={1: 12}, marked=False)
    really, rows = _matches(connection, {0: run.truth(0), 1: run.truth(1, 12)})
    assert all(len(each) == 1 for each in really)
    assert len(rows) == 24


def test_a_handful_of_operations_that_fit_anywhere_is_left_unmatched(tmp_path: Path) -> None:
    """Clocks of which nothing is known, two operations an iteration that look like those of the next one."""
    run, chance = SimulatedRun(2, offsets_ns={1: 9_000 * MS}), random.Random(6)

    def step(_: int) -> None:
        run.compute(0, chance.randrange(90 * MS, 99 * MS))
        run.meet([0, 1], "reduce_scatter")
        run.meet([0, 1], "all_gather")

    run.iterate(2, step)
    connection = run.connected(tmp_path, skip={1: 2}, marked=False)
    codes = [caveat.code for caveat in match(connection)]
    assert connection.execute("select count(*) from matched").fetchall() == [(0,)]
    assert "operations_unmatched" in codes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    skips=st.tuples(*[st.integers(0, 11)] * 4),
    clocks=st.tuples(*[st.integers(-(10**10), 10**10)] * 4),
    seed=st.integers(0, 1000),
    marked=st.booleans(),
)
def test_whatever_the_clocks_and_wherever_captures_begin_all_that_overlaps_is_matched(
    tmp_path_factory: pytest.TempPathFactory, skips: tuple[int, ...], clocks: tuple[int, ...], seed: int, marked: bool
) -> None:
    run = _training(SimulatedRun(4, offsets_ns=dict(enumerate(clocks))), iterations=4, seed=seed)
    skip = dict(enumerate(skips))
    connection = run.connected(tmp_path_factory.mktemp("run"), skip=skip, marked=marked)
    truths = {rank: run.truth(rank, skip[rank]) for rank in range(4)}
    really, rows = _matches(connection, truths)
    assert all(len(each) == 1 for each in really)
    held: dict[int, int] = {}
    for truth in truths.values():
        for each in truth:
            held[each] = held.get(each, 0) + 1
    assert sum(rows) == sum(count for count in held.values() if count > 1)


def test_operations_of_different_kinds_in_the_same_place_are_not_matched(tmp_path: Path) -> None:
    run = SimulatedRun(2)

    def step(_: int) -> None:
        run.meet([0, 1], "all_reduce")
        run.meet([0, 1], "all_gather")

    run.iterate(3, step)
    for row in run.operations[1]:
        row["operation"] = "broadcast"
    connection = run.connected(tmp_path)
    codes = [caveat.code for caveat in match(connection)]
    assert connection.execute("select count(*) from matched").fetchall() == [(0,)]
    assert "operations_unmatched" in codes


def test_an_uneven_all_to_all_matches_though_its_messages_differ(tmp_path: Path) -> None:
    run = SimulatedRun(4)
    run.iterate(2, lambda _: run.meet(range(4), "all_to_all", group="EP"))
    for rank in range(4):
        for row in run.operations[rank]:
            row["message_bytes"] += rank
    connection = run.connected(tmp_path)
    assert sorted(_matches(connection, {rank: run.truth(rank) for rank in range(4)})[1]) == [4, 4]


def test_sends_match_the_receipts_of_their_peer_in_a_group_of_many(tmp_path: Path) -> None:
    run = SimulatedRun(4)
    stages = list(range(4))

    def step(_: int) -> None:
        for source, target in ((0, 1), (1, 2), (0, 1), (2, 3), (1, 2), (3, 2), (2, 1)):
            run.compute(source, 1 * MS)
            run.send(source, target, stages)

    run.iterate(3, step)
    connection = run.connected(tmp_path)
    really, rows = _matches(connection, {rank: run.truth(rank) for rank in stages})
    assert all(len(each) == 1 for each in really)
    assert rows == [2] * (7 * 3)


def test_a_kernel_that_sends_and_receives_matches_its_partners(tmp_path: Path) -> None:
    run = SimulatedRun(2)

    def step(_: int) -> None:
        run.send(0, 1, [0, 1])
        for _ in range(3):
            run.compute(0, 2 * MS)
            run.exchange(0, 1, [0, 1])
        run.send(1, 0, [0, 1])

    run.iterate(2, step)
    connection = run.connected(tmp_path)
    really, rows = _matches(connection, {rank: run.truth(rank) for rank in range(2)})
    assert all(len(each) == 1 for each in really)
    assert len(rows) == 2 * (2 + 2 * 3)


def test_operations_that_name_no_group_are_counted_as_not_compared(tmp_path: Path) -> None:
    run = SimulatedRun(2)
    run.iterate(2, lambda _: run.meet([0, 1]))
    for rank in range(2):
        for row in run.operations[rank]:
            row |= {"group_name": None, "group_ranks": None, "group": None}
    connection = run.connected(tmp_path)
    codes = [caveat.code for caveat in match(connection)]
    assert codes == ["operations_without_group"]


def test_a_run_without_communication_has_nothing_to_match(tmp_path: Path) -> None:
    run = SimulatedRun(2)
    run.iterate(2, lambda _: run.compute(0, 5 * MS))
    connection = run.connected(tmp_path)
    codes = [caveat.code for caveat in match(connection)]
    assert connection.execute("select count(*) from matched").fetchall() == [(0,)]
    assert codes == []


def test_captures_fit_where_their_operations_do() -> None:
    def sequence(*signature: int) -> Sequence:
        count = len(signature)
        return Sequence(0, np.array(signature), np.full(count, -1), np.arange(count) * 1000 * US)

    assert [fit.offset for fit in fitting(sequence(1, 2, 3, 4), sequence(3, 4))] == [2]
    assert [fit.offset for fit in fitting(sequence(3, 4), sequence(1, 2, 3, 4))] == [-2]
    assert fitting(sequence(1, 2), sequence(5, 6)) == []
    assert fitting(sequence(1, 2), sequence()) == []


def test_clocks_learnt_from_pairs_relate_ranks_that_form_none() -> None:
    clocks = RankClocks()
    clocks.learn(1, 2, 300)
    clocks.learn(5, 4, -7)
    clocks.learn(4, 2, 1000)
    assert clocks.apart_ns(5, 1) == -7 + 1000 - 300
    assert clocks.apart_ns(1, 5) == -clocks.apart_ns(5, 1)
    assert clocks.apart_ns(1, 9) is None
