"""Finds NeMo-Run experiments on this machine and reads their jobs as data, with the directory each writes captures to.

An experiment is `$NEMORUN_HOME/experiments/<title>/<id>`. NeMo-Run's own reader imports the task's modules, torch and
megatron-core among them; this one imports, builds and runs nothing that the experiment names.
"""

from __future__ import annotations

import ast
import base64
import functools
import json
import os
import posixpath
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge_profiling.common.errors import ProfilingConfigError, TraceError, one_line, require
from bridge_profiling.common.regular_files import read_regular
from bridge_profiling.plugins.batch_script import path_in_job
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE

_TASKS_FILE = "_TASKS"

_OUTPUT_DIR = "profiling.output_dir"

#: Bytes of the file, and of each value that it unpacks to: zlib unpacks a thousandfold. A recipe's task has 200 kB.
_MAX_BYTES = 8 << 20

_CAPTURES = "Type the directory of captures itself"

#: Jobs that an error names.
_NAMED = 12

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

    def get(self, path: str, default: Any = None, of: type = object) -> Any:
        """An argument, or with `launcher.nsys_profile` an argument's argument; `default` where it was not given.

        Raises ProfilingConfigError if it is neither None nor an instance of `of`.
        """
        value: Any = self
        for name in path.split("."):
            given = value.arguments if isinstance(value, Built) else value
            if not isinstance(given, Mapping) or name not in given:
                return default
            value = given[name]
        if value is not None and not isinstance(value, of):
            raise ProfilingConfigError(f"{path} of {self.name} is of type {type(value).__name__}, not {of.__name__}")
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
        return Path(self.executor.get("job_dir", of=str) or "").name

    @property
    def ssh_tunnel(self) -> Built | None:
        """The executor's SSH tunnel, None where it has none."""
        tunnel = self.executor.get("tunnel")
        return tunnel if isinstance(tunnel, Built) and tunnel.name == "SSHTunnel" else None

    @property
    def has_overrides(self) -> bool:
        """Whether the task is a script with a setting that switches a profiler on, which it may ignore."""
        return self.task.name == "Script" and any("_profiler=true" in argument.lower() for argument in self.arguments)

    @property
    def arguments(self) -> list[str]:
        """The arguments of a script that are texts."""
        return [each for each in self.task.get("args", of=list) or [] if isinstance(each, str)]

    def captures_path(self, output_dir: str | None = None) -> str | None:
        """The directory the job writes captures to, here or behind `ssh_tunnel`; None if the experiment does not say.

        `output_dir` overrides the task's `profiling.output_dir`.
        """
        path = output_dir or self._output_dir() or self.executor.get(f"env_vars.{OUTPUT_DIR_VARIABLE}")
        if not isinstance(path, str) or "\0" in path:
            return None
        below = path_in_job(path)
        if below is None:
            return path
        if not self.directory:
            return None
        job_dir = self.executor.get("job_dir", of=str)
        if self.ssh_tunnel is not None:
            job_dir = posixpath.join(self.ssh_tunnel.get("job_dir", of=str) or "", self.directory)
        return posixpath.join(job_dir, below)

    def _output_dir(self) -> object:
        if self.task.name != "Script":
            return self.task.get(f"config.{_OUTPUT_DIR}")
        # Loaded here: OmegaConf takes longer to import than an experiment takes to read.
        from bridge_profiling.settings.overrides import parse_override

        overrides = [parse_override(argument) for argument in self.arguments]
        return {override.key: override.value for override in overrides if override is not None}.get(_OUTPUT_DIR)


def find_experiment(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of an experiment, given that directory, one of its jobs', its id, or its title (the newest wins)."""
    home = Path(environ.get("NEMORUN_HOME") or os.path.expanduser("~/.nemo_run")) / "experiments"
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
    """The jobs of an experiment, each task of a group as a job of its own.

    Raises:
        ProfilingConfigError: its file cannot be read, exceeds its bounds, or is not what NeMo-Run writes.
    """
    file = experiment / _TASKS_FILE
    try:
        return [job for pair in json.loads(read_regular(file, _MAX_BYTES)) for job in _jobs(*pair)]
    except (OSError, TraceError, ProfilingConfigError) as error:
        why = error.what if isinstance(error, ProfilingConfigError) else str(error)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, zlib.error) as error:
        why = f"NeMo-Run did not write it ({one_line(error)})"
    raise ProfilingConfigError(f"{file} cannot be read", why=why[:300], instead=_CAPTURES)


def _jobs(serialized_job: str, serialized_tasks: str) -> Iterator[Job]:
    job = _read(serialized_job)
    # A script without a task of its own has no text here.
    tasks = _listed(_read(serialized_tasks)) if serialized_tasks else []
    executors = _listed(job.get("executors") or job.get("executor"))
    for number, task in enumerate(tasks):
        executor = executors[min(number, len(executors) - 1)]
        if not isinstance(task, Built) or not isinstance(executor, Built):
            raise TypeError("a task or an executor in it is something else")
        yield Job((job.get("id", of=str) or "job") + (f"[{number}]" if len(tasks) > 1 else ""), task, executor)


def locate_captures(experiment: Path, job_name: str | None = None) -> tuple[Job, str]:
    """The one job of an experiment that writes captures (`job_name`: its name or directory), and their directory."""
    every = read_jobs(experiment)
    jobs = [job for job in every if job_name in (None, job.name, job.directory)]
    instead = f"Type {experiment.name}/ and one of {_listing(every)}" if every else _CAPTURES
    require(jobs or job_name is None, f"the experiment {experiment.name} has no job {job_name!r}", instead=instead)
    profiled = [(job, path) for job in jobs if (path := job.captures_path()) is not None]
    unknown = f"no job of the experiment {experiment.name} says where it writes captures"
    require(profiled, unknown, why="none was submitted with a profiler's plugin", instead=_CAPTURES)
    several = f"several jobs of {experiment.name} were profiled: {_listing([job for job, _ in profiled])}"
    require(len(profiled) == 1, several, instead=f"Name one of them: {experiment.name}/{profiled[0][0].name}")
    return profiled[0]


def _listing(jobs: list[Job]) -> str:
    more = f" and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else ""
    return ", ".join(job.name for job in jobs[:_NAMED]) + more


def _read(text: str) -> Any:
    """The value that Fiddle's JSON stands for. Imports and calls nothing that is named there."""
    unpacker = zlib.decompressobj()
    document = json.loads(unpacker.decompress(base64.urlsafe_b64decode(text), _MAX_BYTES))
    # Names with a part of a character could not be printed.
    json.dumps(document, ensure_ascii=False).encode()
    objects = document["objects"]

    def value_of(node: dict[str, Any]) -> Any:
        kind = node["type"]
        if kind == "leaf":
            return node["value"]
        if kind == "pyref":
            return f"{node['module']}.{node['name']}"
        return made(node["key"]) if kind == "ref" else None

    # Objects refer to each other by name, so that few can stand for exponentially many: each is made once.
    @functools.cache
    def made(name: str) -> Any:
        kind, metadata = objects[name]["type"], objects[name].get("metadata") or {}
        items = {_key(key): value_of(value) for key, value in objects[name]["items"]}
        if kind["name"] == "dict":
            return items
        if kind["name"] in ("list", "tuple", "set", "frozenset"):
            return list(items.values())
        target = f"{kind['module']}.{kind['name']}"
        if metadata.get("type") == "ref":
            described = {_key(key): value for key, value in objects[metadata["key"]]["items"]}
            target = value_of(described["fn_or_cls"]) if "fn_or_cls" in described else target
        return Built(target, {str(key): value for key, value in items.items()})

    return value_of(document["root"])


def _key(text: str) -> str | int:
    """The key in `Attr(name='x')`, `Index(index=0)` or `Key(key='x')`; a key of another kind is its text."""
    written = text.partition("=")[2].removesuffix(")")
    try:
        key = ast.literal_eval(written)
    except (ValueError, SyntaxError):
        return written
    return key if isinstance(key, str | int) else written


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]
