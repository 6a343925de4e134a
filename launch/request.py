"""What `launch/experiment.py` is asked for, read and checked: the window, the ranks, the plugins that make them true.

Builds plugins and nothing else; never submits anything.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_profiling.config import parse_ranks, parse_steps
from bridge_profiling.errors import ProfilingConfigError

if TYPE_CHECKING:
    import nemo_run as run


#: What a report is made with: modules of the extra `analysis`.
_ANALYSIS = ("duckdb", "jinja2", "msgspec", "numpy", "plotly", "pyarrow")


class ExecutorName(StrEnum):
    """Where the job runs."""

    local = "local"
    local_torchrun = "local_torchrun"
    slurm = "slurm"


class ProfilerName(StrEnum):
    """What records it."""

    none = "none"
    torch = "torch"
    nsys = "nsys"


class TaskKind(StrEnum):
    """How NeMo-Run is told what to run."""

    script = "script"
    partial = "partial"


def check_options(profiler: ProfilerName, *, memory: bool, nsys_only: bool, report: bool = False) -> None:
    """Refuse options of one profiler beside another.

    Args:
        profiler: the one asked for.
        memory: the memory history is asked for as well.
        nsys_only: an option of nsys is.
        report: a report of the captures is.

    Raises:
        ProfilingConfigError: they do not go together.
    """
    if report and profiler is ProfilerName.none:
        raise ProfilingConfigError(
            "--report does not go with --profiler none",
            why="a report is about captures",
            instead="Type --profiler torch or --profiler nsys",
        )
    if memory and profiler is not ProfilerName.torch:
        raise ProfilingConfigError(
            f"--memory does not go with --profiler {profiler.value}",
            why="PyTorchProfilerPlugin records the memory history",
            instead="Type --profiler torch --memory, or profiling.record_memory_history=true among the overrides",
        )
    if nsys_only and profiler is not ProfilerName.nsys:
        raise ProfilingConfigError(
            f"--export-sqlite, --gpu-metrics and --nsys-arg do not go with --profiler {profiler.value}",
            why="they are options of nsys",
            instead="Type --profiler nsys as well, or leave them out",
        )


def check_programs(*, nsys: bool, ft_launcher: bool) -> None:
    """Refuse a job on this machine that would start with a program that is not there."""
    if nsys and not shutil.which("nsys"):
        raise ProfilingConfigError(
            "nsys is not on this machine's PATH",
            why="the job would run here, and its ranks start with `nsys profile`",
            instead="Install Nsight Systems, or type --profiler torch",
        )
    if ft_launcher and not shutil.which("ft_launcher", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"):
        raise ProfilingConfigError(
            "ft_launcher is not on this machine's PATH",
            why="the job would run here, under the fault-tolerance launcher",
            instead="Install it: pip install nvidia-resiliency-ext, or leave --fault-tolerance out",
        )


def check_analysis(*, report: bool) -> None:
    """Refuse a report on this machine that would fail for want of what reads captures."""
    missing = [name for name in _ANALYSIS if importlib.util.find_spec(name) is None] if report else []
    if missing:
        raise ProfilingConfigError(
            f"--report needs {', '.join(missing)}",
            why="the report's job would run here",
            instead="Type pip install 'bridge-profiling[analysis]', or leave --report out",
        )


def parse_env(entries: list[str] | None) -> dict[str, str]:
    """`NAME=VALUE` entries as a mapping.

    Raises:
        ProfilingConfigError: one without a name or a value.
    """
    for entry in entries or ():
        if not entry.partition("=")[0] or "=" not in entry:
            raise ProfilingConfigError(f"--env {entry} is not NAME=VALUE", instead="Type for example --env NCCL_DEBUG=INFO")
    return dict(entry.split("=", 1) for entry in entries or ())


def window(steps: str, ranks: str, record_shapes: bool) -> dict[str, Any]:
    """What both profilers' plugins take, as the command line writes it.

    Raises:
        ProfilingConfigError: steps or ranks that are none.
    """
    start, end = parse_steps(steps)
    return {
        "profile_step_start": start,
        "profile_step_end": end,
        "profile_ranks": parse_ranks(ranks),
        "record_shapes": record_shapes,
    }


def profiler_plugins(
    profiler: ProfilerName,
    window: dict[str, Any],
    memory: bool,
    nsys_args: list[str] | None,
    *,
    export_sqlite: bool,
    gpu_metrics: bool,
) -> list[run.Plugin]:
    """The profiler's plugin; none for no profiler."""
    from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin

    if profiler is ProfilerName.torch:
        return [PyTorchProfilerPlugin(**window, record_memory_history=memory)]
    if profiler is ProfilerName.nsys:
        options = {"nsys_extra_args": nsys_args, "export_sqlite": export_sqlite, "nsys_gpu_metrics": gpu_metrics}
        return [NsysPlugin(**window, **options)]
    return []


def job_plugins(*, fault_tolerance: bool, preempt_time: int | None) -> list[run.Plugin]:
    """The plugins that change how the job runs and ends."""
    from bridge_profiling.plugins import FaultTolerancePlugin, PreemptionPlugin

    plugins: list[run.Plugin] = [FaultTolerancePlugin()] if fault_tolerance else []
    return plugins if preempt_time is None else [*plugins, PreemptionPlugin(preempt_time=preempt_time)]
