"""The rank, the plan of a window, and the part of a capture's manifest that they decide.

Nothing here runs in an iteration.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata

from bridge_profiling import manifest
from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.capture.loop import IterationLog
from bridge_profiling.capture.work import IterationWork
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.plain import plain
from bridge_profiling.common.redaction import redact_command, redact_values
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import ProfilingConfig, Window

_PACKAGES = ("bridge-profiling", "torch", "megatron-core", "nemo_run", "nvtx", "transformer-engine")


@dataclass(frozen=True)
class RankInfo:
    """One rank of a training, as its captures and its listener need it.

    `facts` are what a framework reports about itself, `recorded` the windows recorded so far.
    """

    number: int
    layout: ParallelLayout
    work: IterationWork | None
    train_iters: int | None
    facts: dict[str, object] = field(default_factory=dict)
    log: IterationLog = field(default_factory=IterationLog)
    recorded: list[Window] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """A window to capture: its settings, its origin, and the number of its folder if that is agreed already."""

    config: ProfilingConfig
    trigger: manifest.Trigger
    attempt: int | None = None

    @property
    def window(self) -> Window:
        """Its iterations."""
        return self.config.window

    @property
    def first_edge(self) -> int:
        """The first iteration in which a profiler prepares."""
        return self.window.start - self.config.warm_up


def describe(plan: Plan, files: CaptureFiles, rank: RankInfo) -> manifest.Manifest:
    """The manifest of a capture before its window: what was requested, where and by which software."""
    env = LaunchEnv.read()
    return manifest.Manifest(
        status="missed",
        window=plan.window,
        trigger=plan.trigger,
        other_windows=[[one.start, one.end] for one in rank.recorded if one != plan.window],
        rank=rank.number,
        world_size=rank.layout.world_size,
        local_rank=env.local_rank,
        coordinates={name: list(place) for name, place in rank.layout.coordinates(rank.number).items()},
        host=socket.gethostname(),
        pid=os.getpid(),
        command=redact_command([sys.executable, *sys.orig_argv[1:]]),
        job=manifest.Job(id=env.job_id, attempt=files.attempt, restarts=env.restarts),
        config=redact_values(plain(vars(plan.config))),
        versions=_versions(),
        framework=redact_values(plain(rank.facts)) or None,
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
