"""Time without compute is cut by cause, each nanosecond once, by what the host really did."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest

from bridge_profiling.traces import cache
from bridge_profiling.traces.types import RankTables
from tests.analysis.findings.simulated_hosts import MS, US, SimulatedHosts
from tests.analysis.ranks_in_hand import answer, rank, work


def _tables(hosts: SimulatedHosts, folder: Path, number: int = 0) -> RankTables:
    tables = cache.open_entry(hosts.write(folder) / f"{number:05d}")
    assert tables is not None
    return tables


def _lost(tables: RankTables) -> dict[str, float]:
    lost: dict[str, float] = defaultdict(float)
    for row in answer(tables, "idle_causes").to_pylist():
        lost[row["cause"]] += row["lost_us"]
    return {cause: time for cause, time in lost.items() if time}


@pytest.mark.parametrize("seed", range(5))
def test_causes_add_up_to_the_time_without_compute_of_every_iteration(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    hosts = SimulatedHosts(ranks=2, pause_ns=chance.randrange(0, 20) * US)

    def step(_: int) -> None:
        for _ in range(60):
            number = chance.randrange(2)
            match chance.randrange(8):
                case 0:
                    hosts.be_in(number, chance.choice(["data-loading", "checkpoint", "thinking"]), chance.randrange(5 * MS))
                case 1:
                    hosts.wait(number, operator="aten::item")
                case 2:
                    hosts.copy(number, chance.randrange(1, MS), memory=chance.choice(["pageable", "pinned"]))
                case 3:
                    hosts.meet(chance.randrange(1, MS))
                case 4:
                    hosts.launch(number, 2 * US, count=50)
                case _:
                    hosts.launch(number, chance.randrange(1, 300) * US, count=5)

    hosts.iterate(3, step)
    for number in range(2):
        tables = _tables(hosts, tmp_path, number)
        lost: dict[int, float] = defaultdict(float)
        for row in answer(tables, "idle_causes").to_pylist():
            lost[row["iteration"]] += 0.0 if row["between"] else row["lost_us"]
        expected = {row["iteration"]: row["non_compute_us"] for row in answer(tables, "idle_gaps").to_pylist()}
        assert lost == pytest.approx(expected, abs=1e-3)


def test_a_host_that_is_late_while_communication_runs_is_not_blamed_for_that_time() -> None:
    events = [
        work("compute", 0, 10, -5),
        work("communication", 10, 80, -4),
        work("compute", 100, 110, 90),
    ]
    tables = rank(device_events=events)
    assert _lost(tables) == pytest.approx(
        {"starved_beside_communication": 0.070, "host_launch": 0.010, "blocked_by_communication": 0.010}
    )


def test_communication_that_compute_did_not_wait_for_excuses_no_host() -> None:
    # It runs on beside the kernel that comes late.
    events = [
        work("compute", 0, 10, -5),
        work("communication", 10, 105, -4, stream=20),
        work("compute", 100, 110, 100),
    ]
    assert _lost(rank(device_events=events)) == pytest.approx({"host_launch": 0.090})


def test_what_a_wait_took_from_the_hosts_lead_is_owed_to_it_and_no_more(tmp_path: Path) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        hosts.launch(0, 300 * US)
        hosts.wait(0)  # holds the host for 300 us, in which it would have launched 20 kernels
        hosts.pause_ns[0] = 10 * US
        hosts.launch(0, 10 * US, count=100)  # each 5 us late
        hosts.pause_ns[0] = 0

    hosts.iterate(1, step)
    lost = _lost(_tables(hosts, tmp_path))
    assert lost["host_sync"] == pytest.approx(300, rel=0.05)
    assert lost["host_launch"] == pytest.approx(100 * 5 + 10 - 300, rel=0.1)


def test_a_host_that_does_something_else_after_a_wait_is_late_for_that(tmp_path: Path) -> None:
    hosts = SimulatedHosts()

    def step(_: int) -> None:
        hosts.launch(0, 20 * MS)
        hosts.wait(0)
        hosts.be_in(0, "thinking", 10 * MS)
        hosts.launch(0, 20 * MS)

    hosts.iterate(1, step)
    lost = _lost(_tables(hosts, tmp_path))
    assert lost["host_launch"] == pytest.approx(10_000, rel=0.01)
    assert lost.get("host_sync", 0.0) < 20
