"""Ratios of paired measurements: the interval holds the truth as often as it says, and drift and outliers do not move it."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from benchmarks.paired import changed_ratio, paired_ratio


def durations(generator, pairs, *, ratio):
    """Two sides of a machine that slows down by half meanwhile, with noise of 3 % and every tenth iteration stretched."""
    drift = np.linspace(20.0, 30.0, pairs)

    def side():
        stretched = np.where(generator.random(pairs) < 0.1, 1 + generator.exponential(0.5, pairs), 1.0)
        return drift * generator.lognormal(0.0, 0.03, pairs) * stretched

    return ratio * side(), side()


@pytest.mark.parametrize("ratio", [1.0, 1.13])
def test_the_interval_holds_the_true_ratio_in_about_95_of_100_measurements(ratio):
    generator = np.random.default_rng(7)
    found = [paired_ratio(*durations(generator, 60, ratio=ratio), seed=seed) for seed in range(200)]
    assert 0.90 <= statistics.mean(one.low <= ratio <= one.high for one in found) <= 0.99


def test_the_interval_holds_the_true_ratio_also_where_the_machine_favours_a_side_for_a_while():
    generator = np.random.default_rng(5)
    held = []
    for seed in range(100):
        # Phases of ten pairs in which one side is up to a tenth faster.
        favour = np.repeat(generator.lognormal(0.0, 0.05, 60), 10)
        above, below = durations(generator, 600, ratio=1.0)
        found = paired_ratio(above * favour, below, seed=seed)
        held.append(found.low <= 1.0 <= found.high)
    assert 0.88 <= statistics.mean(held) <= 0.99


def test_a_cost_of_half_a_percent_shows_with_enough_pairs_and_none_does_not():
    generator = np.random.default_rng(1)
    none, half = (paired_ratio(*durations(generator, 6000, ratio=ratio)) for ratio in (1.0, 1.005))
    assert none.low <= 1.0 <= none.high
    assert half.low > 1.0
    assert none.low > 0.995
    assert none.high < 1.005


def test_drift_between_the_sides_blocks_does_not_count_as_a_difference():
    generator = np.random.default_rng(3)
    above, below = durations(generator, 60, ratio=1.0)
    # The last pairs of one side were lost: a ratio of medians takes the machine's drift for a difference.
    assert np.median(above[:40]) / np.median(below) < 0.95
    assert paired_ratio(above[:40], below[:40]).median == pytest.approx(1.0, abs=0.02)


def test_with_few_pairs_the_interval_is_all_that_was_seen():
    found = paired_ratio([2.0, 3.0, 5.0], [2.0, 2.0, 2.0])
    assert (found.median, found.low, found.high, found.pairs) == (1.5, 1.0, 2.5, 3)


@pytest.mark.parametrize("change", [1.0, 1.18])
def test_a_change_is_told_from_drift_that_the_control_met_too(change):
    generator = np.random.default_rng(11)
    held = []
    for seed in range(200):
        mine, control = durations(generator, 24, ratio=0.9)
        before = mine[:12] / control[:12]
        after = change * mine[12:] / control[12:]
        found = changed_ratio(before, after, seed=seed)
        held.append(found.low <= change <= found.high)
    assert 0.88 <= statistics.mean(held) <= 1.0
