"""Captures from two H200s beside what `bridge-profiling bench collectives` gave on such a machine (bench_2.json)."""

from __future__ import annotations

import pytest

from bridge_profiling.analysis import Run
from tests.planted.cases import CASES, FOLDER


def reached(case, folder):
    """Bandwidth of the compared messages of data parallelism, as a share of what the link gave alone."""
    run = Run(CASES[case].folder, parquet=folder, bench=FOLDER / "bench_2.json")
    rows = run.against_bench.communication.to_pylist()
    (share,) = [row["reached_share"] for row in rows if row["compared_count"]]
    return share


def test_a_link_without_peer_to_peer_copies_reaches_a_sixth_of_it(tmp_path):
    assert reached("slow_link_2", tmp_path) == pytest.approx(0.17, abs=0.03)


def test_a_link_as_it_should_be_reaches_all_of_it(tmp_path):
    assert reached("clean_2", tmp_path) == pytest.approx(1.0, abs=0.15)
