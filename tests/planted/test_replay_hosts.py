"""Causes on the host: slow data, a slow host, synchronisation, many small kernels, pageable copies, a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from statistics import median

import pytest

from tests.planted.answers import copies, kernel_counts, lost_ms, typical_ms, verdicts, waited_ms
from tests.planted.cases import CASES
from tests.planted.conftest import RunOf, TablesOf

#: Two runs of the same kernels differ by as much.
SAME = 0.02


def of_kind(kind: str) -> pytest.MarkDecorator:
    """Every case that has this planted."""
    return pytest.mark.parametrize(
        "name", [case.name for case in CASES.values() if case.plant is not None and case.plant["kind"] == kind]
    )


def twin_of(name: str) -> str:
    twin = CASES[name].twin
    assert twin is not None
    return twin


@of_kind("slow_data")
def test_devices_wait_for_the_data_that_load_slowly(name: str, run_of: RunOf):
    planted = CASES[name].planted_host_ms_per_iteration
    run, twin = run_of(name), run_of(twin_of(name))
    starved, before = typical_ms(run, "launch_starved_us"), typical_ms(twin, "launch_starved_us")
    loading, loading_before = lost_ms(run, "data_loading"), lost_ms(twin, "data_loading")
    assert sorted(starved) == CASES[name].captured
    for rank in starved:
        # Part of what is planted passes while the device still has work queued.
        assert 0.7 * planted < starved[rank] - before[rank] < 1.02 * planted
        for iteration in CASES[name].iterations:
            assert 0.75 * planted < loading[rank][iteration] < 1.1 * planted
        assert max(loading_before[rank].values()) < 0.1 * planted


@of_kind("slow_data")
def test_slow_data_change_nothing_that_the_device_does(name: str, run_of: RunOf):
    run, twin = run_of(name), run_of(twin_of(name))
    assert kernel_counts(run) == kernel_counts(twin)
    before = typical_ms(twin, "compute_us")
    for rank, computed in typical_ms(run, "compute_us").items():
        assert computed == pytest.approx(before[rank], rel=SAME)


def test_a_slow_host_launches_late_and_the_other_rank_waits_for_it(run_of: RunOf):
    case = CASES["straggler_host_2"]
    run, twin = run_of(case.name), run_of("clean_2")
    ((late,), (other,)) = case.late_ranks, set(case.captured) - {*case.late_ranks}
    starved, before = typical_ms(run, "launch_starved_us"), typical_ms(twin, "launch_starved_us")
    assert 0.6 * case.planted_host_ms_per_iteration < starved[late] - before[late] < case.planted_host_ms_per_iteration
    assert abs(starved[other] - before[other]) < 0.05 * case.planted_host_ms_per_iteration
    for iteration, waited in waited_ms(run, other, late).items():
        assert 0.6 * case.planted_host_ms_per_iteration < waited < case.planted_host_ms_per_iteration, iteration
    assert max(waited_ms(run, late, other).values()) < 5
    assert verdicts(run) == {late: "stable", other: "no"}


def test_a_slow_host_computes_no_more_than_others(run_of: RunOf):
    run, twin = run_of("straggler_host_2"), run_of("clean_2")
    assert kernel_counts(run) == kernel_counts(twin)
    computed = typical_ms(run, "compute_us")
    assert computed[1] == pytest.approx(computed[0], rel=SAME)


def test_small_kernels_are_counted_and_the_device_waits_for_their_launches(run_of: RunOf):
    case = CASES["small_kernels_2"]
    run, twin = run_of(case.name), run_of("clean_2")
    (rank,) = case.captured
    (count,) = kernel_counts(twin)[rank]
    assert kernel_counts(run) == {rank: {count + case.planted_kernels_per_iteration}}
    assert {row["median_kernel_us"] < 3 for row in run.launch_statistics().to_pylist()} == {True}
    starved, before = typical_ms(run, "launch_starved_us"), typical_ms(twin, "launch_starved_us")
    # Each is launched in some 5 us and done in 1: the difference is lost, less what was queued before them.
    assert 2 < (starved[rank] - before[rank]) * 1e3 / case.planted_kernels_per_iteration < 8
    assert min(lost_ms(run, "small_kernels")[rank].values()) > 5
    assert max(lost_ms(twin, "small_kernels")[rank].values()) < 1


@of_kind("host_sync")
def test_every_synchronisation_is_seen_with_its_copy(name: str, run_of: RunOf, tables_of: TablesOf):
    planted = CASES[name].planted_synchronizations_per_iteration
    waits, before = synchronizations(tables_of(name)), synchronizations(tables_of(twin_of(name)))
    run, twin = run_of(name), run_of(twin_of(name))
    for rank in CASES[name].captured:
        (usual,) = set(before[rank].values())
        assert waits[rank] == dict.fromkeys(CASES[name].iterations, usual + planted)
        each = [
            copies(one, "DtoH", "device")[rank]["count"] / len(CASES[case].iterations)
            for one, case in ((run, name), (twin, twin_of(name)))
        ]
        assert each[0] - each[1] == planted
        # Before `.item()`, a kernel takes the largest element.
        (count,) = kernel_counts(twin)[rank]
        assert kernel_counts(run)[rank] == {count + planted}


def synchronizations(tables) -> dict[int, dict[int, int]]:
    """How often each rank's host waited for a stream, by iteration."""
    found = {}
    for rank, each in tables.items():
        iterations = each.iterations.select(["iteration", "start_ns", "end_ns"]).to_pylist()
        counted: Counter[int] = Counter()
        for row in each.host_events.select(["name", "start_ns"]).to_pylist():
            if row["name"] == "cudaStreamSynchronize":
                counted.update(one["iteration"] for one in iterations if one["start_ns"] <= row["start_ns"] < one["end_ns"])
        assert len(set(counted.values())) == 1, f"rank {rank}: {counted}"
        found[rank] = dict(counted)
    return found


@of_kind("host_sync")
def test_the_device_waits_after_synchronisations(name: str, run_of: RunOf):
    run, twin = run_of(name), run_of(twin_of(name))
    lost, before = lost_ms(run, "host_sync"), lost_ms(twin, "host_sync")
    gained = [median(lost[rank].values()) - median(before[rank].values()) for rank in CASES[name].captured]
    assert max(gained) > 2


def test_pageable_copies_are_counted_to_the_byte(run_of: RunOf):
    case = CASES["pageable_copy_2"]
    run, twin = run_of(case.name), run_of("clean_2")
    for rank in case.captured:
        found, usual = copies(run, "HtoD", "pageable")[rank], copies(twin, "HtoD", "pageable")[rank]
        per_iteration = [row["bytes"] / len(CASES[name].iterations) for row, name in ((found, case.name), (usual, "clean_2"))]
        assert per_iteration[0] - per_iteration[1] == case.planted_bytes_per_iteration
        assert found["bandwidth_gbs"] < 10
        lost = lost_ms(run, "pageable_copy")[rank]
        # As long as such copies take by themselves.
        assert median(lost.values()) == pytest.approx(found["total_us"] / 1e3 / len(case.iterations), rel=0.1)
    assert {cause for each in lost_ms(twin, "pageable_copy").values() for cause in each.values()} == {0.0}


def test_a_checkpoint_is_a_gap_between_two_iterations(run_of: RunOf):
    case = CASES["checkpoint_2"]
    first, second = case.planted_between_iterations
    told = json.loads((case.folder / "planted.json").read_text())["measured"]["ms_after_iterations_completed"]
    planted = told[str(second)]
    run, twin = run_of(case.name), run_of("clean_2")
    rows = run.iterations().select(["rank", "iteration", "start_ns", "end_ns", "duration_us"]).to_pylist()
    for rank in case.captured:
        mine = {row["iteration"]: row for row in rows if row["rank"] == rank}
        gaps = {each: (mine[each + 1]["start_ns"] - mine[each]["end_ns"]) / 1e6 for each in case.iterations[:-1]}
        assert gaps.pop(first) == pytest.approx(planted, rel=0.02)
        assert max(gaps.values()) < 1
        lost = lost_ms(run, "checkpoint_stall")[rank]
        assert lost.pop(first) == pytest.approx(planted, rel=0.02)
        assert set(lost.values()) == {0.0}
    usual, durations = typical_ms(twin, "duration_us"), typical_ms(run, "duration_us")
    for rank in case.captured:
        assert durations[rank] == pytest.approx(usual[rank], rel=0.05)
