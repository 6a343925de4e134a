"""Every method of NeMo-Run's executors that plugins replace, on the one object that a plugin receives.

NeMo-Run's classes stay unchanged. The experiment passes plugins the object that it submits; `executor.clone()` returns to
NeMo-Run's behaviour, which `launch/pretrain.py` tolerates.

- LocalExecutor starts a process from a list of arguments, without a shell, but NeMo-Run's torchrun and ft_launcher components
  quote every argument for one: a script receives `'profiling.profile_ranks=[0,1]'` with the quotes, and Hydra rejects it.
- NeMo-Run 0.11.1's `nsys profile …` prefix ends with an empty argument, has options that some versions of nsys reject, samples
  GPU metrics only if a variable is set that nothing sets, hides the head node's address from torchrun while it does so, and
  reports to the temporary directory if the report's folder is missing. On LocalExecutor and SlurmExecutor a shell script fixes
  this in the job, since only the job knows its version of nsys.
- On the other executors NeMo-Run's prefix names the client's directory, and the folder of the report may be missing.
"""

from __future__ import annotations

import os
import re
import shlex
import types
from collections.abc import Callable
from typing import Any

import nemo_run as run
import torchx.components.dist as torchx_dist

from bridge_profiling.config import OUTPUT_DIR_VARIABLE
from bridge_profiling.nsys.command import prefix_command
from bridge_profiling.plugins.batch_script import RUNDIR
from bridge_profiling.plugins.executors import LINKED, SKYPILOT, current_launcher, job_directory, starts_every_rank


def patch_executor(executor: Any) -> None:
    """Replace the executor's methods; a plugin calls this last. A second call changes nothing."""
    methods: dict[str, Callable] = {}
    if isinstance(executor, (run.LocalExecutor, run.SlurmExecutor)):
        methods = {"get_launcher_prefix": _script_prefix, "get_nsys_entrypoint": lambda _: ("bash", "")}
    elif isinstance(executor, (*LINKED, *SKYPILOT, run.KubeflowExecutor)):
        methods = {"get_launcher_prefix": _prefix_in_job, "get_nsys_entrypoint": _entrypoint_in_job}
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


def _prefix_in_job(executor: Any) -> list[str] | None:
    launcher = current_launcher(executor)
    if not launcher.nsys_profile:
        return None
    prefix = launcher.get_nsys_prefix(profile_dir=_report_root(executor))
    # Nodes may share the directory, and processes in containers share small process ids. A shell reads the command.
    return [shlex.quote(re.sub(r"/profile_%p$", "/profile_%h_%p", argument)) for argument in prefix]


def _entrypoint_in_job(executor: Any) -> tuple[str, str]:
    # nsys reports to the temporary directory if the report's folder is missing. These executors write the command into a shell
    # script, so it can create the folder.
    folder = os.path.join(_report_root(executor), current_launcher(executor).nsys_folder)
    return f"mkdir -p {shlex.quote(folder)} && nsys", ""


def _report_root(executor: Any) -> str:
    """The directory of nsys' reports: the user's BRIDGE_PROFILING_DIR, else the job's directory."""
    chosen, directory = executor.env_vars.get(OUTPUT_DIR_VARIABLE), job_directory(executor)
    if chosen and directory and chosen != os.path.join(directory, "profiles"):
        return chosen
    return directory or chosen or RUNDIR
