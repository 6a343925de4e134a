"""Numbers in words: a unit always, and no more digits than matter."""

from __future__ import annotations

from typing import Any

import pytest

from bridge_profiling.report import words


@pytest.mark.parametrize(
    ("time_us", "said"),
    [(121_234.5, "121 ms"), (8_437.0, "8.4 ms"), (31.0, "0.031 ms"), (0.0, "0 ms"), (-1_300.0, "−1.3 ms"), (None, "–")],
)
def test_times(time_us: float | None, said: str) -> None:
    assert words.milliseconds(time_us) == said


@pytest.mark.parametrize(("share", "said"), [(0.312, "31%"), (0.0437, "4.4%"), (0.0, "0%"), (None, "–")])
def test_shares(share: float | None, said: str) -> None:
    assert words.percent(share) == said


def test_memory_counts_in_powers_of_two_and_messages_in_powers_of_ten() -> None:
    assert words.memory(5 * 2**30) == "5.00 GiB"
    assert words.memory(812.5 * 2**20) == "812.5 MiB"
    assert words.size(1_068_089_344) == "1.07 GB"


@pytest.mark.parametrize(
    ("name", "amount", "heading", "said"),
    [
        ("waiting_us", 1_500.0, "waits for others", "1.5 ms"),
        ("late_us_by_iteration", [49_686.0, 133_343.0], "late, by iteration", "50 ms, 133 ms"),
        ("share_of_iteration", 0.1429, "share of the iteration", "14%"),
        ("growth_bytes_per_iteration", 2 * 2**20, "growth per iteration", "2.0 MiB"),
        ("bus_bandwidth_gbs", 277.36, "bus bandwidth", "277.4 GB/s"),
        ("kernel_count", 3552, "kernel count", "3,552"),
        ("waiting_us", {0: 1_500.0, "3": 25_000.0}, "waits for others", "rank 0: 1.5 ms, rank 3: 25 ms"),
        ("idle_us", {"host_sync": {1: 2_000.0}}, "idle", "host sync: rank 1: 2.0 ms"),
        ("devices", [{"rank": 0, "peak_bytes": 2**30}], "devices", "rank: 0, peak: 1.00 GiB"),
        ("by_annotation", True, "by annotation", "yes"),
        ("backend", "nccl", "backend", "nccl"),
    ],
)
def test_evidence_is_written_with_the_unit_in_its_name(name: str, amount: Any, heading: str, said: str) -> None:
    assert words.label(name) == heading
    assert words.value(name, amount) == said


def test_evidence_of_hundreds_of_ranks_is_cut() -> None:
    said = words.value("waiting_us", dict.fromkeys(range(512), 1000.0))
    assert said.endswith("rank 11: 1.0 ms and 500 more")


def test_ranks_in_words() -> None:
    assert words.ranks([0, 1, 2, 3], 4) == "all 4 ranks"
    assert words.ranks([1, 3], 4) == "ranks 1, 3"
    assert words.ranks([2]) == "rank 2"
    assert words.ranks(list(range(1, 1024, 2))).endswith("23 and 500 more")
