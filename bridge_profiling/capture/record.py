"""Builds the manifest of one capture.

It is written when the hook opens, when the window opens, when it closes and when the hook closes, and is true each time: a
process that is killed leaves a manifest that says so.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata

from bridge_profiling import manifest
from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.capture.profiler import Profiler
from bridge_profiling.capture.work import IterationWork, device_of_this_process, model_tflops_per_gpu, utilizations
from bridge_profiling.config import ProfilingConfig, Window
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout

_PACKAGES = ("bridge-profiling", "torch", "megatron-core", "nemo_run", "nvtx", "transformer-engine")


@dataclass(frozen=True)
class Rank:
    """The part of a record that is the same for every window of a rank.

    Attributes:
        number: global rank.
        layout: the job's parallel layout.
        work: the computation of one iteration, where the training loop states it.
        facts: what a framework reports about itself.
        durations: returns a copy of `(iteration, nanoseconds)` of the last iterations.
        windows: returns the windows that this process has recorded so far.
    """

    number: int
    layout: ParallelLayout
    work: IterationWork | None
    facts: dict[str, object]
    durations: Callable[[], Iterable[tuple[int, int]]]
    windows: Callable[[], list[Window]]


@dataclass
class CaptureRecord:
    """One rank's capture of one window, as its manifest reports it.

    Attributes:
        config: the request.
        files: names of the capture's files.
        rank: the rank.
        profilers: the profilers and their outcomes.
        trigger: why the window was captured.
        captured: iterations in the capture, in order.
        interrupted: iterations that an exception ended inside the window.
        reason: why the capture is not `complete`, when no single profiler is the cause.
        durations: `(iteration, nanoseconds)` of the window: in a long run the rank keeps only those of later iterations.
    """

    config: ProfilingConfig
    files: CaptureFiles
    rank: Rank
    profilers: list[Profiler]
    trigger: manifest.Trigger
    captured: list[int] = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)
    reason: str | None = None
    durations: list[tuple[int, int]] = field(default_factory=list)

    def write(self) -> None:
        """Write the manifest.

        Raises:
            OSError: it cannot be written.
        """
        manifest.write_manifest(self.files.manifest, self.build())

    def build(self) -> manifest.Manifest:
        """The manifest, true for this moment."""
        env, window, rank = LaunchEnv.read(), self.files.window, self.rank
        status = manifest.combined_status({profiler.status for profiler in self.profilers})
        records = [
            manifest.ProfilerRecord(
                name=profiler.name,
                status=profiler.status,
                reason=profiler.reason,
                artifacts=manifest.list_artifacts([path for path in profiler.artifacts if path.exists()], self.files.root),
                notes=profiler.notes,
            )
            for profiler in self.profilers
        ]
        recent = list(rank.durations())
        kept = {iteration for iteration, _ in recent}
        timed = [*(one for one in self.durations if one[0] not in kept), *recent]
        work, throughput = self._throughput(
            manifest.Durations(iteration=[iteration for iteration, _ in timed], duration_ns=[duration for _, duration in timed])
        )
        captured = None
        if self.captured and status in ("complete", "partial"):
            captured = manifest.Captured(first=self.captured[0], last=self.captured[-1], iterations=self.captured)
        return manifest.Manifest(
            status=status,
            reason=self.reason or next((record.reason for record in records if record.reason), None),
            window=manifest.RequestedWindow(start=window.start, end=window.end),
            trigger=self.trigger,
            other_windows=[[one.start, one.end] for one in rank.windows() if one != window],
            captured=captured,
            interrupted=self.interrupted,
            profilers=records,
            rank=rank.number,
            world_size=rank.layout.world_size,
            local_rank=env.local_rank,
            coordinates={name: list(place) for name, place in rank.layout.coordinates(rank.number).items()},
            host=socket.gethostname(),
            pid=os.getpid(),
            command=[sys.executable, *sys.orig_argv[1:]],
            job=manifest.Job(id=env.job_id, attempt=self.files.attempt, restarts=env.restarts),
            config=asdict(self.config),
            versions=_versions(),
            framework=rank.facts or None,
            work=work,
            durations_ns=throughput,
            clock=manifest.Clock(unix_ns=time.time_ns(), perf_counter_ns=time.perf_counter_ns()),
        )

    def _throughput(self, durations: manifest.Durations) -> tuple[manifest.Work | None, manifest.Durations]:
        """The computation of an iteration, and the durations with the share of the device's peak that they reached."""
        work = self.rank.work
        if work is None:
            return None, durations
        device = device_of_this_process(work.precision, self.config.peak_tflops)
        durations.model_tflops_per_gpu = model_tflops_per_gpu(work, durations.duration_ns)
        durations.mfu = utilizations(durations.model_tflops_per_gpu, device)
        reported = manifest.Work(**asdict(work), device=device.name, peak_tflops=device.peak_tflops, reason=device.reason)
        return reported, durations


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        # The package's metadata leaves the build out: 2.11.0, not 2.11.0+cu130.
        found["torch"] = str(torch.__version__)
        found["cuda"] = torch.version.cuda
    return found
