"""Finds a NeMo-Run experiment on this machine, and reads from it what each of its jobs would run, and where.

Looks into `$NEMORUN_HOME/experiments/<title>/<id>`. Submits nothing, and loads neither nemo_run nor the task.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from bridge_profiling.config import OUTPUT_DIR_VARIABLE
from bridge_profiling.doctor.request import Request, Settings, apply_file, apply_mapping, apply_script_arguments
from bridge_profiling.doctor.serialized import Built, load
from bridge_profiling.errors import ProfilingConfigError

_TASKS_FILE = "_TASKS"

#: NeMo-Run's name for the job's directory inside a container.
_IN_CONTAINER = "/nemo_run"


def find_experiment(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of an experiment.

    Args:
        name: its directory or one of its jobs', its id, or its title (then the newest of that title).
        environ: where NEMORUN_HOME may be set.

    Raises:
        ProfilingConfigError: there is none.
    """
    home = Path(environ.get("NEMORUN_HOME") or Path.home() / ".nemo_run") / "experiments"
    title = name.rpartition("_")[0]
    job_of = [Path(name).absolute().parent] if Path(name).is_dir() else []
    for place in (Path(name), *job_of, home / title / name, home / name):
        if (place / _TASKS_FILE).is_file():
            return place
    for place in (Path(name), home / name):
        newest = max(place.glob(f"*/{_TASKS_FILE}"), key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest is not None:
            return newest.parent
    raise ProfilingConfigError(
        f"there is no experiment {name!r}",
        why=f"neither a directory with a {_TASKS_FILE} file, nor an id or a title in {home}",
        instead="Type its id or its directory; a setting is typed section.field=value; experiment.dryrun(delete_exp_dir=False)"
        " writes one without submitting it",
    )


def read_experiment(directory: Path) -> list[Request]:
    """What each job of an experiment would run.

    Raises:
        ProfilingConfigError: the experiment cannot be read, or a setting in it is wrong.
    """
    try:
        pairs = json.loads((directory / _TASKS_FILE).read_text(encoding="utf-8"))
        jobs = [(load(job), task if isinstance(task, str) else "") for job, task in pairs]
    except (OSError, ValueError) as error:
        if isinstance(error, ProfilingConfigError):
            raise
        raise ProfilingConfigError(f"{directory / _TASKS_FILE} cannot be read", why=str(error)) from error
    requests = []
    for job, serialized in jobs:
        tasks = load(serialized) if serialized else []
        executors = job.get("executors") or job.get("executor")
        tasks, executors = _listed(tasks), _listed(executors)
        for number, task in enumerate(tasks):
            executor = executors[number] if number < len(executors) else executors[0]
            name = job.get("id", "job") + (f"[{number}]" if len(tasks) > 1 else "")
            requests.append(_request(f"{directory.name}/{name}", task, executor))
    if not requests:
        raise ProfilingConfigError(f"the experiment {directory.name} has no jobs", instead="Add one with experiment.add(…)")
    return requests


def _request(name: str, task: Built, executor: Built) -> Request:
    settings = Settings()
    if task.target.endswith(".Script"):
        arguments = [argument for argument in task.get("args") or [] if isinstance(argument, str)]
        for file in _config_files(arguments):
            if file.is_file():
                apply_file(settings, file)
        apply_script_arguments(settings, arguments)
    else:
        config = task.get("config")
        if isinstance(config, Built):
            apply_mapping(settings, config.nested(), strict=False)
    launcher = executor.get("launcher")
    options = launcher if isinstance(launcher, Built) else Built("")
    kind = _launcher(launcher)
    nodes = executor.get("nodes", 1)
    return Request(
        name=name,
        settings=settings,
        world_size=_world_size(executor, kind, is_script=task.target.endswith(".Script")),
        nodes=nodes if isinstance(nodes, int) else None,
        launcher=kind,
        nsys_prefix=options.get("nsys_profile") is True,
        nsys_options=_texts(options.get("nsys_extra_args")),
        nsys_prefix_gpu_metrics=options.get("nsys_gpu_metrics") is True,
        environment={str(key): str(value) for key, value in (executor.get("env_vars") or {}).items()},
        output_dir=_output_dir(settings, executor),
        elsewhere=_elsewhere(executor),
        srun=_srun(executor),
    )


def _config_files(arguments: list[str]) -> Iterator[Path]:
    for option, value in pairwise([*arguments, ""]):
        if option == "--config":
            yield Path(value)
        elif option.startswith("--config="):
            yield Path(option.partition("=")[2])


def _launcher(launcher: Any) -> str | None:
    if launcher is None:
        return "none"
    name = launcher.name if isinstance(launcher, Built) else str(launcher)
    return {"Torchrun": "torchrun", "torchrun": "torchrun", "FaultTolerance": "ft", "ft": "ft", "Launcher": "none"}.get(name)


def _world_size(executor: Built, launcher: str | None, *, is_script: bool) -> int | None:
    """The number of ranks where the executor decides it; a script under no launcher may start its own."""
    tasks, nodes = executor.get("ntasks_per_node", 1), executor.get("nodes", 1)
    launched = launcher in ("torchrun", "ft")
    if executor.name == "LocalExecutor":
        tasks = tasks if launched else 1
    elif executor.name == "SlurmExecutor" and not executor.get("heterogeneous"):
        tasks = executor.get("torchrun_nproc_per_node") or tasks
    else:
        return None
    if is_script and not launched and executor.name == "LocalExecutor":
        return None
    return tasks * nodes if isinstance(tasks, int) and isinstance(nodes, int) else None


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(value for value in values or () if isinstance(value, str))


def _output_dir(settings: Settings, executor: Built) -> Path | None:
    """Where the job writes, as this machine calls that place; None where it is not known or not on this machine."""
    place = settings.profiling.output_dir or (executor.get("env_vars") or {}).get(OUTPUT_DIR_VARIABLE)
    tunnel = executor.get("tunnel")
    if not isinstance(place, str) or (isinstance(tunnel, Built) and tunnel.name == "SSHTunnel"):
        return None
    if place == _IN_CONTAINER or place.startswith(f"{_IN_CONTAINER}/"):
        job_dir = executor.get("job_dir")
        return Path(job_dir, place.removeprefix(_IN_CONTAINER).lstrip("/")) if isinstance(job_dir, str) and job_dir else None
    return Path(place)


def _elsewhere(executor: Built) -> str:
    if executor.name == "LocalExecutor":
        return ""
    image = executor.get("container_image")
    tunnel = executor.get("tunnel")
    host = f" at {tunnel.get('host')}" if isinstance(tunnel, Built) and tunnel.name == "SSHTunnel" else ""
    return f"{executor.name}{host} runs the job{f' in the image {image}' if image else ''}, not this machine"


def _srun(executor: Built) -> tuple[str, ...]:
    words = [f"--{name}={executor.get(name)}" for name in ("account", "partition", "qos") if executor.get(name)]
    if executor.get("container_image"):
        words.append(f"--container-image={executor.get('container_image')}")
    return ("srun", *words)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
