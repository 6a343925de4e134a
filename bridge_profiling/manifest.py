"""The manifest: one JSON file per profiled rank and window that says what was requested, what was captured, and why.

Ranks write it when the hook opens, when the window opens, when it closes and when the hook closes, each time true for that
moment, so a process that is killed leaves an accurate record. Analysis hosts read the same types. Standard library only.

Paths are relative to the output directory where they are inside it, times are nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bridge_profiling.common.atomic import write_json
from bridge_profiling.common.errors import TraceError
from bridge_profiling.common.regular_files import modified_ns, read_regular
from bridge_profiling.common.typed_json import read_typed

SCHEMA_VERSION = 1

#: The manifest of a thousand iterations has 40 kB.
_MAX_BYTES = 64 << 20

#: A rank is smaller: tables hold ranks as 32 bits.
_RANKS = 1 << 31

#: `complete`: the whole window. `partial`: some of it, or without what was requested. `failed`: nothing usable. `missed`: the
#: process never reached the window.
Status = Literal["complete", "partial", "failed", "missed"]


@dataclass(frozen=True)
class Window:
    """The iterations a profile covers: `start <= i < end`, 0-based and global, so a resume does not shift it."""

    start: int
    end: int

    def __contains__(self, iteration: int) -> bool:
        return self.start <= iteration < self.end

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    @property
    def last(self) -> int:
        """The last iteration inside the window."""
        return self.end - 1


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """Why a window was captured."""

    kind: str = "configured"  # `configured`, `repeat`, `request` or `slow_iteration`
    reason: str | None = None  # why, in words
    requested_at: str | None = None  # UTC, ISO 8601; None where the config requested it
    requested_by: str | None = None  # user and host
    request: str | None = None  # the request's name
    number: int | None = None  # which of the repeated windows, from 1


@dataclass(kw_only=True)
class Captured:
    """The iterations in the capture."""

    first: int | None = None
    last: int | None = None
    iterations: list[int]


@dataclass(kw_only=True)
class Artifact:
    """A file of the capture and its size when it was written."""

    path: str
    bytes: int = 0


@dataclass(kw_only=True)
class ProfilerRecord:
    """The outcome of one profiler: `torch`, `nsys` or `memory`."""

    name: str
    status: Status = "complete"
    reason: str | None = None
    artifacts: list[Artifact] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Job:
    """The launcher's job id, the attempt at this window, and the launcher's restart count."""

    id: str | None = None
    attempt: int = 0
    restarts: int | None = None


@dataclass(kw_only=True)
class Work:
    """What one iteration computes over all ranks, and the device it ran on; see `capture.IterationWork`."""

    model_flops: float | None = None
    tokens: int | None = None
    devices: int | None = None
    precision: str | None = None
    attention_flops: float | None = None
    device: str | None = None
    peak_tflops: float | None = None
    reason: str | None = None


@dataclass(kw_only=True)
class Durations:
    """The last iterations' numbers and durations, with model TFLOP/s per GPU and MFU where the work is known."""

    iteration: list[int] = field(default_factory=list)
    duration_ns: list[int] = field(default_factory=list)
    model_tflops_per_gpu: list[float] | None = None
    mfu: list[float] | None = None

    def __post_init__(self) -> None:
        if len(self.iteration) != len(self.duration_ns):
            raise ValueError(f"durations_ns has {len(self.iteration)} iterations and {len(self.duration_ns)} durations")


@dataclass(kw_only=True)
class GarbageCollection:
    """Python's collections in the window by generation, the youngest first, in all threads of the process."""

    collections: list[int] = field(default_factory=lambda: [0, 0, 0])
    duration_ns: list[int] = field(default_factory=lambda: [0, 0, 0])
    longest_ns: int = 0

    def add(self, generation: int, duration_ns: int) -> None:
        """Count a collection."""
        self.collections[generation] += 1
        self.duration_ns[generation] += duration_ns
        self.longest_ns = max(self.longest_ns, duration_ns)


@dataclass(kw_only=True)
class Clock:
    """Both clocks of the rank, read together."""

    unix_ns: int
    perf_counter_ns: int


@dataclass(kw_only=True)
class Manifest:
    """One rank's record of one window."""

    schema_version: int = SCHEMA_VERSION
    status: Status
    reason: str | None = None  # why the status is not `complete`
    final: bool = True  # the rank has written all that it will write; False while it runs, or where it was killed
    window: Window | None = None
    trigger: Trigger | None = None
    # [start, end] of the process's other windows; their iterations paid for a profiler, too.
    other_windows: list[list[int]] = field(default_factory=list)
    captured: Captured | None = None
    interrupted: list[int] = field(default_factory=list)  # iterations that an exception ended inside the window
    profilers: list[ProfilerRecord] = field(default_factory=list)
    rank: int
    world_size: int | None = None
    local_rank: int | None = None  # None where the launcher does not say
    # {dimension: [rank in it, its size]} for tp, cp, dp, pp and ep.
    coordinates: dict[str, list[int]] = field(default_factory=dict)
    host: str | None = None
    pid: int | None = None
    # The command line as typed, also where the rank has restarted itself under nsys.
    command: list[str] = field(default_factory=list)
    job: Job = field(default_factory=Job)
    config: dict[str, Any] = field(default_factory=dict)  # the `profiling` section
    versions: dict[str, str | None] = field(default_factory=dict)
    framework: dict[str, Any] | None = None  # what an integration reports about itself
    work: Work | None = None
    durations_ns: Durations = field(default_factory=Durations)
    garbage_collection: GarbageCollection | None = None  # None before the window, and in manifests of other writers
    clock: Clock | None = None  # missing in manifests of other writers

    @property
    def captured_iterations(self) -> list[int]:
        """Iterations in the capture, in order."""
        return self.captured.iterations if self.captured else []

    @property
    def artifacts(self) -> list[Artifact]:
        """Files of all profilers."""
        return [artifact for profiler in self.profilers for artifact in profiler.artifacts]


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write it; OSError if it cannot be written."""
    write_json(path, manifest)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest, skipping unknown keys; TraceError names the file, and the entry that is wrong."""
    try:
        content = json.loads(read_regular(path, _MAX_BYTES))
        version = content.get("schema_version") if isinstance(content, dict) else None
        if type(version) is int and version > SCHEMA_VERSION:
            raise TraceError(f"{path} is a manifest of a newer release: its schema version is {version}, not {SCHEMA_VERSION}")
        manifest = read_typed(content, Manifest, "manifest")
        if contradiction := next(_contradictions(manifest), None):
            raise ValueError(contradiction)
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not a manifest: {error}") from error
    return manifest


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """What no rank can have written, although its types are right."""
    window, durations, garbage = manifest.window, manifest.durations_ns, manifest.garbage_collection
    counts = {"rank": manifest.rank, "local_rank": manifest.local_rank, "job.attempt": manifest.job.attempt}
    yield from (f"{name} is {value}" for name, value in counts.items() if value is not None and not 0 <= value < _RANKS)
    if manifest.schema_version != SCHEMA_VERSION:
        yield f"schema_version is {manifest.schema_version}"
    if manifest.world_size is not None and not manifest.rank < manifest.world_size <= _RANKS:
        yield f"rank {manifest.rank} is not one of {manifest.world_size} ranks"
    if window is not None and not 0 <= window.start < window.end:
        yield f"window is {window}"
    if any(len(each) != 2 or each[0] > each[1] for each in manifest.other_windows):
        yield "other_windows are not pairs of a start and an end"
    for name, place in manifest.coordinates.items():
        if len(place) != 2 or not 0 <= place[0] < place[1] <= _RANKS:
            yield f"coordinates.{name} is {place}, not a rank and a size"
    timed = len(durations.iteration)
    if any(column is not None and len(column) != timed for column in (durations.mfu, durations.model_tflops_per_gpu)):
        yield f"durations_ns does not have {timed} values for {timed} iterations"
    if any(duration < 0 for duration in durations.duration_ns):
        yield "durations_ns has a negative duration"
    if garbage is not None and not len(garbage.collections) == len(garbage.duration_ns) == 3:
        yield "garbage_collection does not have three generations"
    for artifact in manifest.artifacts:
        if not artifact.path or "\0" in artifact.path:
            yield f"the path of an artifact is {artifact.path!r}"


@dataclass(frozen=True)
class RankCapture:
    """One rank's capture.

    Args:
        root: the output directory.
        folder: name of the attempt's folder, `iter-10-12`.
        manifest: the rank's manifest.
    """

    root: Path
    folder: str
    manifest: Manifest

    @property
    def path(self) -> Path:
        """The manifest's file."""
        return self.root / "manifest" / self.folder / f"rank-{self.rank}.json"

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.manifest.rank

    @property
    def captured(self) -> list[int]:
        """Iterations in the capture."""
        return self.manifest.captured_iterations

    @property
    def artifacts(self) -> list[Path]:
        """Files of the capture, traces first."""
        return [self.root / artifact.path for artifact in self.manifest.artifacts]

    @property
    def torch_trace(self) -> Path | None:
        """The Kineto trace, if there is one."""
        return next((path for path in self.artifacts if path.name.endswith(".pt.trace.json.gz")), None)

    def durations_by_iteration(self, *, profiled: bool) -> dict[int, int]:
        """Nanoseconds of each iteration inside the window, or of those outside it that no profiler slowed down.

        Neither side includes the iteration before the window (the profiler warms up in it), the one after it (it pays for the
        flush), the first of the run (it pays for lazy initialisation), and other windows of the same process.
        """
        durations, window = self.manifest.durations_ns, self.manifest.window
        timed = dict(zip(durations.iteration, durations.duration_ns, strict=True))
        inside = set(self.captured)
        if profiled:
            return {iteration: duration for iteration, duration in timed.items() if iteration in inside}
        if not timed or window is None:
            return {}
        slowed = inside | {durations.iteration[0], window.start - 1, window.end}
        # Windows may have any length, and only the iterations that were timed matter.
        left, others = sorted(timed.keys() - slowed), sorted(self.manifest.other_windows)
        slowed_until, place = -1, 0
        for iteration in left:
            while place < len(others) and others[place][0] - 1 <= iteration:
                slowed_until = max(slowed_until, others[place][1])
                place += 1
            if iteration <= slowed_until:
                slowed.add(iteration)
        return {iteration: duration for iteration, duration in timed.items() if iteration not in slowed}

    def durations_ns(self, *, profiled: bool) -> list[int]:
        """Durations of the iterations inside the window, or of those outside it that no profiler slowed down."""
        return list(self.durations_by_iteration(profiled=profiled).values())

    def mfu(self, *, profiled: bool) -> list[float]:
        """MFU of the same iterations, shares of the device's peak; empty where the manifest has none."""
        durations = self.manifest.durations_ns
        shares = dict(zip(durations.iteration, durations.mfu or (), strict=False))
        return [shares[iteration] for iteration in self.durations_by_iteration(profiled=profiled) if iteration in shares]


def find_captures(root: Path, folder: str | None = None) -> list[RankCapture]:
    """Every rank's capture under an output directory.

    Args:
        root: the output directory.
        folder: an attempt's folder; None takes the newest, of those that captured something where one did.

    Raises:
        TraceError: no manifest was found, or one cannot be read.
    """
    manifests = sorted((root / "manifest").glob(f"{folder or '*'}/rank-*.json"))
    if not manifests:
        raise TraceError(f"{root} holds no manifest: nothing was profiled into it")
    captures = [RankCapture(root, path.parent.name, read_manifest(path)) for path in manifests]
    if folder is None:
        # A restart past the window also writes a manifest; it says that it missed what an earlier attempt captured.
        times = {capture.folder: modified_ns(path) for capture, path in zip(captures, manifests, strict=True)}
        wrote = {capture.folder for capture in captures if capture.artifacts}
        folder = max(wrote or times, key=lambda name: times[name])
    return sorted((capture for capture in captures if capture.folder == folder), key=lambda capture: capture.rank)


def amend_manifest(path: Path, profiler: str, *, artifacts: Sequence[Path], reason: str | None) -> None:
    """Correct a manifest's record of one profiler after the rank's process has ended and can no longer write it.

    `artifacts` are files that the profiler wrote after all; without any its status is `failed`, unless the window was never
    reached. A `reason` of None keeps the status.
    """
    manifest = read_manifest(path)
    for record in manifest.profilers:
        if record.name != profiler or (record.status == "missed" and not artifacts):
            continue
        record.artifacts = list_artifacts(artifacts, path.parents[2])
        if not artifacts or reason is not None:
            record.status = "partial" if artifacts else "failed"
            record.reason = reason
    manifest.status = combined_status({record.status for record in manifest.profilers})
    manifest.reason = next((record.reason for record in manifest.profilers if record.reason), None)
    write_manifest(path, manifest)


def combined_status(statuses: set[Status]) -> Status:
    """The status of several profilers together: the one they share, else `partial` if any captured something."""
    if len(statuses) == 1:
        return next(iter(statuses))
    return "partial" if statuses & {"complete", "partial"} else "failed"


def list_artifacts(paths: Sequence[Path], root: Path) -> list[Artifact]:
    """Files with their sizes, relative to the output directory where they are inside it."""
    return [
        Artifact(path=str(path.relative_to(root) if path.is_relative_to(root) else path), bytes=path.stat().st_size)
        for path in paths
    ]
