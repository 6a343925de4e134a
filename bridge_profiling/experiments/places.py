"""Where a job of an experiment writes its captures, as the machine calls that place that one can reach it from."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from bridge_profiling.config import OUTPUT_DIR_VARIABLE
from bridge_profiling.experiments.find import Job
from bridge_profiling.experiments.serialized import Built

#: NeMo-Run's name for the job's directory inside a container.
_IN_CONTAINER = "/nemo_run"

_SETTING = "profiling.output_dir"


@dataclass(frozen=True)
class Place:
    """A directory of captures.

    Args:
        path: on this machine, or on the one that the tunnel leads to.
        tunnel: the executor's SSH tunnel; None for this machine.
    """

    path: str
    tunnel: Built | None = None


def place_of(executor: Built, chosen: str | None) -> Place | None:
    """Where a job on an executor writes; None where nothing says so, as for a job that is not profiled.

    Args:
        executor: the job's.
        chosen: `profiling.output_dir`, which wins.
    """
    place = chosen or (executor.get("env_vars") or {}).get(OUTPUT_DIR_VARIABLE)
    if not isinstance(place, str):
        return None
    tunnel, job_dir = executor.get("tunnel"), executor.get("job_dir")
    ssh = tunnel if isinstance(tunnel, Built) and tunnel.name == "SSHTunnel" else None
    if place != _IN_CONTAINER and not place.startswith(f"{_IN_CONTAINER}/"):
        return Place(place, ssh)
    if not isinstance(job_dir, str) or not job_dir:
        return None
    if ssh is not None:
        job_dir = posixpath.join(str(ssh.get("job_dir")), posixpath.basename(job_dir))
    return Place(posixpath.join(job_dir, place.removeprefix(_IN_CONTAINER).lstrip("/")), ssh)


def chosen_output_dir(job: Job) -> str | None:
    """`profiling.output_dir` as the task sets it: a script by an argument, else in its config."""
    if job.task.name == "Script":
        # Imported here, since omegaconf may be missing in a container, where a directory of captures is named instead.
        from bridge_profiling.overrides import parse_override

        overrides = [parse_override(str(argument)) for argument in job.task.get("args") or []]
        values = [override.value for override in overrides if override is not None and override.key == _SETTING]
        found = values[-1] if values else None
    else:
        config = job.task.get("config")
        profiling = config.get("profiling") if isinstance(config, Built) else None
        found = profiling.get("output_dir") if isinstance(profiling, Built) else None
    return found if isinstance(found, str) else None
