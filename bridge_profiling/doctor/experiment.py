"""Reads from a NeMo-Run experiment what each of its jobs runs, and where. Loads neither nemo_run nor the task's modules."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from bridge_profiling.doctor.request import Request, apply_arguments, apply_file, apply_known
from bridge_profiling.errors import require
from bridge_profiling.experiments.jobs import Built, Job, read_jobs
from bridge_profiling.plugins.batch_script import world_size

#: Key in a `run.Script`'s metadata for the settings it starts from, before its files and arguments: `section.field=value`
#: separated by spaces. Without it, the settings of a recipe that the script names by an option are unknown here.
SETTINGS_KEY = "bridge_profiling.settings"

#: NeMo-Run's launchers, by class and by name.
_LAUNCHERS = {"Torchrun": "torchrun", "torchrun": "torchrun", "FaultTolerance": "ft", "ft": "ft", "Launcher": "none"}


def read_experiment(directory: Path) -> list[Request]:
    """The request of each job of an experiment."""
    requests = [_request(f"{directory.name}/{job.name}", job) for job in read_jobs(directory)]
    require(requests, f"the experiment {directory.name} has no jobs", instead="Add one with experiment.add(…)")
    return requests


def _request(name: str, job: Job) -> Request:
    executor, nodes, launcher = job.executor, job.executor.get("nodes", 1), job.executor.get("launcher")
    kind = _LAUNCHERS.get(launcher.name if isinstance(launcher, Built) else str(launcher)) if launcher is not None else "none"
    # On Slurm, srun starts the ranks where no launcher does.
    starts_own_ranks = executor.name == "LocalExecutor" and job.task.name == "Script"
    request = Request(
        name=name,
        world_size=world_size(executor.name, executor.get, launched=kind in ("torchrun", "ft"), undecided=starts_own_ranks),
        nodes=nodes if isinstance(nodes, int) else None,
        launcher=kind,
        nsys_prefix=executor.get("launcher.nsys_profile") is True,
        nsys_options=tuple(option for option in executor.get("launcher.nsys_extra_args") or () if isinstance(option, str)),
        nsys_prefix_gpu_metrics=executor.get("launcher.nsys_gpu_metrics") is True,
        environment={str(key): str(value) for key, value in (executor.get("env_vars") or {}).items()},
        srun=_srun(executor),
    )
    if executor.name != "LocalExecutor":
        ssh = f" at {job.ssh_tunnel.get('host')}" if job.ssh_tunnel is not None else ""
        image = f" in the image {executor.get('container_image')}" if executor.get("container_image") else ""
        request.elsewhere = f"{executor.name}{ssh} runs the job{image}, not this machine"
    _apply_task(request, job.task)
    path = job.captures_path(request.profiling.output_dir)
    if path is not None and job.ssh_tunnel is None:
        request.output_dir = Path(path)
    return request


def _apply_task(request: Request, task: Built) -> None:
    if task.name != "Script":
        apply_known(request, lambda key: task.get(f"config.{key}"))
        return
    recipe = (task.get("metadata") or {}).get(SETTINGS_KEY)
    apply_arguments(request, recipe.split() if isinstance(recipe, str) else (), strict=False)
    arguments = [argument for argument in task.get("args") or [] if isinstance(argument, str)]
    for option, value in pairwise([*arguments, ""]):
        name, _, text = option.partition("=")
        if name == "--config" and (file := Path(text or value)).is_file():
            apply_file(request, file)
    apply_arguments(request, arguments, strict=False)


def _srun(executor: Built) -> tuple[str, ...]:
    options = {"account": "account", "partition": "partition", "qos": "qos", "container_image": "container-image"}
    return ("srun", *(f"--{option}={executor.get(name)}" for name, option in options.items() if executor.get(name)))
