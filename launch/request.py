"""The options of `launch/experiment.py`: their values, and checks that need no NeMo-Run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from bridge_profiling.common.errors import require
from bridge_profiling.settings.recording import check_flags, option


class ExecutorName(StrEnum):
    """Where the job runs."""

    local = "local"
    local_torchrun = "local_torchrun"
    slurm = "slurm"


class ProfilerName(StrEnum):
    """The profiler to record with."""

    none = "none"
    torch = "torch"
    nsys = "nsys"


class TaskKind(StrEnum):
    """The kind of NeMo-Run task to submit."""

    script = "script"
    partial = "partial"


def check_options(profiler: ProfilerName, *, recording: Mapping[str, object], nsys_only: bool) -> None:
    """Refuse options that do not apply to the chosen profiler.

    Args:
        profiler: the chosen one.
        recording: the options of what to record, as of `recording.check_flags`.
        nsys_only: whether an option of nsys is given.

    Raises:
        ProfilingConfigError: they do not go together.
    """
    given = [option(name) for name, value in recording.items() if value]
    require(
        not given or profiler is not ProfilerName.none,
        f"{' and '.join(given)} does not go with --profiler none",
        why="without a profiler nothing is recorded",
        instead="Type --profiler torch or --profiler nsys",
    )
    check_flags(recording, [profiler.value])
    require(
        not nsys_only or profiler is ProfilerName.nsys,
        f"--export-sqlite, --gpu-metrics and --nsys-arg do not go with --profiler {profiler.value}",
        why="they are options of nsys",
        instead="Type --profiler nsys as well, or leave them out",
    )


def check_installed(*, nsys: bool, ft_launcher: bool) -> None:
    """Refuse a job on this machine that would start a program that is not installed here."""
    require(
        not nsys or shutil.which("nsys"),
        "nsys is not on this machine's PATH",
        why="the job would run here, and its ranks start with `nsys profile`",
        instead="Install Nsight Systems, or type --profiler torch",
    )
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    require(
        not ft_launcher or shutil.which("ft_launcher", path=path),
        "ft_launcher is not on this machine's PATH",
        why="the job would run here, under the fault-tolerance launcher",
        instead="Install it: pip install nvidia-resiliency-ext, or leave --fault-tolerance out",
    )


def parse_env(entries: list[str] | None) -> dict[str, str]:
    """`NAME=VALUE` entries as a mapping.

    Raises:
        ProfilingConfigError: an entry lacks a name or a value.
    """
    variables = {}
    for entry in entries or ():
        name, equals, value = entry.partition("=")
        require(name and equals, f"--env {entry} is not NAME=VALUE", instead="Type for example --env NCCL_DEBUG=INFO")
        variables[name] = value
    return variables
