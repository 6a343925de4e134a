"""Memory that grows, that fragments, that runs out; and memory that does what memory does."""

import pytest

from bridge_profiling.findings import Confidence
from bridge_profiling.findings.memory import (
    _lasting,
    _leak_severity,
    memory_fragmentation,
    memory_growth,
    memory_headroom,
)
from bridge_profiling.traces import kineto
from tests.facts.ranks_in_hand import write_rank
from tests.traces.kineto_files import kernel

MIB, MB, GB = 1 << 20, 10**6, 10**9
S = 10**9

TRAIN, LEAK = "train_step /home/me/train.py:40", "log_loss /home/me/train.py:77"

#: A little more than the weights and activations of a recording.
_RESERVED = 5 * GB + 64 * MIB


class Recording:
    """What the allocator of one device did in iterations of a second: blocks it took, tensors it gave them to.

    Weights of 2 GB, and activations that come and go in each iteration, unless they are set to 0.
    """

    def __init__(self, iterations, *, rank=0, persistent=2 * GB, temporary=3 * GB, reserved=_RESERVED):
        self.rank = rank
        self.iterations = range(iterations)
        self.rows = {name: [] for name in ("allocations", "segments", "out_of_memory", "iterations")}
        for number in self.iterations:
            row = {"iteration": number, "start_ns": number * S, "end_ns": (number + 1) * S - 1, "boundary": False}
            self.rows["iterations"].append(row)
        if reserved:
            self.block(reserved, 0.05, active=persistent)
            self.tensor(persistent, 0.1, None)
            for number in self.iterations:
                self.tensor(temporary, number + 0.2, number + 0.8)

    def tensor(self, size, begin, end, stack=TRAIN):
        """A tensor from one second to another; None for ever."""
        gone = None if end is None else int(end * S)
        row = {"device": 0, "bytes": size, "allocated_ns": int(begin * S), "free_requested_ns": gone, "freed_ns": gone}
        self.rows["allocations"].append(row | {"stack": stack})

    def leak(self, size):
        """A tensor in each iteration that stays."""
        for number in self.iterations:
            self.tensor(size, number + 0.3, None, LEAK)
        return self

    def block(self, size, begin, active=0):
        """Memory that the allocator takes of the device, and how much of it is in use at the end."""
        row = {"device": 0, "bytes": size, "allocated_ns": int(begin * S), "active_bytes": active}
        self.rows["segments"].append(row | {"largest_free_bytes": size - active})

    def error(self, size, at):
        """A request that fails."""
        row = {"device": 0, "time_ns": int(at * S), "requested_bytes": size, "free_bytes": 0, "stack": TRAIN}
        self.rows["out_of_memory"].append(row)
        return self

    def write(self, folder, device_bytes=None):
        """As the cache keeps a snapshot, and a trace that marks iterations and may know how large the device is."""
        rows = {name: each for name, each in self.rows.items() if each or name != "out_of_memory"}
        traced = {"iterations": rows.pop("iterations")}
        write_rank(folder, self.rank, rows, "memory")
        known = {} if device_bytes is None else {"device_bytes": {0: device_bytes, 1: GB}}
        traced["device_events"] = (
            [{"kind": "compute", "name": "k", "start_ns": 0, "end_ns": 10, "iteration": 0}] if known else []
        )
        write_rank(folder, self.rank, traced, **known)
        return folder


@pytest.fixture
def find(find):
    """Findings about memory, by id."""
    return lambda recording, **written: find(recording, memory_headroom, memory_fragmentation, memory_growth, **written)


def _setting_up(iterations):
    recording = Recording(iterations, reserved=7 * GB)
    recording.tensor(1 * GB, 0.9, None)
    recording.tensor(500 * MB, 1.3, None)  # as optimizer states are, after the first step
    return recording


@pytest.mark.parametrize(
    ("recording", "device_bytes"),
    [
        (Recording(6), 80 * GB),
        (Recording(6).leak(1_000_000), None),
        *((_setting_up(iterations), None) for iterations in (2, 6)),
        (Recording(4, persistent=40 * GB, temporary=35 * GB, reserved=76 * GB), None),  # of unknown size
    ],
)
def test_memory_that_does_what_memory_does_is_no_finding(find, recording, device_bytes):
    assert find(recording, device_bytes=device_bytes) == {}


# Growth in three iterations leaves doubt.
@pytest.mark.parametrize(("iterations", "confidence"), [(6, Confidence.high), (3, Confidence.medium)])
def test_growth_is_found_with_the_line_that_keeps_it(find, iterations, confidence):
    (finding,) = find(Recording(iterations, reserved=8 * GB).leak(40 * MB), device_bytes=80 * GB).values()
    assert (finding.id, finding.ranks, finding.confidence) == ("memory_growth", [0], confidence)
    assert finding.recoverable_ns_per_iteration is None
    (device,) = finding.evidence["devices"]
    assert device["growth_bytes_per_iteration"] == 40 * MB
    assert device["iterations_until_full"] == pytest.approx((80 * GB - 2 * GB) / (40 * MB), rel=0.01)
    assert device["seconds_until_full"] == pytest.approx(device["iterations_until_full"], rel=0.01)
    assert (device["severity"], finding.severe) == ("high", True)
    assert "MB per iteration, full in 1,9" in finding.title
    assert LEAK in finding.events[0].name


def test_a_device_on_which_more_is_allocated_than_it_has_is_full_now(find):
    finding = find(Recording(20, reserved=8 * GB).leak(40 * MB), device_bytes=1 * GB)["memory_growth"]
    assert finding.evidence["devices"][0]["iterations_until_full"] == 0
    assert "full in 0 iterations" in finding.title


@pytest.mark.parametrize(
    ("left", "seconds", "severity", "words"),
    [
        (1000, 3, "high", "1,000 iterations, 50 minutes"),
        (10_000, 3, "medium", "10,000 iterations, 8 hours"),
        (100_000, 3, "low", "100,000 iterations, 3 days"),
        (0, 3, "high", "0 iterations, 0 s"),
    ],
)
def test_a_leak_is_as_severe_as_the_device_is_full_soon(left, seconds, severity, words):
    rows = [{"end_ns": number * seconds * 10**9} for number in range(4)]
    found = _leak_severity(rows, left)
    assert found["severity"] == severity
    assert _lasting(found | {"iterations_until_full": left}) == f"{words} at this rate"
    assert _leak_severity(rows, None)["severity"] is None


def test_blocks_taken_while_as_much_is_free_are_fragmentation(find):
    recording = Recording(6)
    for number in range(4):  # a tensor that fits no hole: three gigabytes are free when each is taken
        recording.block(1 * GB, number + 0.9)
        recording.tensor(1 * GB, number + 0.9, number + 0.95)
    (finding,) = find(recording, device_bytes=80 * GB).values()
    (device,) = finding.evidence["devices"]
    assert (finding.id, device["needlessly_reserved_bytes"]) == ("memory_fragmentation", 4 * GB)
    assert device["share_of_reserved"] == pytest.approx(4 / 9, rel=0.02)


def test_blocks_taken_anew_in_each_iteration_are_fragmentation_however_small(find):
    recording = Recording(6, persistent=20 * GB, temporary=30 * GB, reserved=50 * GB)
    for number in range(6):
        recording.block(512 * MIB, number + 0.9, active=2 * MIB)
        recording.tensor(2 * MIB, number + 0.9, None)
    found = find(recording, device_bytes=141 * GB)
    (device,) = found["memory_fragmentation"].evidence["devices"]
    assert device["needless_growth_bytes_per_iteration"] == 510 * MIB
    # What stays allocated is two mebibytes an iteration, no more.
    assert found["memory_growth"].evidence["devices"][0]["growth_bytes_per_iteration"] == 2 * MIB


def test_a_nearly_full_device_is_found_with_what_fills_it(find):
    full = Recording(4, persistent=40 * GB, temporary=35 * GB, reserved=76 * GB)
    (finding,) = find(full, device_bytes=80 * GB).values()
    assert (finding.id, finding.confidence) == ("memory_headroom", Confidence.high)
    assert finding.evidence["devices"][0]["left_share"] == pytest.approx(0.05)
    assert finding.events[0].start_ns == int(0.2 * S)
    assert any(TRAIN in event.name for event in finding.events)
    # What the allocator only caches leaves doubt.
    cached = find(Recording(4, reserved=76 * GB), device_bytes=80 * GB)["memory_headroom"]
    assert (cached.confidence, cached.severe) == (Confidence.medium, False)


def test_an_error_is_a_peak_on_any_device(find):
    found = find(Recording(3, reserved=5 * GB).error(9 * GB, 2.9))
    assert (list(found), found["memory_headroom"].severe) == (["memory_headroom"], True)
    assert found["memory_headroom"].events[0].name == f"out of memory at {TRAIN}"
    # While as much is free, it is fragmentation.
    found = find(Recording(3, reserved=5 * GB).error(1 * GB, 2.9))["memory_fragmentation"]  # three are free at the end
    assert (found.severe, found.evidence["devices"][0]["failed_request_bytes"]) == (True, GB)


@pytest.mark.parametrize("size", ["150109880320", None, "unknown"])
def test_a_trace_says_how_large_its_devices_are_if_it_can(write_trace, size):
    path = write_trace([kernel("k", 1, 1)], deviceProperties=[{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": size}, "junk"])
    info = kineto.read(path, rank=0, rank_source="file name").info
    assert info.device_bytes == ({0: 150_109_880_320} if size and size != "unknown" else {})
    assert info.devices == {0: "NVIDIA H200"}
