"""Finds NeMo-Run experiments on this machine and reads their jobs as data, with the directory each writes captures to.

An experiment is `$NEMORUN_HOME/experiments/<title>/<id>`. NeMo-Run's own reader imports the task's modules, torch and
megatron-core among them; this one imports, builds and runs nothing that the experiment names.
"""

from __future__ import annotations

import base64
import json
import os
import posixpath
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge_profiling.common.errors import ProfilingConfigError, TraceError, require
from bridge_profiling.common.regular_files import read_regular
from bridge_profiling.common.typed_json import read_typed
from bridge_profiling.plugins.batch_script import path_in_job
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE

_TASKS_FILE = "_TASKS"

_OUTPUT_DIR = "profiling.output_dir"

#: Bytes of the file and of all that it unpacks to, and values in that. zlib unpacks a thousandfold, and Python's objects take
#: thirty times the bytes of the shortest JSON. A recipe's task has 200 kB and 10,000 values.
_MAX_BYTES, _MAX_UNPACKED, _MAX_WRITTEN = 16 << 20, 64 << 20, 2_000_000

#: Values that are built of it, and how deep they are in each other. Objects refer to each other by name, so that few can stand
#: for exponentially many.
_MAX_VALUES, _DEEPEST = 200_000, 64

#: How Fiddle writes a name or number in `Attr(name='x')`, `Index(index=0)` and `Key(key='x')`.
_KEY = re.compile(r"""(?:'(?P<single>[^'\\]*)'|"(?P<double>[^"\\]*)"|(?P<number>-?\d{1,18}))\)""", re.ASCII)

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
    file, reader = experiment / _TASKS_FILE, _Reader()
    try:
        pairs = read_typed(reader.decode(read_regular(file, _MAX_BYTES)), list[list[Any]], "the experiment")
        jobs = []
        for pair in pairs:
            serialized_job, serialized_tasks = pair if len(pair) == 2 else (None, None)
            job = reader.built(reader.read(serialized_job))
            # A script without a task of its own has no text here.
            tasks = _listed(reader.read(serialized_tasks)) if serialized_tasks and isinstance(serialized_tasks, str) else []
            executors = [reader.built(each) for each in _listed(job.get("executors") or job.get("executor"))]
            for number, task in enumerate(map(reader.built, tasks)):
                name = (job.get("id", of=str) or "job") + (f"[{number}]" if len(tasks) > 1 else "")
                jobs.append(Job(name, task, executors[min(number, len(executors) - 1)]))
    except (OSError, TraceError, ValueError, LookupError, RecursionError, ProfilingConfigError) as error:
        why = error.what if isinstance(error, ProfilingConfigError) else str(error)
        raise ProfilingConfigError(f"{file} cannot be read", why=why[:300], instead=_CAPTURES) from error
    return jobs


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


@dataclass(frozen=True)
class _Object:
    """An object of Fiddle's JSON: its type, and keys with values, each an object of its own or a plain value."""

    type: dict[str, Any]
    items: list[list[Any]]
    metadata: Any = None


@dataclass(frozen=True)
class _Document:
    root: dict[str, Any]
    objects: dict[str, _Object]


class _Reader:
    """Reads Fiddle's JSON, with bounds on all that it has read. Imports and calls nothing that is named there."""

    def __init__(self) -> None:
        self._bytes = self._written = self._values = 0

    def decode(self, text: bytes) -> Any:
        """JSON. Raises ValueError."""
        self._written += sum(map(text.count, (b",", b"[", b"{")))
        if self._written > _MAX_WRITTEN:
            raise ValueError(f"it has more than {_MAX_WRITTEN:,} values")
        return json.loads(text)

    def read(self, text: object) -> Any:
        """What a text stands for. Raises ValueError or LookupError if NeMo-Run did not write it."""
        if not isinstance(text, str):
            raise ValueError("it is not text")
        unpacker = zlib.decompressobj()
        try:
            unpacked = unpacker.decompress(base64.urlsafe_b64decode(text), _MAX_UNPACKED - self._bytes + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        self._bytes += len(unpacked)
        if self._bytes > _MAX_UNPACKED:
            raise ValueError(f"it unpacks to more than {_MAX_UNPACKED >> 20} MiB")
        document = read_typed(self.decode(unpacked), _Document, "the document")
        return self._value(document.root, document.objects, _DEEPEST)

    def built(self, value: object) -> Built:
        """The value itself. Raises ValueError if it is not a class or function with arguments."""
        if not isinstance(value, Built):
            raise ValueError("a job, a task or an executor in it is something else")
        return value

    def _value(self, node: object, objects: Mapping[str, _Object], depth: int) -> Any:
        """A node, whose objects refer to each other by name."""
        self._values += 1
        if self._values > _MAX_VALUES or not depth:
            raise ValueError(f"it has more than {_MAX_VALUES:,} values, or values nested more than {_DEEPEST} times")
        kind = _text(node, "type")
        if kind == "leaf":
            return _entry(node, "value")
        if kind == "pyref":
            return f"{_text(node, 'module')}.{_text(node, 'name')}"
        if kind != "ref":
            return None
        referred = objects[_text(node, "key")]
        items = {_key(key): self._value(value, objects, depth - 1) for key, value in referred.items}
        name = _text(referred.type, "name")
        if name == "dict":
            return items
        if name in ("list", "tuple", "set", "frozenset"):
            return list(items.values())
        target = None
        if isinstance(referred.metadata, dict) and referred.metadata.get("type") == "ref":
            described = {_key(key): value for key, value in objects[_text(referred.metadata, "key")].items}
            target = self._value(described["fn_or_cls"], objects, depth - 1) if "fn_or_cls" in described else None
        if not isinstance(target, str):
            target = f"{_text(referred.type, 'module')}.{name}"
        return Built(target, {str(key): value for key, value in items.items()})


def _entry(node: object, name: str) -> Any:
    if not isinstance(node, dict) or name not in node:
        raise ValueError(f"a value in it has no {name!r}")
    return node[name]


def _text(node: object, name: str) -> str:
    text = _entry(node, name)
    if not isinstance(text, str):
        raise ValueError(f"{name!r} of a value in it is not text")
    return text


def _key(text: object) -> str | int:
    """The key in `Attr(name='x')`, `Index(index=0)` or `Key(key='x')`; a key of another kind is its text."""
    if not isinstance(text, str):
        raise ValueError("a key in it is not text")
    written = text.partition("=")[2]
    found = _KEY.fullmatch(written)
    if found is None:
        return written
    return int(found["number"]) if found["number"] else found["single"] or found["double"] or ""


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]
