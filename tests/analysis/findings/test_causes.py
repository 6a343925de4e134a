"""A run with one planted cause has the finding of that cause, on the ranks that have it, and its clean twin has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Confidence, Finding, Thresholds
from tests.analysis.findings.simulated_hosts import MS, US, InThisProcess, SimulatedHosts

#: Findings that blame the host.
HOST = {
    "data_loading",
    "host_sync",
    "pageable_copy",
    "checkpoint_stall",
    "straggler_host",
    "small_kernels",
    "host_launch_bound",
}

OpenRun = Callable[..., Run]


@pytest.fixture
def find(tmp_path: Path, run_of: OpenRun) -> Callable[..., dict[str, Finding]]:
    """Findings of simulated hosts, by id."""

    def found(hosts: SimulatedHosts, thresholds: Thresholds | None = None) -> dict[str, Finding]:
        run = run_of(hosts.write(tmp_path), engine=InThisProcess())
        return {finding.id: finding for finding in run.findings(thresholds)}

    return found


Find = Callable[..., dict[str, Finding]]


def _busy(hosts: SimulatedHosts, rank: int, *, kernels: int = 40) -> None:
    """A micro-batch that keeps the device busy for 20 ms, and its host for a hundredth of that."""
    hosts.launch(rank, 500 * US, count=kernels)


def test_a_run_that_loses_no_time_has_no_finding(find: Find) -> None:
    hosts = SimulatedHosts(ranks=2)

    def step(_: int) -> None:
        for rank in range(2):
            _busy(hosts, rank)
        hosts.meet(100 * US)

    hosts.iterate(4, step)
    assert set(find(hosts)) <= {"dominant_kernel"}


def test_a_training_on_cpus_has_no_device_that_waits_for_launches(find: Find) -> None:
    hosts = SimulatedHosts(ranks=2)

    def step(_: int) -> None:
        for rank in range(2):
            hosts.be_in(rank, "aten::mm", 20 * MS, category="operator")

    hosts.iterate(4, step)
    assert find(hosts) == {}


def test_a_rank_whose_device_was_not_recorded_is_not_blamed_for_it(find: Find) -> None:
    hosts = SimulatedHosts(ranks=2)

    def step(_: int) -> None:
        _busy(hosts, 0)
        hosts.be_in(1, "aten::mm", 20 * MS, category="operator")

    hosts.iterate(4, step)
    assert not HOST & set(find(hosts))
    assert "low_device_busy" not in find(hosts)


@pytest.mark.parametrize(
    "name",
    [
        "data-loading",
        "dataloader",
        "batch-generator",
        "get_batch",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
    ],
)
def test_data_loading_that_all_ranks_wait_for(find: Find, name: str) -> None:
    hosts = SimulatedHosts(ranks=2)

    def step(_: int) -> None:
        for rank in range(2):
            for _ in range(2):
                hosts.wait(rank)
                hosts.be_in(rank, name, 15 * MS)
                _busy(hosts, rank)
        hosts.meet(100 * US)

    hosts.iterate(4, step)
    found = find(hosts)["data_loading"]
    assert found.ranks == [0, 1]
    assert found.recoverable_us_per_iteration == pytest.approx(30_000, rel=0.02)
    assert {event.name for event in found.events} == {name}
    assert all(event.duration_us == pytest.approx(30_000, rel=0.02) for event in found.events)
    assert "num_workers" in found.action


def test_data_loading_of_one_rank_is_its_finding_and_not_that_of_the_ranks_that_wait_for_it(find: Find) -> None:
    hosts = SimulatedHosts(ranks=3)

    def step(_: int) -> None:
        hosts.be_in(1, "data-loading", 30 * MS)
        for rank in range(3):
            _busy(hosts, rank)
        hosts.meet(100 * US)

    hosts.iterate(4, step)
    found = find(hosts)
    assert found["data_loading"].ranks == [1]
    assert found["data_loading"].recoverable_us_per_iteration == pytest.approx(30_000, rel=0.02)
    assert not {"exposed_communication", "low_overlap", "straggler_compute"} & set(found)


@pytest.mark.parametrize(("in_turns", "cost_us"), [(True, 40_000), (False, 20_000)])
def test_ranks_that_load_slowly_in_turns_are_counted_in_full(find: Find, in_turns: bool, cost_us: float) -> None:
    hosts = SimulatedHosts(ranks=2)

    def step(_: int) -> None:
        for place in range(2):
            for rank in range(2):
                slow = place == (rank if in_turns else 0)
                hosts.be_in(rank, "data-loading", 20 * MS if slow else 10 * US)
                _busy(hosts, rank, kernels=20)
            hosts.meet(100 * US)
            for rank in range(2):
                hosts.wait(rank)

    hosts.iterate(4, step)
    loading = find(hosts)["data_loading"]
    assert loading.ranks == [0, 1]
    assert loading.recoverable_us_per_iteration == pytest.approx(cost_us, rel=0.02)


def test_data_loading_beside_the_devices_work_costs_nothing(find: Find) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        _busy(hosts, 0)
        hosts.be_in(0, "data-loading", 15 * MS)  # 20 ms of kernels are launched before
        _busy(hosts, 0)

    hosts.iterate(4, step)
    assert "data_loading" not in find(hosts)


def test_a_thread_that_launches_nothing_loads_for_nobody_who_waits(find: Find) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        hosts.be_in(0, "data-loading", 30 * MS, thread=9)
        hosts.be_in(0, "thinking", 15 * MS)
        _busy(hosts, 0)

    hosts.iterate(4, step)
    found = find(hosts)
    assert "data_loading" not in found
    assert found["host_launch_bound"].recoverable_us_per_iteration == pytest.approx(15_000, rel=0.05)


def test_names_of_data_loading_ranges_can_be_set(find: Find) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        hosts.be_in(0, "Nachschub", 15 * MS)
        _busy(hosts, 0)

    hosts.iterate(4, step)
    assert "data_loading" in find(hosts, Thresholds(data_loading_ranges="^nachschub$"))


def test_a_threshold_decides_what_is_a_finding(find: Find) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        hosts.be_in(0, "data-loading", 3 * MS)  # 13 % of an iteration
        _busy(hosts, 0)

    hosts.iterate(4, step)
    assert "data_loading" in find(hosts)
    assert "data_loading" not in find(hosts, Thresholds(data_loading=0.2))


def _with_items(hosts: SimulatedHosts, items: int) -> Callable[[int], None]:
    def step(_: int) -> None:
        for place in range(20):
            hosts.launch(0, 100 * US, count=5)
            if place < items:
                hosts.wait(0, operator="aten::_local_scalar_dense")
            # What a host needs to get going again; while it is ahead, nobody waits for it.
            hosts.be_in(0, "forward", 100 * US)

    return step


def test_hosts_that_wait_for_their_device_in_the_middle_of_an_iteration(find: Find) -> None:
    hosts = SimulatedHosts()
    hosts.iterate(4, _with_items(hosts, 20))
    found = find(hosts)["host_sync"]
    assert found.recoverable_us_per_iteration == pytest.approx(20 * 107, rel=0.1)
    assert found.events[0].name == "cudaStreamSynchronize in aten::_local_scalar_dense"
    assert found.evidence["synchronizations"]["0"] == 20  # the one at the end finds the device done
    assert ".item()" in found.action


def test_many_synchronisations_are_a_finding_though_each_costs_little(find: Find) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        for _ in range(12):
            _busy(hosts, 0, kernels=20)
            hosts.wait(0, operator="aten::item")
            hosts.be_in(0, "forward", 100 * US)

    hosts.iterate(4, step)
    found = find(hosts)["host_sync"]
    assert found.recoverable_us_per_iteration == pytest.approx(12 * 107, rel=0.1)  # 1 % of an iteration
    assert not found.severe


def test_one_synchronisation_at_the_end_of_an_iteration_is_no_finding_by_itself(find: Find) -> None:
    hosts = SimulatedHosts()
    hosts.iterate(4, _with_items(hosts, 0))
    assert "host_sync" not in find(hosts)


def test_a_synchronisation_costs_what_the_device_idles_and_not_what_the_host_waits(find: Find) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        _busy(hosts, 0)
        hosts.wait(0, operator="aten::item")  # 20 ms, in which the device works
        _busy(hosts, 0)

    hosts.iterate(4, step)
    assert "host_sync" not in find(hosts)


@pytest.mark.parametrize(("memory", "expected"), [("pageable", "pageable_copy"), ("pinned", "copy_bound")])
def test_copies_that_compute_waits_for(find: Find, memory: str, expected: str) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        for _ in range(2):
            _busy(hosts, 0, kernels=10)
            hosts.copy(0, 4 * MS, memory=memory)
            _busy(hosts, 0, kernels=10)

    hosts.iterate(4, step)
    found = find(hosts)
    assert {"pageable_copy", "copy_bound"} & set(found) == {expected}
    assert found[expected].recoverable_us_per_iteration == pytest.approx(8_000, rel=0.05)
    assert found[expected].evidence["copies"][0]["host_memory"] == memory


def test_a_few_bytes_from_pageable_memory_are_no_matter_of_copying(find: Find) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        for _ in range(10):
            _busy(hosts, 0, kernels=2)
            hosts.copy(0, 2 * US, size=8)

    hosts.iterate(4, step)
    assert "pageable_copy" not in find(hosts)


def test_kernels_shorter_than_their_launches(find: Find) -> None:
    hosts = SimulatedHosts(pause_ns=10 * US)

    def step(_: int) -> None:
        _busy(hosts, 0)
        hosts.wait(0)
        hosts.launch(0, 2 * US, "aten::add_", count=1000)

    hosts.iterate(4, step)
    found = find(hosts)
    assert found["small_kernels"].recoverable_us_per_iteration == pytest.approx(13_000, rel=0.1)
    assert found["small_kernels"].events[0].name == "before aten::add_"
    assert found["small_kernels"].events[0].count > 900
    assert "host_launch_bound" not in found


def test_a_slow_host_with_kernels_of_some_length_is_launch_bound(find: Find) -> None:
    hosts = SimulatedHosts(pause_ns=55 * US)
    hosts.iterate(4, lambda _: hosts.launch(0, 20 * US, count=1000))
    found = find(hosts)
    assert found["host_launch_bound"].recoverable_us_per_iteration == pytest.approx(40_000, rel=0.05)
    assert found["host_launch_bound"].severe
    assert "cuda_graph_impl" in found["host_launch_bound"].action
    assert "small_kernels" not in found
    assert found["low_device_busy"].severe


def test_a_checkpoint_between_two_iterations(find: Find) -> None:
    hosts = SimulatedHosts(ranks=2)

    def step(number: int) -> None:
        if number == 12:
            for rank in range(2):
                hosts.be_in(rank, "checkpoint", 50 * MS)
                # The range is before the iteration, not in it.
        for rank in range(2):
            _busy(hosts, rank)
        hosts.meet(100 * US)

    hosts.iterate(4, step)
    for rank in range(2):
        third = hosts.rows[rank]["iterations"][2]
        third["start_ns"] += 50 * MS
    found = find(hosts)["checkpoint_stall"]
    assert found.ranks == [0, 1]
    assert found.recoverable_us_per_iteration == pytest.approx(50_000 / 4, rel=0.02)
    assert found.evidence["iterations"] == [11]
    assert "async_save" in found.action


@pytest.mark.parametrize("name", ["CheckpointFunction", "CheckpointFunctionBackward", "aten::checkpoint_hook", "recompute"])
def test_activation_checkpointing_is_no_checkpoint(find: Find, name: str) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        hosts.be_in(0, name, 15 * MS, category="operator")
        _busy(hosts, 0)

    hosts.iterate(4, step)
    assert "checkpoint_stall" not in find(hosts)


def test_a_host_that_is_late_only_while_its_device_waits_for_another_rank_costs_nothing(find: Find) -> None:
    hosts = SimulatedHosts(ranks=2)

    def step(_: int) -> None:
        hosts.launch(0, 1 * MS, count=10)
        hosts.launch(1, 1 * MS, count=40)
        hosts.meet(100 * US)
        hosts.be_in(0, "thinking", 15 * MS)  # rank 0 waits for rank 1 for 30 ms
        for rank in range(2):
            hosts.launch(rank, 1 * MS, count=2)

    hosts.iterate(4, step)
    found = find(hosts)
    assert not HOST & set(found)
    assert found["straggler_compute"].ranks == [1]


def test_without_a_manifest_a_finding_about_the_host_is_of_low_confidence_and_says_why(find: Find) -> None:
    hosts = SimulatedHosts(pause_ns=55 * US)
    hosts.iterate(4, lambda _: hosts.launch(0, 20 * US, count=1000))
    found = find(hosts)["host_launch_bound"]
    assert found.confidence is Confidence.low
    assert "manifest" in found.confidence_reason


def test_what_findings_give_back_is_never_more_than_the_time_without_compute(
    find: Find, tmp_path: Path, run_of: OpenRun
) -> None:
    hosts = SimulatedHosts(ranks=2, pause_ns=30 * US)

    def step(number: int) -> None:
        hosts.be_in(0, "data-loading", 8 * MS)
        hosts.be_in(1, "data-loading", 4 * MS)
        for rank in range(2):
            hosts.launch(rank, (20 + 10 * rank) * US, count=200)
            hosts.wait(rank, operator="aten::item")
            hosts.copy(rank, 2 * MS)
            hosts.launch(rank, 2 * US, "aten::add_", count=300)
        hosts.meet(3 * MS)

    hosts.iterate(4, step)
    run = run_of(hosts.write(tmp_path), engine=InThisProcess())
    absent = [row["non_compute_us"] for row in run.idle_gaps().to_pylist()]
    bounds = [finding.recoverable_us_per_iteration or 0.0 for finding in run.findings()]
    assert len([bound for bound in bounds if bound > 0]) >= 4
    assert 0.9 * min(absent) <= sum(bounds) <= max(absent)


def test_captures_without_marked_iterations_are_judged_as_wholes(find: Find) -> None:
    hosts = SimulatedHosts()
    _busy(hosts, 0)
    hosts.be_in(0, "data-loading", 15 * MS + 20 * MS)
    _busy(hosts, 0)
    found = find(hosts)["data_loading"]
    assert "of each capture" in found.title
    assert found.recoverable_us_per_iteration == pytest.approx(15_000, rel=0.05)
