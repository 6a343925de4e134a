"""What a rank knows about one of its captures, and the manifest that it writes from it."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata

from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.capture.profilers import Profilers
from bridge_profiling.capture.work import IterationWork, device_of_this_process, model_tflops_per_gpu, utilizations
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.manifest import (
    Captured,
    Clock,
    Durations,
    Job,
    Manifest,
    ProfilerRecord,
    RequestedWindow,
    Trigger,
    Work,
    list_artifacts,
    write_manifest,
)

_PACKAGES = ("bridge-profiling", "torch", "megatron-core", "nemo_run", "nvtx", "transformer-engine")


@dataclass
class CaptureRecord:
    """One rank's capture of one window, as its manifest reports it.

    Attributes:
        config: the request.
        files: names of the capture's files.
        rank: global rank.
        layout: the job's parallel layout.
        profilers: the profilers and their outcomes.
        work: what one iteration computes, where the training loop says so.
        captured: iterations in the capture, in order.
        interrupted: iterations that an exception ended inside the window.
        reason: why the capture is not `complete`, when no single profiler is the cause.
        facts: what a framework reports about itself.
        trigger: why the window was captured.
        other_windows: [start, end] of the process's other windows.
    """

    config: ProfilingConfig
    files: CaptureFiles
    rank: int
    layout: ParallelLayout
    profilers: Profilers
    work: IterationWork | None = None
    captured: list[int] = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)
    reason: str | None = None
    facts: dict[str, object] = field(default_factory=dict)
    trigger: Trigger | None = None
    other_windows: list[list[int]] = field(default_factory=list)

    def write(self, durations: Iterable[tuple[int, int]]) -> None:
        """Write the manifest.

        Args:
            durations: `(iteration, nanoseconds)` of the last iterations.

        Raises:
            OSError: it cannot be written.
        """
        write_manifest(self.files.manifest, self.build(durations))

    def build(self, durations: Iterable[tuple[int, int]]) -> Manifest:
        """The manifest, true for this moment."""
        env, window, status = LaunchEnv.read(), self.files.window, self.profilers.status
        records = [
            ProfilerRecord(
                name=outcome.backend.name,
                status=outcome.status,
                reason=outcome.reason,
                artifacts=list_artifacts([path for path in outcome.backend.artifacts if path.exists()], self.files.root),
                notes=outcome.backend.notes,
            )
            for outcome in self.profilers.outcomes
        ]
        timed = list(durations)
        work, throughput = self._throughput(
            Durations(iteration=[iteration for iteration, _ in timed], duration_ns=[duration for _, duration in timed])
        )
        captured = Captured(first=self.captured[0], last=self.captured[-1], iterations=self.captured) if self.captured else None
        return Manifest(
            status=status,
            reason=self.reason or next((record.reason for record in records if record.reason), None),
            window=RequestedWindow(start=window.start, end=window.end),
            trigger=self.trigger,
            other_windows=self.other_windows,
            captured=captured if status in ("complete", "partial") else None,
            interrupted=self.interrupted,
            profilers=records,
            rank=self.rank,
            world_size=self.layout.world_size,
            local_rank=env.local_rank,
            coordinates={name: list(place) for name, place in self.layout.coordinates(self.rank).items()},
            host=socket.gethostname(),
            pid=os.getpid(),
            command=[sys.executable, *sys.orig_argv[1:]],
            job=Job(id=env.job_id, attempt=self.files.attempt, restarts=env.restarts),
            config=asdict(self.config),
            versions=_versions(),
            framework=self.facts or None,
            work=work,
            durations_ns=throughput,
            clock=Clock(unix_ns=time.time_ns(), perf_counter_ns=time.perf_counter_ns()),
        )

    def _throughput(self, durations: Durations) -> tuple[Work | None, Durations]:
        """What an iteration computes, and the durations with the share of the device's peak that they reached."""
        if self.work is None:
            return None, durations
        device = device_of_this_process(self.work.precision, self.config.peak_tflops)
        durations.model_tflops_per_gpu = model_tflops_per_gpu(self.work, durations.duration_ns)
        durations.mfu = utilizations(durations.model_tflops_per_gpu, device)
        work = Work(**asdict(self.work), device=device.name, peak_tflops=device.peak_tflops, reason=device.reason)
        return work, durations


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        # The installed version's metadata leaves the build out: 2.11.0, not 2.11.0+cu130.
        found["torch"] = str(torch.__version__)
        found["cuda"] = torch.version.cuda
    return found
