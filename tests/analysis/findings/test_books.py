"""The books: bounds of findings add up, and what a waiting rank loses to nobody's harm gives nothing back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_profiling.analysis.findings.books import Books


def _grid(*rows: list[float]) -> np.ndarray:
    return np.array(rows, float)


def test_what_all_ranks_lose_side_by_side_is_counted_once() -> None:
    assert Books(_grid([0, 0, 0])).claim(_grid([10, 10, 10])) == 10


def test_what_one_rank_loses_while_the_others_wait_for_it_is_counted() -> None:
    assert Books(_grid([30, 0, 30])).claim(_grid([0, 30, 0])) == 30


def test_a_cause_on_a_rank_that_another_waits_for_anyway_gives_nothing_back() -> None:
    # Rank 1 neither waits nor has the cause: it holds the iteration up as before.
    assert Books(_grid([30, 0])).claim(_grid([10, 0])) == 0


def test_two_late_ranks_give_back_what_both_of_them_do() -> None:
    books = Books(_grid([50, 0, 0]))
    assert books.claim(_grid([0, 40, 0])) == 0
    assert books.claim(_grid([0, 0, 50])) == 40


def test_ranks_that_lose_in_turns_are_counted_in_full_where_the_capture_tells() -> None:
    waiting, lost = _grid([20, 20]), _grid([20, 20])
    assert Books(waiting).claim(lost) == 20
    assert Books(waiting).claim(lost, cost_us=np.array([40.0])) == 40


def test_what_is_not_worth_a_finding_is_left_to_later_ones() -> None:
    books = Books(_grid([0.0]))
    assert books.claim(_grid([2.0]), at_least_us=5) == 0
    assert books.claimed_us[0, 0] == 0
    assert books.claim(_grid([6.0]), at_least_us=5) == 6


def test_a_rank_that_has_not_captured_an_iteration_says_nothing_about_it() -> None:
    nan = float("nan")
    books = Books(_grid([0, 0], [nan, 0]))
    assert books.claim(_grid([10, 10], [nan, 30])) == pytest.approx(20)
    assert np.isnan(books.claimed_us[1, 0])


def test_a_run_without_iterations_gives_nothing_back() -> None:
    assert Books(np.zeros((0, 0))).claim(np.zeros((0, 0))) == 0


_TIMES = st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=2, max_size=2)


@given(_TIMES, st.lists(st.tuples(_TIMES, st.booleans()), min_size=1, max_size=5))
def test_bounds_add_up_to_no_more_than_any_rank_waits_and_loses(waiting: list, claims: list) -> None:
    books = Books(np.array(waiting))
    bounds = [books.claim(np.array(lost), waited=waited) for lost, waited in claims]
    assert all(bound >= 0 for bound in bounds)
    most = np.array(waiting) + sum(np.array(lost) for lost, _ in claims)
    assert sum(bounds) <= most.min(axis=1).mean() * (1 + 1e-9) + 1e-6
