"""Answers about captures with known causes: what was injected shows to the byte, and two profilers see the same work."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.traces.cache import open_entry
from tests.planted.cases import CASES
from tests.planted.witness import differences
from tests.report.published import problems
from tools.accuracy import contradictions

pytestmark = pytest.mark.integration  # reads all captures

approx = pytest.approx


def by_rank(run, answer, value, **where):
    """A column of an answer by rank, of the rows that have these values."""
    found = defaultdict(list)
    for row in getattr(run.facts, answer).to_pylist():
        if where.items() <= row.items():
            found[row["rank"]].append(row[value])
    return dict(found)


_TO_HOST = {"direction": "DtoH", "from_memory": "device"}


@pytest.mark.parametrize(
    ("name", "answer", "column", "where", "more"),
    [
        ("data_loading_2", "launch_statistics", "kernel_count", {}, 0),
        ("straggler_host_2", "launch_statistics", "kernel_count", {}, 0),
        ("small_kernels_2", "launch_statistics", "kernel_count", {}, 2400),
        ("host_sync_2", "launch_statistics", "kernel_count", {}, 12),  # before `.item()`, a kernel takes the largest element
        ("straggler_compute_4", "launch_statistics", "kernel_count", {}, 12),
        ("host_sync_2_nsys", "copies", "count", _TO_HOST, 12),
        ("host_sync_2", "copies", "count", _TO_HOST, 12),
        ("pageable_copy_2", "copies", "bytes", {"direction": "HtoD", "from_memory": "pageable"}, 512 << 20),
    ],
)
def test_kernels_copies_and_bytes_of_an_iteration_are_counted_exactly(run_of, name, answer, column, where, more):
    found, usual = (
        {rank: sum(each) / len(CASES[case].iterations) for rank, each in by_rank(run_of(case), answer, column, **where).items()}
        for case in (name, CASES[name].twin)
    )
    for rank in set(CASES[name].planted_ranks) & set(CASES[name].captured):
        assert found[rank] == usual[rank] + more


def test_messages_are_counted_with_their_size(run_of):
    rows = run_of("slow_link_2").facts.communication.to_pylist()
    (row,) = [row for row in rows if (row["operation"], row["group"]) == ("all_reduce", "DATA_PARALLEL_GROUP_WITH_CP")]
    sent = json.loads((CASES["slow_link_2"].folder / "planted.json").read_text())["measured"]["messages_per_iteration"]
    # And one of the loss.
    assert row["count"] == (sent + 1) * len(CASES["slow_link_2"].iterations)
    assert row["largest_message_bytes"] == 4 << 20
    assert max(run_of("slow_link_2").facts.iterations["overlapped_communication_ns"].to_pylist()) < 100_000


@pytest.mark.parametrize(
    ("name", "allocated", "reserved"),
    [("memory_clean_2", 0, 0), ("memory_leak_2", 128 << 20, 0), ("memory_fragmentation_2", 2 << 20, 512 << 20)],
)
def test_memory_grows_by_what_is_kept_to_the_byte(run_of, name, allocated, reserved):
    for column, growth in (("allocated_bytes", allocated), ("reserved_bytes", reserved)):
        (values,) = by_rank(run_of(name), "memory_growth", column).values()
        assert {after - before for before, after in pairwise(values)} == {growth}
    assert run_of(name).facts.memory["growth_bytes_per_iteration"].to_pylist() == [allocated]


def test_a_leak_has_its_line_and_fragmentation_its_size(run_of):
    sites = run_of("memory_leak_2").facts.memory_sites.to_pylist()
    (site,) = [each["site"] for each in sites if each["growth_bytes_per_iteration"]]
    assert site.startswith("before_microbatch /checkout/tests/gpu/planted/plants.py:")
    needless, clean = (
        run_of(name).facts.memory["needlessly_reserved_bytes"][0].as_py()
        for name in ("memory_fragmentation_2", "memory_clean_2")
    )
    # In each iteration from the run's first.
    assert needless - clean == approx(CASES["memory_fragmentation_2"].window[1] * (510 << 20), rel=0.05)


@pytest.mark.parametrize("name", ["witness_pp2_dp2", "straggler_compute_2", "host_sync_2"])
def test_both_profilers_saw_the_same_kernels_copies_and_messages_on_every_rank(name, run_of):
    captures = (run_of(name), run_of(f"{name}_nsys"))
    kineto, nsys = ({info.rank: open_entry(entry) for info, entry in run.facts.captures.entries()} for run in captures)
    assert sorted(kineto) == sorted(nsys) == CASES[name].captured
    for rank in kineto:
        assert list(differences(kineto[rank], nsys[rank])) == [], f"rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_each_fits_the_schema_and_its_budget_adds_up(run_of, name):
    document = json.loads(run_of(name).to_json())
    assert (problems("analyze", document), contradictions(document)) == ([], [])
    budget, verdict = document["budget"], document["verdict"]
    assert [rank["rank"] for rank in budget["ranks"]] == CASES[name].captured
    for each in (budget, *budget["ranks"]):
        assert [f"{part['cause']}_ns" for part in each["parts"]] == list(BY_CAUSE)
        assert sum(part["time_us"] for part in each["parts"]) == pytest.approx(each["iteration_us"])
        assert sum(part["share"] for part in each["parts"]) == pytest.approx(1)
    assert verdict["iteration_us"] == budget["iteration_us"]
    assert verdict["finding"] == next((finding["id"] for finding in document["findings"]), None)
    assert (verdict["outcome"] == "finding") == bool(document["findings"])
