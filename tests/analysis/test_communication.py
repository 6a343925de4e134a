"""What communication costs: bandwidth of the transfer, waiting told from it, what nothing hid."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_profiling.analysis import Run
from tests.analysis.simulated_runs import MS, US, SimulatedRun


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 4),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(tmp_path: Path, operation: str, factor: float) -> None:
    run = SimulatedRun(4, transfer_ns=100 * US)
    run.iterate(3, lambda _: run.meet(range(4), operation, 20_000_000))
    asked = run.captured(tmp_path)
    (row,) = asked.communication().to_pylist()
    assert (row["count"], row["bytes"], row["group_size"], row["matched_count"]) == (3, 60_000_000, 4, 3)
    assert row["algorithm_bandwidth_gbs"] == pytest.approx(200)
    assert row["bus_bandwidth_gbs"] == pytest.approx(200 * factor)


def test_an_operation_whose_bandwidth_nobody_defines_has_none(tmp_path: Path) -> None:
    run = SimulatedRun(2)
    run.iterate(3, lambda _: run.meet([0, 1], "dispatch"))
    asked = run.captured(tmp_path)
    (row,) = asked.communication().to_pylist()
    assert row["algorithm_bandwidth_gbs"] is not None
    assert row["bus_bandwidth_gbs"] is None


def test_waiting_for_the_last_is_no_transfer_whatever_the_clocks(tmp_path: Path) -> None:
    run = SimulatedRun(2, offsets_ns={1: 500 * MS}, transfer_ns=50 * US)

    def step(_: int) -> None:
        run.compute(0, 1 * MS)
        run.compute(1, 4 * MS)
        run.meet([0, 1])

    run.iterate(3, step)
    asked = run.captured(tmp_path)
    (group,) = asked.communication().to_pylist()
    assert (group["transfer_us"], group["wait_us"]) == (150, 9000)
    rows = asked.communication(by_rank=True).to_pylist()
    assert [(row["rank"], row["duration_us"], row["transfer_us"], row["wait_us"]) for row in rows] == [
        (0, 9150, 150, 9000),
        (1, 150, 150, 0),
    ]


def test_exposed_is_what_ran_alone_and_overlapped_what_ran_beside_compute(tmp_path: Path) -> None:
    run = SimulatedRun(2, transfer_ns=3 * MS)

    def step(_: int) -> None:
        begin = dict(run.now_ns)
        run.meet([0, 1], "reduce_scatter", group="DP")
        for rank in range(2):
            run._device(rank, "compute", begin[rank] + 1 * MS, begin[rank] + 2 * MS, None)
            run._device(rank, "memcpy", begin[rank] + int(2.5 * MS), begin[rank] + 3 * MS, None)

    run.iterate(2, step)
    asked = run.captured(tmp_path)
    rows = asked.communication(by_rank=True).to_pylist()
    assert [(row["exposed_us"], row["overlapped_us"]) for row in rows] == [(3000, 2000)] * 2


def test_of_one_rank_alone_nothing_is_called_transfer(tmp_path: Path) -> None:
    run = SimulatedRun(2)
    run.iterate(3, lambda _: run.meet([0, 1]))
    asked = run.captured(tmp_path, ranks=[1])
    (row,) = asked.communication().to_pylist()
    assert (row["count"], row["captured_ranks"], row["matched_count"]) == (3, 1, 0)
    assert row["transfer_us"] is row["wait_us"] is row["bus_bandwidth_gbs"] is None
    assert "waiting_unknown" in {caveat.code for caveat in asked.caveats("communication")}


def test_no_communication_is_an_empty_answer(tmp_path: Path) -> None:
    run = SimulatedRun(2)
    run.iterate(2, lambda _: run.compute(0, 1 * MS))
    asked = run.captured(tmp_path)
    assert asked.communication().num_rows == 0
    assert asked.communication(by_rank=True).num_rows == 0


def test_a_send_and_its_receipt_are_one_transfer(tmp_path: Path) -> None:
    run = SimulatedRun(2, transfer_ns=50 * US)

    def step(_: int) -> None:
        run.compute(0, 1 * MS)
        run.send(0, 1, [0, 1])

    run.iterate(3, step)
    asked = run.captured(tmp_path)
    rows = {row["operation"]: row for row in asked.communication().to_pylist()}
    assert rows["send"]["transfer_us"] == rows["recv"]["transfer_us"] == 150
    assert rows["send"]["wait_us"] == 0
    assert rows["recv"]["wait_us"] == 1000 + 2 * (1000 - 50)
    assert rows["recv"]["bus_bandwidth_gbs"] == pytest.approx((1 << 23) / 50e3)


def test_on_real_ranks_that_wait_for_others_nearly_all_communication_is_waiting(captures: Path) -> None:
    """Ranks 0 and 2 spend half of the capture in NCCL, waiting for 1 and 3: "communication-bound" would be wrong."""
    with Run(captures / "kineto" / "tp2_dp2") as run:
        groups, ranks = run.communication().to_pylist(), run.communication(by_rank=True).to_pylist()
    tensor = {row["rank"]: row for row in ranks if row["group"] == "TENSOR_MODEL_PARALLEL_GROUP"}
    assert tensor[0]["wait_us"] > 0.9 * tensor[0]["duration_us"]
    assert tensor[2]["wait_us"] > 0.9 * tensor[2]["duration_us"]
    assert tensor[1]["wait_us"] < 0.1 * tensor[1]["duration_us"]
    transfer = sum(row["transfer_us"] for row in groups)
    assert transfer < 0.03 * 4 * 454_000
    for row in groups:
        assert row["matched_count"] == row["count"]
        assert row["captured_ranks"] == row["group_size"]
    # H200s of one NVLink domain: 450 GB/s each way.
    large = [row["bus_bandwidth_gbs"] for row in groups if row["largest_message_bytes"] > 1 << 28]
    assert len(large) == 4
    assert all(200 < bandwidth < 450 for bandwidth in large)


def test_durations_split_into_transfer_and_waiting(captures: Path) -> None:
    with Run(captures / "kineto" / "pp2_dp2") as run:
        for row in run.communication(by_rank=True).to_pylist():
            assert row["transfer_us"] + row["wait_us"] == pytest.approx(row["duration_us"], abs=1e-3)
            assert row["exposed_us"] <= row["duration_us"] + 1e-3
