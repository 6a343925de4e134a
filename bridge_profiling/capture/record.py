"""Builds the manifest of one capture, with the share of the device's peak that each iteration reached (MFU).

It is written when the hook opens, when the window opens, when it closes and when the hook closes, and is true each time: a
process that is killed leaves a manifest that says so. Nothing here runs in an iteration.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata

from bridge_profiling import manifest
from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.capture.profiler import Profiler
from bridge_profiling.config import ProfilingConfig, Window
from bridge_profiling.errors import require
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.peaks import Precision, peaks
from bridge_profiling.plain import plain
from bridge_profiling.redaction import redact_command, redact_urls, redact_values

_PACKAGES = ("bridge-profiling", "torch", "megatron-core", "nemo_run", "nvtx", "transformer-engine")

_STATE_IT = "type profiling.peak_tflops=… to state it"


@dataclass(frozen=True, kw_only=True)
class IterationWork:
    """The computation of one iteration, over all ranks together.

    Attributes:
        model_flops: floating-point operations of the model, forward and backward: two for each multiplication and addition in
            its matrix products, with attention scores and without recomputation (PaLM's definition).
        tokens: tokens trained on.
        devices: number of devices that share the work, over all data-parallel, tensor-parallel and pipeline ranks.
        precision: the precision of most of these products; it decides which peak of the device they are compared with.
        attention_flops: the part of `model_flops` in the attention scores, counted over the whole square of positions. With it
            a reader can count them by half, as Megatron-LM does. None where it is unknown.

    Raises:
        ProfilingConfigError: a count is not positive.
    """

    model_flops: float
    tokens: int
    devices: int
    precision: Precision
    attention_flops: float | None = None

    def __post_init__(self) -> None:
        require(
            self.model_flops > 0 and self.tokens > 0 and self.devices > 0,
            f"IterationWork has {self.model_flops} FLOPs, {self.tokens} tokens and {self.devices} devices",
            why="each must be positive",
            instead="Describe one iteration of the whole job, or pass no work at all",
        )


@dataclass(frozen=True)
class Rank:
    """One rank of a training, as its records and its listener need it.

    `durations` returns `(iteration, nanoseconds)` of the last iterations, `iteration` the one that began last, `windows` those
    recorded so far. Any thread may call them.
    """

    number: int
    layout: ParallelLayout
    work: IterationWork | None
    train_iters: int | None
    facts: dict[str, object]
    durations: Callable[[], list[tuple[int, int]]]
    iteration: Callable[[], int | None]
    windows: Callable[[], list[Window]]


@dataclass(frozen=True)
class WindowPlan:
    """A window to capture: its settings, its origin, and the number of its folder if that is agreed already."""

    config: ProfilingConfig
    trigger: manifest.Trigger
    attempt: int | None = None


@dataclass
class CaptureRecord:
    """One rank's capture of one window, as its manifest reports it.

    `durations` are `(iteration, nanoseconds)` of the window: in a long run the rank keeps only those of later iterations.
    """

    plan: WindowPlan
    files: CaptureFiles
    rank: Rank
    profilers: list[Profiler]
    captured: list[int] = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)
    reason: str | None = None
    final: bool = False
    durations: list[tuple[int, int]] = field(default_factory=list)
    garbage_collection: manifest.GarbageCollection | None = None

    def build(self) -> manifest.Manifest:
        """The manifest, true for this moment."""
        env, window, rank = LaunchEnv.read(), self.files.window, self.rank
        status = manifest.combined_status({profiler.status for profiler in self.profilers})
        records = [
            manifest.ProfilerRecord(
                name=profiler.name,
                status=profiler.status,
                reason=profiler.reason and redact_urls(profiler.reason),
                artifacts=manifest.list_artifacts([path for path in profiler.artifacts if path.exists()], self.files.root),
                notes=profiler.notes,
            )
            for profiler in self.profilers
        ]
        recent = rank.durations()
        kept = {iteration for iteration, _ in recent}
        timed = [*(one for one in self.durations if one[0] not in kept), *recent]
        iterations, nanoseconds = [iteration for iteration, _ in timed], [duration for _, duration in timed]
        durations = manifest.Durations(iteration=iterations, duration_ns=nanoseconds)
        work = None
        if rank.work is not None:
            work = describe_work(rank.work, self.plan.config.peak_tflops)
            durations.model_tflops_per_gpu, durations.mfu = throughput(rank.work, work.peak_tflops, nanoseconds)
        captured = None
        if self.captured and status in ("complete", "partial"):
            captured = manifest.Captured(first=self.captured[0], last=self.captured[-1], iterations=self.captured)
        reason = redact_urls(self.reason) if self.reason else None
        return manifest.Manifest(
            status=status,
            reason=reason or next((record.reason for record in records if record.reason), None),
            final=self.final,
            window=window,
            trigger=self.plan.trigger,
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
            command=redact_command([sys.executable, *sys.orig_argv[1:]]),
            job=manifest.Job(id=env.job_id, attempt=self.files.attempt, restarts=env.restarts),
            config=redact_values(plain(vars(self.plan.config))),
            versions=_versions(),
            framework=redact_values(plain(rank.facts)) or None,
            work=work,
            durations_ns=durations,
            garbage_collection=self.garbage_collection,
            clock=manifest.Clock(unix_ns=time.time_ns(), perf_counter_ns=time.perf_counter_ns()),
        )


def _versions() -> dict[str, str | None]:
    found = dict(_installed())
    torch = sys.modules.get("torch")
    if torch is not None:
        # The package's metadata leaves the build out: 2.11.0, not 2.11.0+cu130.
        found["torch"] = str(torch.__version__)
        found["cuda"] = torch.version.cuda
    return found


@cache
def _installed() -> dict[str, str | None]:
    """Read once: at the end of a window the process may have no file descriptor left."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def describe_work(work: IterationWork, stated_peak_tflops: float | None) -> manifest.Work:
    """The manifest's record of the work and the device; a peak that the user states wins over the table.

    Initializes no device: that may be wrong or slow here.
    """
    described = manifest.Work(**asdict(work), reason=f"no GPU is in use, and the peak of a CPU is unknown: {_STATE_IT}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            described.device = str(torch.cuda.get_device_name())
            described.peak_tflops, described.reason = peak_tflops(described.device, work.precision)
        except RuntimeError as error:
            # A device with a pending error raises in every call, and the manifest must still be written.
            described.reason = f"CUDA does not name its device: {error}"
    if stated_peak_tflops:
        described.peak_tflops, described.reason = stated_peak_tflops, None
    return described


def peak_tflops(name: str, precision: Precision) -> tuple[float | None, str | None]:
    """The dense peak of a device in TFLOP/s, or None and the reason."""
    if "MIG" in name.split():
        return None, f"{name} is a part of a GPU: {_STATE_IT}"
    of_device = peaks(name)
    if not of_device:
        return None, f"the peak of {name} is unknown: {_STATE_IT}"
    # Tensor cores are equally fast in bf16 and fp16.
    peak = of_device.get("bf16" if precision == "fp16" else precision)
    return peak, None if peak else f"{name} has no {precision}: {_STATE_IT}"


def throughput(work: IterationWork, peak: float | None, durations_ns: Sequence[int]) -> tuple[list[float], list[float] | None]:
    """Model TFLOP/s that one device reached in each iteration, and its MFU, a share from 0 to 1; both to four digits."""
    reached = [_four_digits(work.model_flops / work.devices / max(duration, 1) / 1e3) for duration in durations_ns]
    return reached, [_four_digits(tflops / peak) for tflops in reached] if peak else None


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
