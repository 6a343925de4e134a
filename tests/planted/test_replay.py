"""Answers about captures with known causes: each differs from that about its clean baseline by what was injected."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from bridge_profiling.analysis import Run
from tests.planted.cases import CASES, FOLDER

pytestmark = pytest.mark.integration  # reads 20 captures

approx = pytest.approx


def by_rank(run, answer, value, **where):
    """A column of an answer by rank, of the rows that have these values."""
    found = defaultdict(list)
    for row in getattr(run, answer)().to_pylist():
        if where.items() <= row.items():
            found[row["rank"]].append(row[value])
    return dict(found)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("data_loading_2", 0),
        ("straggler_host_2", 0),
        ("small_kernels_2", 2400),
        ("host_sync_2", 12),  # before `.item()`, a kernel takes the largest element
        ("host_sync_2_nsys", 12),
        ("straggler_compute_2", 12),
        ("straggler_compute_4", 12),
    ],
)
def test_kernels_are_counted_exactly(run_of, name, kernels):
    found, usual = (
        {rank: {*each} for rank, each in by_rank(run_of(case), "launch_statistics", "kernel_count").items()}
        for case in (name, CASES[name].twin)
    )
    for rank in CASES[name].planted_ranks:
        if rank in CASES[name].captured:
            assert found[rank] == {count + kernels for count in usual[rank]}


@pytest.mark.parametrize(
    ("name", "column", "kind", "more"),
    [
        ("pageable_copy_2", "bytes", {"direction": "HtoD", "from_memory": "pageable"}, 512 << 20),
        ("host_sync_2", "count", {"direction": "DtoH", "from_memory": "device"}, 12),
        ("host_sync_2_nsys", "count", {"direction": "DtoH", "from_memory": "device"}, 12),
    ],
)
def test_copies_are_counted_to_the_byte(run_of, name, column, kind, more):
    found, usual = (
        {
            rank: sum(each) / len(CASES[case].iterations)
            for rank, each in by_rank(run_of(case), "copies", column, **kind).items()
        }
        for case in (name, CASES[name].twin)
    )
    assert found == {rank: usual[rank] + more for rank in CASES[name].captured}


def test_messages_are_counted_with_their_size(run_of):
    rows = run_of("slow_link_2").communication().to_pylist()
    (row,) = [row for row in rows if (row["operation"], row["group"]) == ("all_reduce", "DATA_PARALLEL_GROUP_WITH_CP")]
    sent = json.loads((CASES["slow_link_2"].folder / "planted.json").read_text())["measured"]["messages_per_iteration"]
    # And one of the loss.
    assert row["count"] == (sent + 1) * len(CASES["slow_link_2"].iterations)
    assert row["largest_message_bytes"] == 4 << 20
    assert max(run_of("slow_link_2").iterations()["overlapped_communication_us"].to_pylist()) < 100


@pytest.mark.parametrize(("name", "share"), [("slow_link_2", approx(0.17, abs=0.03)), ("clean_2", approx(1.0, abs=0.15))])
def test_messages_reach_a_share_of_the_bandwidth_of_a_benchmark(tmp_path, name, share):
    with Run(CASES[name].folder, parquet=tmp_path, bench=FOLDER / "bench_2.json") as run:
        rows = run.against_bench.communication.to_pylist()
    assert [row["reached_share"] for row in rows if row["compared_count"]] == [share]


@pytest.mark.parametrize(
    ("name", "allocated", "reserved"),
    [("memory_clean_2", 0, 0), ("memory_leak_2", 128 << 20, 0), ("memory_fragmentation_2", 2 << 20, 512 << 20)],
)
def test_memory_grows_by_what_is_kept_to_the_byte(run_of, name, allocated, reserved):
    for column, growth in (("allocated_bytes", allocated), ("reserved_bytes", reserved)):
        (values,) = by_rank(run_of(name), "memory_growth", column).values()
        assert {after - before for before, after in pairwise(values)} == {growth}
    assert run_of(name).memory()["growth_bytes_per_iteration"].to_pylist() == [allocated]


def test_a_leak_has_its_line_and_fragmentation_its_size(run_of):
    sites = run_of("memory_leak_2").memory_sites().to_pylist()
    (site,) = [each["site"] for each in sites if each["growth_bytes_per_iteration"]]
    assert site.startswith("before_microbatch /checkout/tests/gpu/planted/plants.py:")
    needless, clean = (
        run_of(name).memory()["needlessly_reserved_bytes"][0].as_py() for name in ("memory_fragmentation_2", "memory_clean_2")
    )
    # In each iteration from the run's first.
    assert needless - clean == approx(CASES["memory_fragmentation_2"].window[1] * (510 << 20), rel=0.05)
