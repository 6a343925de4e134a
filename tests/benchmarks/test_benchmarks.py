"""Ratios of paired measurements, and the page of speeds that is made of them."""

import numpy as np
import pytest

from benchmarks import table
from benchmarks.paired import changed_ratio, paired_ratio
from benchmarks.speed_page import PAGE, STORED, STORED_GPU, Table, page


def durations(generator, pairs, ratio=1.0):
    """Two sides of a machine that slows down by half meanwhile, with noise of 3% and every tenth iteration stretched."""
    drift = np.linspace(20.0, 30.0, pairs)

    def side():
        stretched = np.where(generator.random(pairs) < 0.1, 1 + generator.exponential(0.5, pairs), 1.0)
        return drift * generator.lognormal(0.0, 0.03, pairs) * stretched

    return ratio * side(), side()


def plain(generator, seed, ratio):
    return paired_ratio(*durations(generator, 60, ratio), seed=seed)


def changed(generator, seed, ratio):
    """A change among drift that the control met too."""
    mine, control = durations(generator, 24, 0.9)
    return changed_ratio(mine[:12] / control[:12], ratio * mine[12:] / control[12:], seed=seed)


@pytest.mark.parametrize(("measure", "ratio", "least"), [(plain, 1.13, 0.90), (changed, 1.0, 0.88), (changed, 1.18, 0.88)])
def test_the_interval_holds_the_true_ratio_in_about_95_of_100_measurements(measure, ratio, least):
    generator = np.random.default_rng(7)
    found = [measure(generator, seed, ratio) for seed in range(100)]
    assert least <= np.mean([one.low <= ratio <= one.high for one in found]) <= (1.0 if measure is changed else 0.99)


def test_the_page_shows_the_stored_tables_and_a_new_one_names_the_ratios_of_the_last_release():
    stored, gpu = Table.read(STORED), Table.read(STORED_GPU)
    assert (list(stored.lines), PAGE.read_text()) == (list(table.ROWS), page(stored, gpu))
    shown = zip(stored.lines.values(), [*stored.markdown(stored)][2:], strict=True)
    assert all(f"| {row.found.ratio:.2f} | {row.floor} |" in line for row, line in shown)
