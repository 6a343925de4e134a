"""Checks before a plugin changes anything: window, ranks, output directory, and profilers that exclude each other."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, TypeVar

import nemo_run as run

from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.plugins.batch_script import arrives_unchanged
from bridge_profiling.plugins.executors import SKYPILOT, check_launcher, current_launcher, known_world_size, loses_its_disks
from bridge_profiling.plugins.task import Task, check_task, is_on, read_integer, read_setting, write_settings
from bridge_profiling.settings import window
from bridge_profiling.settings.profiling import (
    NSYS_DISABLED,
    OUTPUT_DIR_VARIABLE,
    check_flag,
)

logger = logging.getLogger(__name__)

ScriptArgsT = TypeVar("ScriptArgsT")

#: Attribute of an executor: the profilers that were asked for on it. A task does not show them where a converter makes its
#: arguments, or where fault tolerance has switched nsys off.
_ASKED = "_bridge_profiling_asked"


def check_request(
    plugin: Any, task: Task, executor: Any, script_args: type[ScriptArgsT], switch: str, *, nsys: bool = False
) -> ScriptArgsT:
    """Check what both profiler plugins have in common, as far as the submit host knows it, and return its script arguments.

    They and `switch` are the fields of the `profiling` section that the plugin writes; `nsys` is whether it profiles with nsys.
    """
    names = [field.name for field in dataclasses.fields(script_args)]  # type: ignore[arg-type]
    check_task(task, type(plugin).__name__, "profiling", (switch, *names))
    check_flags(plugin)
    check_executor(plugin, executor)
    _, ranks = window.check_request(
        plugin.profile_step_start,
        plugin.profile_step_end,
        [0] if plugin.profile_ranks is None else plugin.profile_ranks,
        spelled=window.ARGUMENTS,
        train_iters=read_integer(task, "train", "train_iters"),
        world_size=known_world_size(task, executor),
    )
    check_launcher(executor)
    check_output_dir(task, executor, nsys=nsys)
    return script_args(**{name: getattr(plugin, name) for name in names} | {"profile_ranks": ranks})


def check_flags(plugin: Any) -> None:
    """Check the booleans among a plugin's arguments: any text would count as true, and reach a shell on Slurm."""
    for field in dataclasses.fields(plugin):
        if isinstance(field.default, bool):
            check_flag(getattr(plugin, field.name), field.name)


def check_executor(plugin: Any, executor: Any) -> None:
    """Check that there is an executor."""
    require(
        hasattr(executor, "launcher"),
        f"{type(plugin).__name__}.setup got {executor!r} instead of an executor",
        why="it edits the executor's launcher and environment, and asks it for the number of ranks",
        instead="Pass the executor that the task is submitted with: plugin.setup(task, run.LocalExecutor())",
    )


def check_output_dir(task: Task, executor: Any, *, nsys: bool = False) -> None:
    """Refuse an executor that starts no task, cannot run it under nsys, or loses its disks while no other place is set.

    See docs/first-hour/your-job.md.
    """
    # By name, since the class can only be imported with the kubernetes package.
    require(
        all(base.__name__ != "KubeRayExecutor" for base in type(executor).__mro__),
        "KubeRayExecutor starts a Ray cluster, and plugins do not reach the processes on it",
        why="NeMo-Run passes it neither the launcher's nsys options nor a task's config",
        instead="Call ProfilingHook in the workers' own code, with profiling.output_dir on a volume they mount",
    )
    require(
        not (nsys and isinstance(executor, run.Executor)) or isinstance(executor, (run.LocalExecutor, run.SlurmExecutor)),
        f"NsysPlugin does not work on {type(executor).__name__}",
        why="NeMo-Run starts nsys there with a report directory that is missing in the job, so the report is lost",
        instead="Pass PyTorchProfilerPlugin with the same steps and ranks, or use run.SlurmExecutor or run.LocalExecutor",
    )
    _check_variable(executor)
    if isinstance(executor, run.KubeflowExecutor) and not executor.workdir_pvc:
        what, why = "KubeflowExecutor without workdir_pvc", "its pods have no directory that outlives them"
        instead = 'Pass workdir_pvc="CLAIM", from which executor.pull_results(job) fetches the profiles'
    elif isinstance(executor, SKYPILOT) and loses_its_disks(executor) and not executor.storage_mounts:
        what = f"{type(executor).__name__} without storage_mounts"
        why = "the machines are returned when the job ends, and their disks with them"
        instead = "Pass storage_mounts with a bucket for the profiles"
    else:
        return
    if OUTPUT_DIR_VARIABLE in executor.env_vars or read_setting(task, "profiling", "output_dir"):
        return
    instead += f', or set env_vars["{OUTPUT_DIR_VARIABLE}"] to a directory on a volume that stays'
    raise ProfilingConfigError(f"the profile of a job on {what} would be lost", why=why, instead=instead)


def _check_variable(executor: Any) -> None:
    """Refuse a directory of the user's that a shell of the job would read differently."""
    if not isinstance(executor, run.Executor) or OUTPUT_DIR_VARIABLE not in executor.env_vars:
        return
    chosen, shell = executor.env_vars[OUTPUT_DIR_VARIABLE], not isinstance(executor, run.LocalExecutor)
    require(
        isinstance(chosen, str) and (not shell or arrives_unchanged(OUTPUT_DIR_VARIABLE, chosen, container=True)),
        f'env_vars["{OUTPUT_DIR_VARIABLE}"]={chosen!r} would not arrive in the job unchanged',
        why="NeMo-Run writes it into a shell script without quotes" if shell else "an environment holds text",
        instead="Name a directory with letters, digits and ./_:@%+- only",
    )


def nsys_launched(executor: Any) -> bool:
    """Whether the launcher runs the job under nsys; `is True`, because a mock's attribute is truthy."""
    return getattr(current_launcher(executor), "nsys_profile", False) is True


def fault_tolerant(task: Task, executor: Any) -> bool:
    """Whether the job runs under fault tolerance, by its launcher or its `ft` section."""
    launcher = current_launcher(executor)
    return isinstance(launcher, run.FaultTolerance) or launcher == "ft" or is_on(task, "ft", "enable_ft_package")


def note_asked(executor: Any, profiler: str) -> None:
    """Note that `nsys` or `torch` was asked for on this executor."""
    setattr(executor, _ASKED, _asked(executor) | {profiler})


def _asked(executor: Any) -> frozenset[str]:
    return vars(executor).get(_ASKED, frozenset())


def nsys_on(task: Task, executor: Any) -> bool:
    """Whether nsys is on: in the launcher, in the task, or by a plugin."""
    return nsys_launched(executor) or is_on(task, "profiling", "use_nsys_profiler") or "nsys" in _asked(executor)


def check_without_nsys(task: Task, executor: Any, plugin: str = "PyTorchProfilerPlugin") -> None:
    """Raise ProfilingConfigError if nsys is on: the torch profiler cannot run with it."""
    _exclude(plugin, is_on(task, "profiling", "use_nsys_profiler"), "profiling.use_nsys_profiler is on")
    _exclude(plugin, nsys_launched(executor), "the executor's launcher has nsys_profile=True")
    _exclude(plugin, "nsys" in _asked(executor), "nsys was asked for")


def check_without_pytorch_profiler(task: Task, executor: Any) -> None:
    """Raise ProfilingConfigError if the torch profiler is on: nsys cannot run with it."""
    _exclude("NsysPlugin", is_on(task, "profiling", "use_pytorch_profiler"), "profiling.use_pytorch_profiler is on")
    _exclude("NsysPlugin", "torch" in _asked(executor), "PyTorchProfilerPlugin was added")


def check_conflicts(task: Task, executor: Any) -> None:
    """Apply both rules to a task as it is submitted, for settings that no plugin made."""
    if is_on(task, "profiling", "use_pytorch_profiler"):
        check_without_nsys(task, executor, "The task")
    if fault_tolerant(task, executor) and nsys_on(task, executor):
        disable_nsys(task, executor)


def _exclude(plugin: str, other: bool, found: str) -> None:
    require(
        not other,
        f"{plugin} cannot be added: {found}, and NsysPlugin and PyTorchProfilerPlugin exclude each other",
        why="nsys and the torch profiler both need CUPTI, and only one of them gets it",
        instead="Keep one of them, NsysPlugin or PyTorchProfilerPlugin, and submit a second job for the other",
    )


def nsys_disabled(executor: Any) -> bool:
    """Whether `disable_nsys` has turned nsys off."""
    return "no nsys" in _asked(executor)


def disable_nsys(task: Task, executor: Any) -> None:
    """Turn nsys off in the launcher and the task, with one warning: the fault-tolerance launcher does not support it."""
    if not nsys_disabled(executor):
        logger.warning(NSYS_DISABLED)
    note_asked(executor, "nsys")
    note_asked(executor, "no nsys")
    if nsys_launched(executor):
        current_launcher(executor).nsys_profile = False
    if is_on(task, "profiling", "use_nsys_profiler"):
        write_settings(task, "profiling", {"use_nsys_profiler": False})
