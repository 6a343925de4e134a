"""Everything of NeMo-Run that plugins replace: `Experiment.add`, and methods of the one executor that a plugin receives.

`Experiment.add` checks tasks before any plugin receives one, and gives each run of a job an output directory of its own:
`Experiment.reset` adds the jobs again, without plugins, on executors with the directory of the first run.

NeMo-Run's other classes stay unchanged. The experiment passes plugins the executor that it submits; `executor.clone()` returns
to NeMo-Run's behaviour, which `launch/pretrain.py` tolerates.

- LocalExecutor starts a process from a list of arguments, without a shell, but NeMo-Run's torchrun and ft_launcher components
  quote every argument for one: a script receives `'profiling.profile_ranks=[0,1]'` with the quotes, and Hydra rejects it.
- NeMo-Run 0.11.1's `nsys profile …` prefix ends with an empty argument, has options that some versions of nsys reject, samples
  GPU metrics only if a variable is set that nothing sets, hides the head node's address from torchrun while it does so, and
  reports to the temporary directory if the report's folder is missing. On LocalExecutor and SlurmExecutor a shell script fixes
  this in the job, since only the job knows its version of nsys.
- On the other executors NsysPlugin is refused; nsys that a user sets in the launcher by hand stays NeMo-Run's own.
"""

from __future__ import annotations

import copy
import functools
import os
import shlex
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import fiddle as fdl
import nemo_run as run
import torchx.components.dist as torchx_dist

from bridge_profiling.common.errors import require
from bridge_profiling.nsys.command import prefix_command
from bridge_profiling.plugins.checks import check_conflicts
from bridge_profiling.plugins.executors import (
    current_launcher,
    default_output_dir,
    set_output_dir,
    starts_every_rank,
)
from bridge_profiling.plugins.task import Task, check_is_task, check_sendable
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE

_experiment_add = run.Experiment.add

_SET_UP = "the experiment calls the setup of each object in a list"
_LIST = "Pass plugins=[PyTorchProfilerPlugin(profile_step_start=10, profile_step_end=12)]"


@dataclass(kw_only=True)
class LastPlugin(run.Plugin):
    """The last plugin of each job: applies what holds for every job, however it was set up.

    NeMo-Run saves it with a profiled job: a process that loads the experiment to run it again then loads this module.
    """

    again: bool = False
    """Whether the job, or another one on its executor, was profiled before."""

    def setup(self, task: Task, executor: Any) -> None:
        """Refuse or resolve conflicts of profilers; renew what a plugin has done to an executor that was used before."""
        check_conflicts(task, executor)
        if self.again:
            set_output_dir(executor)
            patch_executor(executor)


@functools.wraps(_experiment_add)
def _add(
    experiment: run.Experiment, task: Any, executor: Any = None, name: str = "", plugins: Any = None, *args: Any, **kwargs: Any
) -> str:
    is_list = isinstance(plugins, Iterable) and not isinstance(plugins, str)
    require(not plugins or is_list, f"plugins={plugins!r} is not a list", why=_SET_UP, instead=_LIST)
    given = [_built(plugin) for plugin in plugins or ()]
    ours = any(type(plugin).__module__.startswith("bridge_profiling.") for plugin in given)
    tasks = [_castable(one) for one in (task if isinstance(task, list) else [task])]
    for one in tasks if ours else ():
        check_sendable(one)
    chosen = executor or experiment.executor
    executors = chosen if isinstance(chosen, list) else [chosen]
    fresh = [_unassigned(one) if _was_profiled(one) else one for one in executors]
    again = any(map(_was_profiled, executors))
    if again:
        # Those of the experiment that is run again: the job would run in its directories.
        experiment.tunnels = {
            key: tunnel for key, tunnel in experiment.tunnels.items() if os.path.basename(tunnel.job_dir) == experiment._id
        }
    job = _experiment_add(
        experiment,
        tasks if isinstance(task, list) else tasks[0],
        fresh if isinstance(chosen, list) else fresh[0],
        name,
        [*given, LastPlugin(again=again)],
        *args,
        **kwargs,
    )
    if ours or again:
        experiment.jobs[-1].plugins = [*map(_without_converter, given), LastPlugin(again=again)]
    else:
        experiment.jobs[-1].plugins = given or None
    return job


run.Experiment.add = _add


def _built(plugin: Any) -> Any:
    """A plugin; one that is still a `run.Config` or `run.Partial` is built."""
    built = fdl.build(plugin) if isinstance(plugin, fdl.Buildable) else plugin
    built = built() if isinstance(plugin, fdl.Partial) else built
    is_plugin = hasattr(built, "setup") and not isinstance(built, type)
    require(is_plugin, f"{plugin!r} among the plugins is not a plugin", why=_SET_UP, instead=_LIST)
    return built


def _without_converter(plugin: Any) -> Any:
    """A plugin as it is saved with the job: NeMo-Run can't read back every function, and reruns no plugin."""
    saved = copy.copy(plugin)
    if getattr(saved, "script_args_converter_fn", None) is not None:
        saved.script_args_converter_fn = None
    return saved


def _castable(task: Any) -> Any:
    """A task, as the class of NeMo-Run's that has what an experiment calls."""
    if isinstance(task, fdl.Config):
        return task
    check_is_task(task)
    return fdl.cast(run.Partial, task) if type(task) is fdl.Partial else task


def _was_profiled(executor: Any) -> bool:
    return isinstance(executor, run.Executor) and bool(executor.job_dir) and OUTPUT_DIR_VARIABLE in executor.env_vars


def _unassigned(executor: run.Executor) -> run.Executor:
    """A copy of the executor without the directories of its last job; an output directory of the user's own stays."""
    copied = executor.clone()
    if executor.env_vars[OUTPUT_DIR_VARIABLE] == default_output_dir(executor):
        del copied.env_vars[OUTPUT_DIR_VARIABLE]
    tunnel = getattr(copied, "tunnel", None)
    if tunnel is not None and executor.experiment_id:
        # NeMo-Run appends the next experiment to it.
        last = os.path.join(executor.experiment_id.rpartition("_")[0], executor.experiment_id)
        tunnel.job_dir = tunnel.job_dir.removesuffix(f"/{last}")
        if os.path.join(tunnel.job_dir, last) == os.path.dirname(executor.job_dir) and isinstance(tunnel, run.LocalTunnel):
            tunnel.job_dir = ""  # where NeMo-Run keeps experiments, which may have changed
    return copied


def patch_executor(executor: Any) -> None:
    """Replace the executor's methods; a plugin calls this last. A second call changes nothing."""
    methods: dict[str, Callable] = {}
    if isinstance(executor, (run.LocalExecutor, run.SlurmExecutor)):
        methods = {"get_launcher_prefix": _script_prefix, "get_nsys_entrypoint": lambda _: ("bash", "")}
    if isinstance(executor, run.LocalExecutor):
        methods["supports_launcher_transform"] = _with_unquoted_arguments
    for name, method in methods.items():
        setattr(executor, name, types.MethodType(method, executor))


def _with_unquoted_arguments(executor: run.LocalExecutor) -> bool:
    # NeMo-Run calls this while packaging, just before the launcher's transform(), when the launcher is final.
    launcher = current_launcher(executor)
    if not starts_every_rank(launcher):
        return run.LocalExecutor.supports_launcher_transform(executor)
    launcher.transform = types.MethodType(_unquoted, launcher)
    return True


def _unquoted(launcher: object, command: list[str]) -> run.Script:
    """The command as a Script whose arguments the components do not quote."""
    entrypoint, *rest = command
    module = rest[0] == "-m"
    # torchx' own mark for text without quotes. Set only here, on the packaged command, because NeMo-Run cannot serialize a
    # task with anything but plain strings.
    path, *args = map(torchx_dist._noquote, rest[1:] if module else rest)
    return run.Script(path=path, entrypoint=entrypoint, m=module, args=args)


def _script_prefix(executor: Any) -> list[str] | None:
    launcher = current_launcher(executor)
    nsys = type(executor).get_launcher_prefix(executor) if launcher.nsys_profile else None
    if nsys is None:
        return None
    slurm = isinstance(executor, run.SlurmExecutor)
    # One nsys samples the GPU of its own rank, or all GPUs if it runs around all ranks of the machine.
    gpus = ("local" if slurm and not starts_every_rank(launcher) else "all") if launcher.nsys_gpu_metrics else ""
    words = prefix_command(nsys, gpu_metrics=gpus)
    return [shlex.quote(word) for word in words] if slurm else words
