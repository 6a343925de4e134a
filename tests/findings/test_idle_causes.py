"""Time without compute is cut by cause, each nanosecond once, by what the host really did."""

import random
from collections import defaultdict
from operator import itemgetter

import pytest

from bridge_profiling.traces import cache
from tests.facts.ranks_in_hand import answer, rank, span, work
from tests.findings.simulated_jobs import MS, US, SimulatedJob


def _tables(job, folder):
    return [cache.open_entry(entry) for entry in sorted(job.write(folder).iterdir())]


def _lost(tables, key=itemgetter("cause")):
    lost = defaultdict(float)
    for row in answer(tables, "idle_causes").to_pylist():
        lost[key(row)] += row["lost_ns"]
    return {name: time for name, time in lost.items() if time}


@pytest.mark.parametrize("seed", range(5))
def test_causes_add_up_to_the_time_without_compute_of_every_iteration(seed, tmp_path):
    chance = random.Random(seed)

    def step(job, _):
        for _ in range(60):
            number = chance.randrange(2)
            match chance.randrange(8):
                case 0:
                    job.be_in(number, chance.choice(["data-loading", "checkpoint", "thinking"]), chance.randrange(5 * MS))
                case 1:
                    job.wait(number, operator="aten::item")
                case 2:
                    job.copy(number, chance.randrange(1, MS), memory=chance.choice(["pageable", "pinned"]))
                case 3:
                    job.meet(chance.randrange(1, MS))
                case 4:
                    job.launch(number, 2 * US, count=50)
                case _:
                    job.launch(number, chance.randrange(1, 300) * US, count=5)

    for tables in _tables(SimulatedJob(step, 2, iterations=3, pause_ns=chance.randrange(20) * US), tmp_path):
        lost = _lost(tables, lambda row: None if row["between"] else row["iteration"])
        lost.pop(None, None)
        expected = {row["iteration"]: row["non_compute_ns"] for row in answer(tables, "idle_gaps").to_pylist()}
        assert lost == expected


@pytest.mark.parametrize(
    ("end", "stream", "launched_ns", "lost"),
    [
        # While it runs, a late host costs nothing.
        (80, 7, 90, {"starved_beside_communication": 70, "host_launch": 10, "dependency_stalled": 10}),
        # It ends after the kernel that comes late has begun, which did not wait for it.
        (105, 20, 100, {"host_launch": 90}),
    ],
)
def test_communication_excuses_a_late_host_only_if_compute_waits_for_it(end, stream, launched_ns, lost):
    events = [work("compute", 0, 10, -5), work("communication", 10, end, -4, stream=stream)]
    assert _lost(rank(device_events=[*events, work("compute", 100, 110, launched_ns)])) == lost


@pytest.mark.parametrize(
    ("kind", "launched_ns", "cause"),
    [
        ({"kind": "memset"}, -3, "blocked_by_device_copy"),
        ({"kind": "memcpy", "direction": "DtoD"}, -3, "blocked_by_device_copy"),
        ({"kind": "memcpy", "direction": "HtoD"}, -3, "blocked_by_copy"),
        # The host was late, too: nothing shows that compute would have waited for the copy.
        *(({"kind": "memcpy", "direction": direction}, 81, "blocked_by_device_copy") for direction in ("DtoD", "HtoD")),
    ],
)
def test_time_under_a_copy_or_memset_is_the_devices_work_and_neither_communication_nor_a_late_host(kind, launched_ns, cause):
    events = [work("compute", 0, 10, -5), work("", 10, 80, -4) | kind, work("compute", 81, 110, launched_ns)]
    lost = _lost(rank(device_events=events))
    assert lost[cause] >= 70
    assert sum(lost.values()) == 71


def test_as_many_kernels_as_make_a_run_are_small_and_their_neighbours_are_not():
    events, launched = [], 0
    for took in (200 * US, *[1 * US] * 32, 200 * US):
        events.append(work("compute", launched, launched + took, launched))
        launched += took + 9 * US
    assert _lost(rank(device_events=events)) == {"small_kernels": 32 * 9 * US, "host_launch": 9 * US}


@pytest.mark.parametrize("stop", ["host_sync", "data_loading", "checkpoint_stall"])
def test_what_a_stop_took_from_the_hosts_lead_is_attributed_to_it_and_no_more(stop, tmp_path):
    ranges = {"data_loading": "data-loading", "checkpoint_stall": "checkpoint"}

    def step(job, _):
        job.launch(0, 300 * US)
        # It holds the host for 300 us, in which it would have launched 20 kernels.
        job.be_in(0, ranges[stop], 300 * US) if stop in ranges else job.wait(0)
        job.pause_ns = 10 * US
        job.launch(0, 10 * US, count=100)  # each 5 us late

    (tables,) = _tables(SimulatedJob(step, iterations=1), tmp_path)
    lost = _lost(tables)
    assert lost[stop] == pytest.approx(300 * US, rel=0.05)
    assert lost["host_launch"] == pytest.approx((100 * 5 + 10 - 300) * US, rel=0.1)


@pytest.mark.parametrize(("launched", "lost"), [(150, 50), (500, 210)])
def test_after_a_wait_the_next_launch_may_take_its_time_however_short_the_wait_was(launched, lost):
    """In microseconds: the device has done its work at 100, and the wait ends at 110."""
    events = [work("compute", 0, 100 * US, -5), work("compute", 600 * US, 700 * US, launched * US)]
    waits = [span("cudaStreamSynchronize", 100 * US, 110 * US, "runtime")]
    assert _lost(rank(device_events=events, host_events=waits))["host_sync"] == lost * US
