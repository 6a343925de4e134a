"""What communication costs: bandwidth of the transfer, waiting separate from it, what nothing hid."""

import pytest

from tests.analysis.ranks_in_hand import values
from tests.analysis.simulated_runs import MS, US, SimulatedRun

_COSTS = ("duration_us", "transfer_us", "wait_us")


def test_bus_bandwidth_is_that_of_nccl_tests(tmp_path):
    shares = {"all_reduce": 2 * 3 / 4, "broadcast": 1, "reduce": 1}
    shares |= dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 3 / 4)
    run = SimulatedRun(4, transfer_ns=100 * US)
    run.iterate(3, lambda _: [run.meet(range(4), operation, 20_000_000) for operation in (*shares, "dispatch")])
    found = run.captured(tmp_path).communication()
    counts = ("count", "bytes", "group_size", "matched_count", "algorithm_bandwidth_gbs")
    assert set(values(found, *counts)) == {(3, 60_000_000, 4, 3, 200.0)}
    # No such bandwidth is defined for a dispatch.
    expected = {operation: pytest.approx(200 * share) for operation, share in shares.items()} | {"dispatch": None}
    assert dict(values(found, "operation", "bus_bandwidth_gbs")) == expected


def test_waiting_for_the_last_is_not_transfer_whatever_the_clocks(tmp_path):
    run = SimulatedRun(2, offsets_ns={1: 500 * MS}, transfer_ns=50 * US)
    run.iterate(3, lambda _: [run.compute(0, 1 * MS), run.compute(1, 4 * MS), run.meet([0, 1])])
    asked = run.captured(tmp_path)
    assert values(asked.communication(), "transfer_us", "wait_us") == [(150, 9000)]
    assert values(asked.communication(by_rank=True), "rank", *_COSTS) == [(0, 9150, 150, 9000), (1, 150, 150, 0)]


def test_of_one_rank_alone_nothing_is_called_transfer(tmp_path):
    run = SimulatedRun(2)
    asked = run.iterate(3, lambda _: run.meet([0, 1])).captured(tmp_path, ranks=[1])
    names = ("count", "captured_ranks", "matched_count", "transfer_us", "wait_us", "bus_bandwidth_gbs")
    assert values(asked.communication(), *names) == [(3, 1, 0, None, None, None)]
    assert "waiting_unknown" in {caveat.code for caveat in asked.caveats("communication")}


def test_a_send_and_its_receipt_are_one_transfer(tmp_path):
    run = SimulatedRun(2, transfer_ns=50 * US)
    run.iterate(3, lambda _: [run.compute(0, 1 * MS), run.send(0, 1, [0, 1])])
    found = run.captured(tmp_path).communication()
    bandwidth = pytest.approx((1 << 23) / 50e3)
    assert sorted(values(found, "operation", "count", "transfer_us", "wait_us", "bus_bandwidth_gbs")) == [
        ("recv", 3, 150, 1000 + 2 * (1000 - 50), bandwidth),
        ("send", 3, 150, 0, bandwidth),
    ]
