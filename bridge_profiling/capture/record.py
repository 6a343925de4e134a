"""Builds the manifest: the request to a rank, its capture, and the reason for any difference. Failed captures have one too.

It is written when the hook opens, when the window opens, when it closes and when the hook closes, and is true each time: a
process that is killed leaves a manifest that says so.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from bridge_profiling.atomic import write_json
from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.capture.profiler import Profiler, combined_status
from bridge_profiling.capture.work import IterationWork, device_of_this_process, model_tflops_per_gpu, utilizations
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout

SCHEMA_VERSION = 1

_PACKAGES = ("bridge-profiling", "torch", "megatron-core", "nemo_run", "nvtx", "transformer-engine")


@dataclass
class CaptureRecord:
    """Everything that one rank's manifest says about a window.

    Args:
        config: the settings.
        files: names of the rank's files.
        layout: the job's parallel layout.
        profilers: the profilers with their outcomes.
        work: the computation of one iteration, where the training loop states it.
        facts: what the framework reports about itself.
        trigger: the origin of the window.
        captured: iterations in the capture, in order.
        interrupted: iterations that an exception ended inside the window.
        reason: why the whole is not `complete`, when no single profiler is the cause.
        other_windows: `[start, end]` of the other windows of this process, whose iterations paid for a profiler too.
    """

    config: ProfilingConfig
    files: CaptureFiles
    layout: ParallelLayout
    profilers: list[Profiler]
    work: IterationWork | None
    facts: dict[str, object]
    trigger: dict[str, object]
    captured: list[int] = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)
    reason: str | None = None
    other_windows: list[list[int]] = field(default_factory=list)

    def write(self, durations: Iterable[tuple[int, int]]) -> None:
        """Write the manifest.

        Args:
            durations: `(iteration, nanoseconds)` of the last iterations.

        Raises:
            OSError: it cannot be written.
        """
        write_json(self.files.manifest, self.as_json(list(durations)))

    def as_json(self, durations: Sequence[tuple[int, int]]) -> dict[str, object]:
        """The manifest's content. Paths are relative to the output directory, times in nanoseconds."""
        window, rank, env = self.files.window, self.files.rank, LaunchEnv.read()
        status = combined_status({profiler.status for profiler in self.profilers})
        return {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "reason": self.reason or next((profiler.reason for profiler in self.profilers if profiler.reason), None),
            "window": {"start": window.start, "end": window.end},
            "trigger": self.trigger,
            "other_windows": self.other_windows,
            "captured": {"first": self.captured[0], "last": self.captured[-1], "iterations": self.captured}
            if self.captured and status in ("complete", "partial")
            else None,
            "interrupted": self.interrupted,
            "profilers": [self._outcome(profiler) for profiler in self.profilers],
            "rank": rank,
            "world_size": self.layout.world_size,
            "local_rank": env.local_rank,
            "coordinates": {name: list(place) for name, place in self.layout.coordinates(rank).items()},
            "host": socket.gethostname(),
            "pid": os.getpid(),
            # As it was typed, also when the rank has started itself again under nsys.
            "command": [sys.executable, *sys.orig_argv[1:]],
            "job": {"id": env.job_id, "attempt": self.files.attempt, "restarts": env.restarts},
            "config": asdict(self.config),
            "versions": _versions(),
            "framework": self.facts or None,
            **self._throughput(durations),
            "clock": {"unix_ns": time.time_ns(), "perf_counter_ns": time.perf_counter_ns()},
        }

    def _throughput(self, durations: Sequence[tuple[int, int]]) -> dict[str, object]:
        """The computation of an iteration, the duration of each, and the share of the device's peak that it reached."""
        taken = [duration for _, duration in durations]
        work, reached, utilization = None, None, None
        if self.work is not None:
            device = device_of_this_process(self.work.precision, self.config.peak_tflops)
            reached = model_tflops_per_gpu(self.work, taken)
            utilization = utilizations(reached, device)
            work = asdict(self.work) | {
                "device": device.name,
                "peak_tflops": device.peak_tflops,
                "reason": device.reason,
            }
        return {
            "work": work,
            "durations_ns": {
                "iteration": [iteration for iteration, _ in durations],
                "duration_ns": taken,
                "model_tflops_per_gpu": reached,
                "mfu": utilization,
            },
        }

    def _outcome(self, profiler: Profiler) -> dict[str, object]:
        written = [path for path in profiler.artifacts if path.exists()]
        return {
            "name": profiler.name,
            "status": profiler.status,
            "reason": profiler.reason,
            "artifacts": _artifacts(written, self.files.root),
            "notes": profiler.notes,
        }


def amend_manifest(path: Path, profiler: str, *, artifacts: Sequence[Path], reason: str | None) -> None:
    """Correct the outcome of one profiler in a manifest whose process has ended.

    Args:
        path: the manifest.
        profiler: the profiler's name.
        artifacts: the files it has written; without any it `failed`, unless the training never reached its window.
        reason: why it is not `complete`; None leaves its status as it is.

    Raises:
        OSError: it cannot be read or written.
        ValueError: it holds no JSON.
    """
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for outcome in manifest["profilers"]:
        if outcome["name"] != profiler or (outcome["status"] == "missed" and not artifacts):
            continue
        outcome["artifacts"] = _artifacts(artifacts, path.parents[2])
        if not artifacts or reason is not None:
            outcome["status"] = "partial" if artifacts else "failed"
            outcome["reason"] = reason
    manifest["status"] = combined_status({outcome["status"] for outcome in manifest["profilers"]})
    manifest["reason"] = next((one["reason"] for one in manifest["profilers"] if one["reason"]), None)
    write_json(path, manifest)


def _artifacts(paths: Sequence[Path], root: Path) -> list[dict[str, object]]:
    return [{"path": _relative(path, root), "bytes": path.stat().st_size} for path in paths]


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


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
