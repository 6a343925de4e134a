"""Causes in memory: a leak, and an allocator that reserves more and more. Numbers to the byte."""

from __future__ import annotations

from itertools import pairwise

from tests.planted.cases import CASES
from tests.planted.conftest import RunOf


def changes(run_of: RunOf, name: str, column: str) -> set[int]:
    """By how much memory grows from one iteration's end to the next."""
    values = [row[column] for row in run_of(name).memory_growth().to_pylist()]
    assert len(values) == len(CASES[name].iterations)
    return {after - before for before, after in pairwise(values)}


def test_a_clean_run_has_as_much_memory_after_each_iteration(run_of: RunOf):
    assert changes(run_of, "memory_clean_2", "allocated_bytes") == {0}
    assert changes(run_of, "memory_clean_2", "reserved_bytes") == {0}
    assert run_of("memory_clean_2").memory().to_pylist()[0]["growth_bytes_per_iteration"] == 0


def test_a_leak_grows_by_what_is_kept_and_its_line_is_named(run_of: RunOf):
    case = CASES["memory_leak_2"]
    assert changes(run_of, case.name, "allocated_bytes") == {case.planted_bytes_per_iteration}
    (row,) = run_of(case.name).memory().to_pylist()
    assert row["growth_bytes_per_iteration"] == case.planted_bytes_per_iteration
    grown = [row for row in run_of(case.name).memory_sites().to_pylist() if row["growth_bytes_per_iteration"]]
    (site,) = grown
    assert site["growth_bytes_per_iteration"] == case.planted_bytes_per_iteration
    assert site["site"].startswith("before_microbatch /checkout/tests/gpu/planted/plants.py:")


def test_a_leak_is_no_fragmentation(run_of: RunOf):
    assert changes(run_of, "memory_leak_2", "reserved_bytes") == {0}


def test_fragmentation_reserves_what_nothing_else_can_use(run_of: RunOf):
    case = CASES["memory_fragmentation_2"]
    assert changes(run_of, case.name, "reserved_bytes") == {case.planted_reserved_bytes_per_iteration}
    assert changes(run_of, case.name, "allocated_bytes") == {case.planted_bytes_per_iteration}
    (row,), (clean,) = (run_of(name).memory().to_pylist() for name in (case.name, "memory_clean_2"))
    iterations = case.window[1]
    needless = row["needlessly_reserved_bytes"] - clean["needlessly_reserved_bytes"]
    kept_whole = case.planted_reserved_bytes_per_iteration - case.planted_bytes_per_iteration
    assert 0.95 * iterations * kept_whole < needless < 1.05 * iterations * kept_whole
