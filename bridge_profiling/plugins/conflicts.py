"""Which profilers exclude each other, by every route: a plugin, the launcher, the config, a Script's overrides.

nsys and the torch profiler are refused. nsys under the fault-tolerance launcher is switched off, with a warning.
"""

from __future__ import annotations

import logging
from typing import Any

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins.launchers import current_launcher, is_fault_tolerance
from bridge_profiling.plugins.task import Task, is_on, write

logger = logging.getLogger(__name__)

#: The words users of Megatron Bridge know.
NSYS_DISABLED = "Nsys not supported with the FaultTolerancePlugin"


def nsys_launched(executor: Any) -> bool:
    """Whether the launcher runs the job under nsys; `is True`, because a mock's attribute is truthy."""
    return getattr(current_launcher(executor), "nsys_profile", False) is True


def fault_tolerant(task: Task, executor: Any) -> bool:
    """Whether the job runs under fault tolerance, by its launcher or its `ft` section."""
    return is_fault_tolerance(current_launcher(executor)) or is_on(task, "ft", "enable_ft_package")


def refuse_nsys(task: Task, executor: Any) -> None:
    """Raise if nsys is on: the torch profiler cannot join it."""
    if is_on(task, "profiling", "use_nsys_profiler"):
        _refuse("PyTorchProfilerPlugin", "profiling.use_nsys_profiler is already on")
    if nsys_launched(executor):
        _refuse("PyTorchProfilerPlugin", "the executor's launcher already has nsys_profile=True")


def refuse_pytorch_profiler(task: Task) -> None:
    """Raise if the torch profiler is on: nsys cannot join it."""
    if is_on(task, "profiling", "use_pytorch_profiler"):
        _refuse("NsysPlugin", "profiling.use_pytorch_profiler is already on")


def disable_nsys(task: Task, executor: Any) -> None:
    """Switch nsys off wherever it is on, in the launcher and in the task, and say so."""
    logger.warning("%s; nsys is switched off for this job, training and fault tolerance are not", NSYS_DISABLED)
    if nsys_launched(executor):
        current_launcher(executor).nsys_profile = False
    if is_on(task, "profiling", "use_nsys_profiler"):
        write(task, "profiling", {"use_nsys_profiler": False})


def _refuse(plugin: str, found: str) -> None:
    raise ProfilingConfigError(
        f"{plugin} cannot be added: {found}, and NsysPlugin and PyTorchProfilerPlugin exclude each other",
        why="nsys and the torch profiler both need CUPTI, and only one of them gets it",
        instead="Keep one of them, NsysPlugin or PyTorchProfilerPlugin, and submit a second job for the other",
    )
