"""Finds NeMo-Run experiments on this machine and reads their jobs as data, with the directory each writes captures to.

An experiment is `$NEMORUN_HOME/experiments/<title>/<id>`. NeMo-Run's own reader imports the task's modules, torch and
megatron-core among them; this one imports, builds and runs nothing that the experiment names.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import posixpath
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge_profiling.config import OUTPUT_DIR_VARIABLE
from bridge_profiling.errors import ProfilingConfigError, require
from bridge_profiling.plugins.batch_script import path_in_job

_TASKS_FILE = "_TASKS"

_OUTPUT_DIR = "profiling.output_dir"

#: Where `make profile` has NeMo-Run keep its experiments, in the checkout.
_CHECKOUT_HOME = ".runs"


@dataclass(frozen=True)
class Built:
    """A class or function, by its full name, with the arguments given to it; arguments left to their defaults are missing."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of `target`."""
        return self.target.rpartition(".")[2]

    def get(self, path: str, default: Any = None) -> Any:
        """An argument, or with `launcher.nsys_profile` an argument's argument; `default` where it was not given."""
        value: Any = self
        for name in path.split("."):
            given = value.arguments if isinstance(value, Built) else value
            if not isinstance(given, Mapping) or name not in given:
                return default
            value = given[name]
        return value


@dataclass(frozen=True)
class Job:
    """A task of an experiment and its executor; `name` is the job's id, `group[1]` for the second task of a group."""

    name: str
    task: Built
    executor: Built

    @property
    def directory(self) -> str:
        """Name of the job's directory in the experiment; empty where NeMo-Run assigned none."""
        return Path(str(self.executor.get("job_dir") or "")).name

    @property
    def ssh_tunnel(self) -> Built | None:
        """The executor's SSH tunnel, None where it has none."""
        tunnel = self.executor.get("tunnel")
        return tunnel if isinstance(tunnel, Built) and tunnel.name == "SSHTunnel" else None

    @property
    def has_overrides(self) -> bool:
        """Whether the task is a script that a plugin gave settings, which it may ignore."""
        return self.task.name == "Script" and any("profiling." in str(argument) for argument in self.task.get("args") or [])

    def captures_path(self, output_dir: str | None = None) -> str | None:
        """The directory the job writes captures to, here or behind `ssh_tunnel`; None if the experiment does not say.

        `output_dir` overrides the task's `profiling.output_dir`.
        """
        path = output_dir or self._output_dir() or self.executor.get(f"env_vars.{OUTPUT_DIR_VARIABLE}")
        if not isinstance(path, str):
            return None
        below = path_in_job(path)
        if below is None:
            return path
        if not self.directory:
            return None
        job_dir = self.executor.get("job_dir")
        if self.ssh_tunnel is not None:
            job_dir = posixpath.join(str(self.ssh_tunnel.get("job_dir")), self.directory)
        return posixpath.join(job_dir, below)

    def _output_dir(self) -> object:
        if self.task.name != "Script":
            return self.task.get(f"config.{_OUTPUT_DIR}")
        # Loaded here: OmegaConf takes longer to import than an experiment takes to read.
        from bridge_profiling.overrides import parse_override

        overrides = [parse_override(str(argument)) for argument in self.task.get("args") or []]
        return {override.key: override.value for override in overrides if override is not None}.get(_OUTPUT_DIR)


def find_experiment(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of an experiment, given that directory, one of its jobs', its id, or its title (the newest wins)."""
    home = Path(environ.get("NEMORUN_HOME") or Path.home() / ".nemo_run") / "experiments"
    homes = [home, Path(_CHECKOUT_HOME) / "experiments"]
    job_of = [Path(name).absolute().parent] if Path(name).is_dir() else []
    for place in (
        Path(name),
        *job_of,
        *(place for each in homes for place in (each / name.rpartition("_")[0] / name, each / name)),
    ):
        if (place / _TASKS_FILE).is_file():
            return place
    for place in (Path(name), *(each / name for each in homes)):
        newest = max(place.glob(f"*/{_TASKS_FILE}"), key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest is not None:
            return newest.parent
    raise ProfilingConfigError(
        f"the experiment {name!r} does not exist",
        why=f"it is neither a directory with a {_TASKS_FILE} file, nor an id or a title in {home} or {homes[1]}",
        instead="Type an experiment's id or directory, or a setting as section.field=value. To write an experiment without"
        " submitting it, call experiment.dryrun(delete_exp_dir=False)",
    )


def experiment_of(run: Path, environ: Mapping[str, str] = os.environ) -> tuple[Path, str | None] | None:
    """The experiment, and its job if given (`/job`), that RUN on a command line names; None if RUN names captures."""
    if run.exists():
        if (run / _TASKS_FILE).is_file():
            return run, None
        parent = run.absolute().parent
        return (parent, run.name) if run.is_dir() and (parent / _TASKS_FILE).is_file() else None
    name, _, job = str(run).partition("/")
    for wanted, job_name in ((str(run), None), (name, job or None)):
        try:
            return find_experiment(wanted, environ), job_name
        except ProfilingConfigError:
            continue
    return None


def read_jobs(experiment: Path) -> list[Job]:
    """The jobs of an experiment, each task of a group as a job of its own."""
    file = experiment / _TASKS_FILE
    try:
        pairs = [(job, task if isinstance(task, str) else "") for job, task in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ProfilingConfigError(f"{file} cannot be read", why=str(error)) from error
    jobs = []
    for serialized_job, serialized_tasks in pairs:
        job = load(serialized_job)
        tasks = _listed(load(serialized_tasks) if serialized_tasks else [])
        executors = _listed(job.get("executors") or job.get("executor"))
        for number, task in enumerate(tasks):
            name = job.get("id", "job") + (f"[{number}]" if len(tasks) > 1 else "")
            jobs.append(Job(name, task, executors[number] if number < len(executors) else executors[0]))
    return jobs


def locate_captures(experiment: Path, job_name: str | None = None) -> tuple[Job, str]:
    """The one job of an experiment that writes captures (`job_name`: its name or directory), and their directory."""
    jobs = [job for job in read_jobs(experiment) if job_name in (None, job.name, job.directory)]
    profiled = [(job, path) for job in jobs if (path := job.captures_path()) is not None]
    captures = "Type the directory of captures itself"
    require(jobs or job_name is None, f"the experiment {experiment.name} has no job {job_name!r}", instead=captures)
    unknown = f"no job of the experiment {experiment.name} says where it writes captures"
    require(profiled, unknown, why="none was submitted with a profiler's plugin", instead=captures)
    names = [job.name for job, _ in profiled]
    several = f"several jobs of {experiment.name} were profiled: {', '.join(names)}"
    require(len(profiled) == 1, several, instead=f"Name one of them: {experiment.name}/{names[0]}")
    return profiled[0]


def load(text: str) -> Any:
    """Read a task, executor or job that NeMo-Run serialized: a Built, or a list of them."""
    try:
        document = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
        return _value(document["root"], document["objects"])
    except (zlib.error, ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        raise ProfilingConfigError(
            f"this is not a task or an executor as NeMo-Run writes it: {error}",
            instead="Type the directory of an experiment, or of one of its jobs",
        ) from error


def _value(node: Mapping[str, Any], objects: Mapping[str, Any]) -> Any:
    """A node of Fiddle's JSON, whose objects refer to each other by name."""
    if node["type"] == "leaf":
        return node["value"]
    if node["type"] == "pyref":
        return f"{node['module']}.{node['name']}"
    if node["type"] != "ref":
        return None
    referred = objects[node["key"]]
    kind, metadata = referred["type"], referred.get("metadata")
    items = {_key(key): _value(value, objects) for key, value in referred["items"]}
    if kind["name"] == "dict":
        return items
    if kind["name"] in ("list", "tuple", "set", "frozenset"):
        return list(items.values())
    target = None
    if isinstance(metadata, Mapping) and metadata.get("type") == "ref":
        described = {_key(key): value for key, value in objects[metadata["key"]]["items"]}
        target = _value(described["fn_or_cls"], objects) if "fn_or_cls" in described else None
    return Built(target or f"{kind['module']}.{kind['name']}", {str(key): value for key, value in items.items()})


def _key(text: str) -> Any:
    """The key in `Attr(name='x')`, `Index(index=0)` or `Key(key='x')`."""
    return ast.literal_eval(text.partition("=")[2].removesuffix(")"))


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]
