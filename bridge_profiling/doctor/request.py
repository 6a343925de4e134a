"""A run as far as it is known before it is submitted: its profiling settings, and the other settings that checks read.

Reads YAML files and overrides of any ConfigContainer, ours or Megatron Bridge's, and the jobs of a NeMo-Run experiment; ignores
all other settings in them. Imports no recipe, no task's modules, no nemo_run and no torch.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.experiments.jobs import Built, Job, read_jobs
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.plugins.batch_script import world_size
from bridge_profiling.settings.overrides import config_files, load_yaml, parse_override
from bridge_profiling.settings.profiling import FaultToleranceConfig, ProfilingConfig
from bridge_profiling.settings.window import check_ranks, select_ranks
from bridge_profiling.settings.yaml_values import Given, convert

#: The settings outside `profiling` and `ft` that checks read, by type. Ours and Megatron Bridge's containers have them all.
LOOKUPS: dict[str, Any] = {
    "train.train_iters": int | None,
    "train.start_iteration": int | None,
    "model.tensor_model_parallel_size": int,
    "model.pipeline_model_parallel_size": int,
    "model.context_parallel_size": int,
    "model.expert_model_parallel_size": int,
}

#: Sections of which every field is read, and an unknown one refused.
_WHOLE = {"profiling": ProfilingConfig, "ft": FaultToleranceConfig}

_TYPES = LOOKUPS | {
    f"{section}.{name}": hint for section, owner in _WHOLE.items() for name, hint in typing.get_type_hints(owner).items()
}


@dataclass(kw_only=True)
class Request:
    """A run that somebody is about to start."""

    name: str = ""  # what to call it; empty when only this machine is checked
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)  # the run's `profiling` section
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)  # the run's `ft` section
    settings: dict[str, Any] = field(default_factory=dict)  # the settings among LOOKUPS that are known and not null
    world_size: int | None = None  # number of ranks, None where it is not known
    nodes: int | None = None  # number of machines, None where it is not known
    launcher: str | None = None  # `torchrun`, `ft`, `none`, or None where it is not known
    nsys_prefix: bool = False  # the launcher runs the whole job under nsys
    nsys_options: tuple[str, ...] = ()  # options of `nsys profile` that the launcher passes
    nsys_prefix_gpu_metrics: bool = False  # the launcher asks for GPU metrics
    environment: Mapping[str, str] = field(default_factory=dict)  # variables the executor sets for the job
    output_dir: Path | None = None  # directory of captures, overriding the settings
    elsewhere: str = ""  # why the job does not run on this machine; empty where it does

    def integer(self, key: str) -> int | None:
        """An integer among LOOKUPS; None where it is not known."""
        return self.settings.get(key)

    def parallel_size(self, dimension: str) -> int:
        """`model.<dimension>_parallel_size`, 1 where it is not known."""
        return self.settings.get(f"model.{dimension}_parallel_size", 1)

    @property
    def wants_nsys(self) -> bool:
        """Whether the settings or the launcher ask for nsys."""
        return self.profiling.use_nsys_profiler or self.nsys_prefix

    @property
    def wants_gpu_metrics(self) -> bool:
        """Whether the settings, the launcher or its nsys options ask for GPU metrics."""
        options = any(
            option.startswith("--gpu-metrics-device") for option in [*self.nsys_options, *self.profiling.nsys_extra_args]
        )
        return self.profiling.nsys_gpu_metrics or self.nsys_prefix_gpu_metrics or options

    def profiled_ranks(self) -> list[int] | None:
        """The ranks to profile; None where they depend on a world size that is not known."""
        ranks = check_ranks(self.profiling.profile_ranks)
        if self.world_size is None:
            return ranks if isinstance(ranks, list) else None
        layout = ParallelLayout(
            world_size=self.world_size,
            tp=self.parallel_size("tensor_model"),
            pp=self.parallel_size("pipeline_model"),
            cp=self.parallel_size("context"),
            ep=self.parallel_size("expert_model"),
        )
        return select_ranks(ranks, layout)


def apply_known(request: Request, lookup: Callable[[str], Any]) -> None:
    """Read every known setting into a request; `lookup` returns the value of a key, None if it is not set."""
    for key in _TYPES:
        if (value := lookup(key)) is not None:
            _apply(request, key, Given(value))


def apply_file(request: Request, path: str | Path) -> None:
    """Read the known settings of a YAML file into a request."""
    settings = load_yaml(path)
    try:
        for key, value in _flat(settings):
            if "." in key or key in _WHOLE:
                _apply(request, key, Given(value))
    except ProfilingConfigError as error:
        raise ProfilingConfigError(f"{path}: {error.what}", why=error.why, instead=error.instead) from None


def apply_arguments(request: Request, arguments: Iterable[str], *, strict: bool = True) -> None:
    """Read the known settings of overrides into a request; `strict` refuses everything else instead of ignoring it."""
    for argument in arguments:
        override = parse_override(argument)
        require(
            override is not None or not strict,
            f"{argument!r} is not a setting",
            instead="Type section.field=value, for example train.train_iters=10",
        )
        if override is not None and (strict or override.key in _TYPES):
            _apply(request, override.key, Given(override.value, override.text))


def _apply(request: Request, key: str, given: Given) -> None:
    if key in _WHOLE:
        # Megatron Bridge writes sections that are off as null.
        instead = f"Type {key}.field=value"
        require(given.value is None, f"{key} is a section, and cannot be {given}", instead=instead)
        return
    if key not in _TYPES:
        _refuse_misspelled(key)
        return
    value = convert(given, _TYPES[key], key)
    section, _, name = key.partition(".")
    if section in _WHOLE:
        setattr(getattr(request, section), name, value)
    elif value is None:
        request.settings.pop(key, None)
    else:
        request.settings[key] = value


def _refuse_misspelled(key: str) -> None:
    """Raise for what is most likely a misspelled setting: `profiling.profile_step_ends`, `profilng.…`, `train.train_iter`."""
    section = next(iter(difflib.get_close_matches(key.partition(".")[0], _WHOLE, n=1, cutoff=0.8)), "")
    # `train` and `model` have many fields that are not read here; only a name that is nearly one of these is refused.
    nearest = difflib.get_close_matches(key, _TYPES, n=1, cutoff=0.6 if section else 0.9)
    fields = ", ".join(name.partition(".")[2] for name in _TYPES if name.startswith(f"{section}."))
    require(
        not section and not nearest,
        f"{key} does not exist",
        instead=f"Type {nearest[0]}" if nearest else f"Fields of {section}: {fields}",
    )


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
        nsys_options=tuple(each for each in executor.get("launcher.nsys_extra_args", of=list) or () if isinstance(each, str)),
        nsys_prefix_gpu_metrics=executor.get("launcher.nsys_gpu_metrics") is True,
        environment={str(key): str(value) for key, value in (executor.get("env_vars", of=dict) or {}).items()},
    )
    if executor.name != "LocalExecutor":
        ssh = f" at {job.ssh_tunnel.get('host')}" if job.ssh_tunnel is not None else ""
        image = f" in the image {executor.get('container_image')}" if executor.get("container_image") else ""
        request.elsewhere = f"{executor.name}{ssh} runs the job{image}, not this machine"
    _apply_task(request, job)
    path = job.captures_path(request.profiling.output_dir)
    if path is not None and job.ssh_tunnel is None:
        request.output_dir = Path(path)
    return request


def _apply_task(request: Request, job: Job) -> None:
    task = job.task
    if task.name != "Script":
        apply_known(request, lambda key: task.get(f"config.{key}"))
        return
    recipe = (task.get("metadata", of=dict) or {}).get(SETTINGS_KEY)
    apply_arguments(request, recipe.split() if isinstance(recipe, str) else (), strict=False)
    for file in config_files(job.arguments):
        apply_file(request, file)
    apply_arguments(request, job.arguments, strict=False)
