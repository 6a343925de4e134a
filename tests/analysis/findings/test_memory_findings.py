"""Memory that grows, that fragments, that runs out; and memory that does what memory does."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Confidence, Finding
from bridge_profiling.analysis.findings.memory import memory_fragmentation, memory_growth, memory_headroom
from bridge_profiling.traces import cache
from bridge_profiling.traces.kineto import tables as kineto
from bridge_profiling.traces.nsys import tables as nsys
from bridge_profiling.traces.types import RankInfo, RankTables
from tests.analysis.findings.simulated_jobs import Here, found_by
from tests.analysis.ranks_in_hand import table

MIB = 1 << 20
MB, GB = 10**6, 10**9
S = 10**9

TRAIN = "train_step /home/me/train.py:40"
LEAK = "log_loss /home/me/train.py:77"


class Recording:
    """What the allocator of one device did in iterations of a second: blocks it took, tensors it gave them to."""

    def __init__(self, iterations: int, *, rank: int = 0) -> None:
        self.rank, self.count = rank, iterations
        self.allocations: list[dict[str, Any]] = []
        self.segments: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []

    def tensor(self, size: int, begin: float, end: float | None, stack: str = TRAIN) -> None:
        """A tensor from one second to another; None for ever."""
        gone = None if end is None else int(end * S)
        row = {"device": 0, "bytes": size, "allocated_ns": int(begin * S), "free_requested_ns": gone, "freed_ns": gone}
        self.allocations.append(row | {"stack": stack})

    def block(self, size: int, begin: float, active: int = 0) -> None:
        """Memory that the allocator takes of the device, and how much of it is in use at the end."""
        row = {"device": 0, "bytes": size, "allocated_ns": int(begin * S), "active_bytes": active}
        self.segments.append(row | {"largest_free_bytes": size - active})

    def error(self, size: int, at: float) -> None:
        """A request that fails."""
        self.errors.append({"device": 0, "time_ns": int(at * S), "requested_bytes": size, "free_bytes": 0, "stack": TRAIN})

    def steady(self, *, persistent: int = 2 * GB, temporary: int = 3 * GB, reserved: int = 5 * GB + 64 * MIB) -> Recording:
        """Weights, and activations that come and go in each iteration."""
        self.block(reserved, 0.05, active=persistent)
        self.tensor(persistent, 0.1, None)
        for number in range(self.count):
            self.tensor(temporary, number + 0.2, number + 0.8)
        return self

    def write(self, folder: Path, *, device_bytes: int | None = None) -> Path:
        """As the cache keeps a snapshot, and a trace that knows how large the device is."""
        iterations = [
            {"iteration": number, "start_ns": number * S, "end_ns": (number + 1) * S - 1, "boundary": False}
            for number in range(self.count)
        ]
        tables = {"allocations": self.allocations, "segments": self.segments, "iterations": iterations}
        if self.errors:
            tables["out_of_memory"] = self.errors
        self._write(folder, "memory", tables)
        if device_bytes is not None:
            kernel = {"kind": "compute", "name": "k", "start_ns": 0, "end_ns": 10, "iteration": 0}
            self._write(folder, "kineto", {"device_events": [kernel]}, device_bytes={0: device_bytes})
        return folder

    def _write(self, folder: Path, source: Any, rows: dict[str, list[dict[str, Any]]], **info: Any) -> None:
        tables = {}
        for name, each in rows.items():
            made = table(name, each)
            ranks = pa.repeat(pa.scalar(self.rank, pa.int32()), made.num_rows)
            tables[name] = made.set_column(made.column_names.index("rank"), "rank", ranks)
        known = RankInfo(rank=self.rank, rank_source="trace", source=source, files=[f"{source}-{self.rank}"], **info)
        cache.write(RankTables(known, tables), folder / f"{source}{self.rank:05d}")


Find = Callable[..., dict[str, Finding]]

_MEMORY = (memory_headroom, memory_fragmentation, memory_growth)


@pytest.fixture
def find(tmp_path: Path, run_of: Callable[..., Run]) -> Find:
    """Findings about memory, by id."""

    def found(*recordings: Recording, **how: Any) -> dict[str, Finding]:
        for recording in recordings:
            recording.write(tmp_path, **how)
        return {finding.id: finding for finding in found_by(run_of(tmp_path, engine=Here()), *_MEMORY)}

    return found


def test_memory_that_comes_and_goes_is_no_finding(find: Find) -> None:
    assert find(Recording(6).steady(), device_bytes=80 * GB) == {}


def test_growth_is_told_with_the_line_that_keeps_it(find: Find) -> None:
    recording = Recording(6).steady(reserved=8 * GB)
    for number in range(6):
        recording.tensor(40 * MB, number + 0.3, None, LEAK)
    found = find(recording, device_bytes=80 * GB)
    assert list(found) == ["memory_growth"]
    finding = found["memory_growth"]
    assert finding.ranks == [0]
    (device,) = finding.evidence["devices"]
    assert device["growth_bytes_per_iteration"] == 40 * MB
    assert device["iterations_until_full"] == pytest.approx((80 * GB - 2 * GB) / (40 * MB), rel=0.01)
    assert LEAK in finding.events[0].name
    assert finding.confidence is Confidence.high
    assert finding.recoverable_us_per_iteration is None


def test_growth_below_a_megabyte_is_none(find: Find) -> None:
    recording = Recording(6).steady()
    for number in range(6):
        recording.tensor(900_000, number + 0.3, None, LEAK)
    assert find(recording) == {}


@pytest.mark.parametrize("iterations", [2, 3, 6])
def test_setting_up_in_the_first_iteration_is_no_growth(find: Find, iterations: int) -> None:
    recording = Recording(iterations).steady(reserved=7 * GB)
    recording.tensor(1 * GB, 0.9, None)
    recording.tensor(500 * MB, 1.3, None)  # as optimizer states are, after the first step
    assert find(recording) == {}


def test_growth_in_three_iterations_leaves_doubt(find: Find) -> None:
    recording = Recording(3).steady(reserved=8 * GB)
    for number in range(3):
        recording.tensor(40 * MB, number + 0.3, None, LEAK)
    assert find(recording)["memory_growth"].confidence is Confidence.medium


def test_blocks_taken_while_as_much_is_free_are_fragmentation(find: Find) -> None:
    recording = Recording(6).steady(reserved=5 * GB + 64 * MIB)
    for number in range(4):  # a tensor that fits no hole: three gigabytes are free when each is taken
        recording.block(1 * GB, number + 0.9, active=0)
        recording.tensor(1 * GB, number + 0.9, number + 0.95)
    found = find(recording, device_bytes=80 * GB)
    assert list(found) == ["memory_fragmentation"]
    (device,) = found["memory_fragmentation"].evidence["devices"]
    assert device["needlessly_reserved_bytes"] == 4 * GB
    assert device["share_of_reserved"] == pytest.approx(4 / 9, rel=0.02)
    assert "expandable_segments:True" in found["memory_fragmentation"].action


def test_blocks_taken_anew_in_each_iteration_are_fragmentation_however_small(find: Find) -> None:
    recording = Recording(6).steady(persistent=20 * GB, temporary=30 * GB, reserved=50 * GB)
    for number in range(6):
        recording.block(512 * MIB, number + 0.9, active=2 * MIB)
        recording.tensor(2 * MIB, number + 0.9, None)
    found = find(recording, device_bytes=141 * GB)
    finding = found["memory_fragmentation"]
    assert finding.evidence["devices"][0]["needless_growth_bytes_per_iteration"] == 510 * MIB
    assert finding.evidence["devices"][0]["inactive_split_bytes"] > 6 * 500 * MIB
    # What stays allocated is two mebibytes an iteration, no more.
    assert found["memory_growth"].evidence["devices"][0]["growth_bytes_per_iteration"] == 2 * MIB


def test_a_leak_that_takes_new_blocks_is_no_fragmentation(find: Find) -> None:
    recording = Recording(6).steady()
    for number in range(6):
        recording.block(128 * MIB, number + 0.3, active=128 * MIB)
        recording.tensor(128 * MIB, number + 0.3, None, LEAK)
    assert list(find(recording)) == ["memory_growth"]


def test_the_allocators_rounding_is_no_fragmentation(find: Find) -> None:
    recording = Recording(4)
    for place in range(4):
        recording.block(20 * MIB, 0.1 + place / 100, active=11 * MIB)
        recording.tensor(11 * MIB, 0.1 + place / 100, None)
    assert find(recording) == {}


def test_a_nearly_full_device_is_told_with_what_fills_it(find: Find) -> None:
    found = find(Recording(4).steady(persistent=40 * GB, temporary=35 * GB, reserved=76 * GB), device_bytes=80 * GB)
    assert list(found) == ["memory_headroom"]
    finding = found["memory_headroom"]
    assert finding.evidence["devices"][0]["left_share"] == pytest.approx(0.05)
    assert finding.confidence is Confidence.high
    assert finding.events[0].start_ns == int(0.2 * S)
    assert any(TRAIN in event.name for event in finding.events)
    assert "recompute_granularity" in finding.action


def test_a_device_full_of_what_the_allocator_caches_leaves_doubt(find: Find) -> None:
    finding = find(Recording(4).steady(reserved=76 * GB), device_bytes=80 * GB)["memory_headroom"]
    assert finding.confidence is Confidence.medium
    assert not finding.severe


def test_a_device_of_unknown_size_is_not_called_full(find: Find) -> None:
    assert find(Recording(4).steady(persistent=40 * GB, temporary=35 * GB, reserved=76 * GB)) == {}


def test_an_error_is_a_peak_on_any_device(find: Find) -> None:
    recording = Recording(3).steady(reserved=5 * GB)
    recording.error(9 * GB, 2.9)
    found = find(recording)
    assert list(found) == ["memory_headroom"]
    assert found["memory_headroom"].severe
    assert found["memory_headroom"].events[0].name == f"out of memory at {TRAIN}"


def test_a_request_that_fails_beside_as_much_free_memory_is_fragmentation(find: Find) -> None:
    recording = Recording(3).steady(reserved=5 * GB)
    recording.error(1 * GB, 2.9)  # three are free at the end
    found = find(recording)
    assert found["memory_fragmentation"].severe
    assert found["memory_fragmentation"].evidence["devices"][0]["failed_request_bytes"] == GB


def test_ranks_are_named_once_all_together(find: Find) -> None:
    recordings = []
    for rank in range(3):
        recordings.append(Recording(6, rank=rank).steady(reserved=8 * GB))
        for number in range(6):
            if rank != 1:
                recordings[-1].tensor((rank + 1) * 10 * MB, number + 0.3, None, LEAK)
    found = find(*recordings)
    assert found["memory_growth"].ranks == [0, 2]
    assert found["memory_growth"].evidence["devices"][0]["rank"] == 2


@pytest.mark.parametrize("size", [150_109_880_320, "150109880320", None, "unknown"])
def test_a_trace_tells_how_large_its_devices_are_if_it_can(write_trace: Any, size: Any) -> None:
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": "k",
        "ts": 1,
        "dur": 1,
        "pid": 0,
        "tid": 7,
        "args": {"device": 0, "stream": 7},
    }
    path = write_trace([kernel], deviceProperties=[{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": size}, "junk"])
    info = kineto.read(path, rank=0, rank_source="file name").info
    assert info.device_bytes == ({0: 150_109_880_320} if size and size != "unknown" else {})
    assert info.devices == {0: "NVIDIA H200"}


def test_an_nsys_report_tells_it_too(captures: Path, tmp_path: Path) -> None:
    packed = captures / "nsys/tp2_dp2/rank2.sqlite.xz"
    path = tmp_path / "rank2.sqlite"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    assert nsys.read(path, rank=2, rank_source="file name").info.device_bytes == {2: 150_109_880_320}


def test_a_real_recording_of_a_clean_run_has_no_finding(captures: Path, run_of: Callable[..., Run]) -> None:
    assert found_by(run_of(captures / "memory/tp2_dp2"), *_MEMORY) == []
