"""Ratios of paired measurements, and the page of speeds that is made of them."""

import numpy as np

from benchmarks.paired import paired_ratio
from benchmarks.table import PAGE, ROWS, STORED, Table, page


def durations(generator, pairs, ratio=1.0):
    """Two sides of a machine that slows down by half meanwhile, with noise of 3% and every tenth iteration stretched."""
    drift = np.linspace(20.0, 30.0, pairs)

    def side():
        stretched = np.where(generator.random(pairs) < 0.1, 1 + generator.exponential(0.5, pairs), 1.0)
        return drift * generator.lognormal(0.0, 0.03, pairs) * stretched

    return ratio * side(), side()


def test_the_interval_holds_the_true_ratio_in_about_95_of_100_measurements():
    generator = np.random.default_rng(7)
    found = [paired_ratio(*durations(generator, 60, 1.13), seed=seed) for seed in range(100)]
    assert 0.90 <= np.mean([one.low <= 1.13 <= one.high for one in found]) <= 0.99


def test_the_page_shows_the_stored_table_and_a_new_one_names_the_ratios_of_the_last_release():
    stored = Table.read(STORED)
    assert (list(stored.lines), PAGE.read_text()) == (list(ROWS), page(stored))
    shown = zip(stored.lines.values(), [*stored.markdown(stored)][2:], strict=True)
    assert all(f"| {row.found.ratio:.2f} | {row.floor} |" in line for row, line in shown)
