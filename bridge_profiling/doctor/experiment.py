"""Reads from a NeMo-Run experiment what each of its jobs would run, and where. Loads neither nemo_run nor the task."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from bridge_profiling.doctor.request import Request, Settings, apply_file, apply_mapping, apply_script_arguments
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.experiments.find import find_experiment, read_jobs
from bridge_profiling.experiments.places import place_of
from bridge_profiling.experiments.serialized import Built
from bridge_profiling.plugins.batch_script import world_size

__all__ = ["SETTINGS_KEY", "find_experiment", "read_experiment"]

#: Under it, the metadata of a `run.Script` tell what settings it starts from, before its files and arguments:
#: `section.field=value` with spaces between them. A recipe that the script names by an option is otherwise unknown here.
SETTINGS_KEY = "bridge_profiling.settings"


def read_experiment(directory: Path) -> list[Request]:
    """What each job of an experiment would run.

    Raises:
        ProfilingConfigError: the experiment cannot be read, or a setting in it is wrong.
    """
    requests = [_request(f"{directory.name}/{job.name}", job.task, job.executor) for job in read_jobs(directory)]
    if not requests:
        raise ProfilingConfigError(f"the experiment {directory.name} has no jobs", instead="Add one with experiment.add(…)")
    return requests


def _request(name: str, task: Built, executor: Built) -> Request:
    settings = Settings()
    if task.target.endswith(".Script"):
        arguments = [argument for argument in task.get("args") or [] if isinstance(argument, str)]
        told = (task.get("metadata") or {}).get(SETTINGS_KEY)
        apply_script_arguments(settings, told.split() if isinstance(told, str) else ())
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
        world_size=world_size(
            executor.name, executor.get, launched=kind in ("torchrun", "ft"), undecided=task.target.endswith(".Script")
        ),
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


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(value for value in values or () if isinstance(value, str))


def _output_dir(settings: Settings, executor: Built) -> Path | None:
    """Where the job writes, as this machine calls that place; None where it is not known or not on this machine."""
    place = place_of(executor, settings.profiling.output_dir)
    return None if place is None or place.tunnel is not None else Path(place.path)


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
