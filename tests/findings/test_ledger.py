"""Savings add up, and time that a waiting rank loses saves nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_profiling.findings import Ledger

NAN = float("nan")


@pytest.mark.parametrize(
    ("waiting", "lost", "cost", "saving"),
    [
        ([[0, 0, 0]], [[10, 10, 10]], None, 10),  # at once
        ([[30, 0, 30]], [[0, 30, 0]], None, 30),  # one, while the others wait
        ([[30, 0]], [[10, 0]], None, 0),  # rank 1 neither waits nor has the cause: the iteration takes as long as before
        ([[20, 20]], [[20, 20]], None, 20),
        ([[20, 20]], [[20, 20]], [40], 40),  # in turns, where the capture shows it
        ([[0, 0], [NAN, 0]], [[10, 10], [NAN, 30]], None, 20),  # a rank without a capture of an iteration does not limit it
        ([[0, 0], [0, 30]], [[20, 0], [0, 0]], None, 10),  # the other rank is in its next iteration when it waits
        ([[0, 30], [0, 0]], [[0, 0], [20, 0]], None, 10),  # or in its previous one
        ([[0, 30], [0, 0], [0, 30]], [[0, 0], [80, 0], [0, 0]], None, 20),
        ([[0, 0], [0, 30]], [[20, 0], [30, 0]], None, 15),  # which it waits for one of them only
        ([[0, 30], [0, 0], [0, 0]], [[0, 0], [0, 0], [45, 0]], None, 10),  # or after the last one, as in the first one
        (np.zeros((0, 0)), np.zeros((0, 0)), None, 0),
    ],
)
def test_time_that_every_rank_loses_or_waits_is_saved(waiting, lost, cost, saving):
    how = {} if cost is None else {"cost_ns": np.array(cost, float)}
    ledger = Ledger(np.array(waiting, float))
    assert ledger.attribute(np.array(lost, float), **how) == pytest.approx(saving)
    assert not np.isnan(ledger.attributed_ns).any()


_TIMES = st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=2, max_size=2)


@settings(deadline=None)  # a loaded machine fails no test
@given(_TIMES, st.lists(st.tuples(_TIMES, st.booleans()), min_size=1, max_size=5))
def test_savings_add_up_to_no_more_than_any_rank_waits_and_loses(waiting, losses):
    ledger = Ledger(np.array(waiting))
    savings = [ledger.attribute(np.array(lost), waited=waited) for lost, waited in losses]
    assert all(saving >= 0 for saving in savings)
    most = np.array(waiting) + sum(np.array(lost) for lost, _ in losses)
    assert sum(savings) <= most.mean(axis=0).min() * (1 + 1e-9) + 1e-6
