"""Finds a NeMo-Run experiment on this machine: `$NEMORUN_HOME/experiments/<title>/<id>`. Submits nothing, loads no nemo_run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.experiments.serialized import Built, load

_TASKS_FILE = "_TASKS"


@dataclass(frozen=True)
class Job:
    """A task of an experiment and where it runs.

    Args:
        name: the job's id; of a group with the task's number after it, `group[1]`.
        task: what runs.
        executor: where.
    """

    name: str
    task: Built
    executor: Built


def find_experiment(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of an experiment.

    Args:
        name: its directory or one of its jobs', its id, or its title (then the newest of that title).
        environ: where NEMORUN_HOME may be set.

    Raises:
        ProfilingConfigError: there is none.
    """
    home = _home(environ)
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


def experiment_of(run: Path, environ: Mapping[str, str] = os.environ) -> tuple[Path, str | None] | None:
    """The experiment that is meant where a run is asked for, and the job if one is named; None when none is meant.

    Args:
        run: a directory or file of captures, which wins; else an experiment's id or title, with `/job` after it for one of
            its jobs.
        environ: where NEMORUN_HOME may be set.
    """
    if run.exists():
        if (run / _TASKS_FILE).is_file():
            return run, None
        parent = run.absolute().parent
        return (parent, run.name) if run.is_dir() and (parent / _TASKS_FILE).is_file() else None
    name, _, job = str(run).partition("/")
    for wanted, of_it in ((str(run), None), (name, job or None)):
        try:
            return find_experiment(wanted, environ), of_it
        except ProfilingConfigError:
            continue
    return None


def read_jobs(directory: Path) -> list[Job]:
    """The jobs of an experiment, a group's tasks one by one.

    Args:
        directory: what `find_experiment` gave.

    Raises:
        ProfilingConfigError: the experiment cannot be read.
    """
    try:
        pairs = json.loads((directory / _TASKS_FILE).read_text(encoding="utf-8"))
        jobs = [(load(job), task if isinstance(task, str) else "") for job, task in pairs]
    except (OSError, ValueError) as error:
        if isinstance(error, ProfilingConfigError):
            raise
        raise ProfilingConfigError(f"{directory / _TASKS_FILE} cannot be read", why=str(error)) from error
    found = []
    for job, serialized in jobs:
        tasks = _listed(load(serialized) if serialized else [])
        executors = _listed(job.get("executors") or job.get("executor"))
        for number, task in enumerate(tasks):
            name = job.get("id", "job") + (f"[{number}]" if len(tasks) > 1 else "")
            found.append(Job(name, task, executors[number] if number < len(executors) else executors[0]))
    return found


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("NEMORUN_HOME") or Path.home() / ".nemo_run") / "experiments"


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]
