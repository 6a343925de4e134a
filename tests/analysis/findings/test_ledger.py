"""Savings add up, and time that a waiting rank loses saves nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_profiling.analysis.findings import Ledger


def _grid(*rows: list[float]) -> np.ndarray:
    return np.array(rows, float)


def _saving(waiting: np.ndarray, lost: np.ndarray, **how: object) -> float:
    return Ledger.empty(waiting).attribute(lost, **how)[0]


def test_time_that_all_ranks_lose_at_once_counts_once() -> None:
    assert _saving(_grid([0, 0, 0]), _grid([10, 10, 10])) == 10


def test_time_that_one_rank_loses_while_the_others_wait_counts() -> None:
    assert _saving(_grid([30, 0, 30]), _grid([0, 30, 0])) == 30


def test_a_cause_on_a_rank_that_waits_for_another_saves_nothing() -> None:
    # Rank 1 neither waits nor has the cause: the iteration takes as long as before.
    assert _saving(_grid([30, 0]), _grid([10, 0])) == 0


def test_two_late_ranks_save_what_both_of_them_lose() -> None:
    first, ledger = Ledger.empty(_grid([50, 0, 0])).attribute(_grid([0, 40, 0]))
    assert first == 0
    assert ledger.attribute(_grid([0, 0, 50]))[0] == 40


def test_ranks_that_take_turns_count_in_full_where_the_capture_shows_it() -> None:
    waiting, lost = _grid([20, 20]), _grid([20, 20])
    assert _saving(waiting, lost) == 20
    assert _saving(waiting, lost, cost_us=np.array([40.0])) == 40


def test_time_below_the_threshold_is_left_for_later_findings() -> None:
    empty = Ledger.empty(_grid([0.0]))
    saving, ledger = empty.attribute(_grid([2.0]), at_least_us=5)
    assert saving == 0
    assert ledger is empty
    saving, ledger = ledger.attribute(_grid([6.0]), at_least_us=5)
    assert (saving, ledger.attributed_us[0, 0]) == (6, 6)


def test_a_rank_without_a_capture_of_an_iteration_does_not_limit_it() -> None:
    nan = float("nan")
    saving, ledger = Ledger.empty(_grid([0, 0], [nan, 0])).attribute(_grid([10, 10], [nan, 30]))
    assert saving == pytest.approx(20)
    assert ledger.attributed_us[1, 0] == 0


def test_a_run_without_iterations_saves_nothing() -> None:
    assert _saving(np.zeros((0, 0)), np.zeros((0, 0))) == 0


_TIMES = st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=2, max_size=2)


@given(_TIMES, st.lists(st.tuples(_TIMES, st.booleans()), min_size=1, max_size=5))
def test_savings_add_up_to_no_more_than_any_rank_waits_and_loses(waiting: list, losses: list) -> None:
    ledger, savings = Ledger.empty(np.array(waiting)), []
    for lost, waited in losses:
        saving, ledger = ledger.attribute(np.array(lost), waited=waited)
        savings.append(saving)
    assert all(saving >= 0 for saving in savings)
    most = np.array(waiting) + sum(np.array(lost) for lost, _ in losses)
    assert sum(savings) <= most.min(axis=1).mean() * (1 + 1e-9) + 1e-6
