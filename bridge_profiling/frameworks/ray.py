"""Profiling of Ray workers, by NeMo RL's convention: environment variables select steps and workers.

Ray's driver gives each worker its runtime environment, with Ray's nsys around the selected ones; a worker marks where its steps
begin and end. Never starts Ray, and never changes a worker that is not selected.

    # the driver: NRL_NSYS_PROFILE_STEP_RANGE=2:3 NRL_NSYS_WORKER_PATTERNS="*policy*" python train.py
    worker = Policy.options(runtime_env=worker_runtime_env("policy_worker", rank=0)).remote(rank=0)

    # the worker
    self.profiling = WorkerProfiling("policy_worker", rank=rank, world_size=2)
    with self.profiling.step(step):
        ...
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bridge_profiling.common.errors import CaptureError, TrainingLogger, require
from bridge_profiling.common.launch_env import LAUNCH_VARIABLE
from bridge_profiling.frameworks.session import Closing, OutputDir, Session, config_from
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.nsys.command import NsysVersion, find_nsys, ray_options
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE, ProfilingConfig, resolve_output_dir
from bridge_profiling.settings.ray import RayRequest, changed_by_a_shell, check_options

logger = TrainingLogger(__name__)

#: Next to the workers' own directories: reports under the names that nsys gave them.
_REPORTS = "nsight"


# -- the driver -------------------------------------------------------------------------------------------------------


def worker_runtime_env(
    worker: str,
    *,
    rank: int = 0,
    runtime_env: Mapping[str, Any] | None = None,
    output_dir: OutputDir = None,
    cuda: bool | None = None,
) -> dict[str, Any]:
    """The runtime environment to start a worker with: the given one, with additions for its profile.

    A worker that is not selected gets the given environment unchanged. A selected one also gets Ray's `nsight` options (none
    for the torch profiler), and the request and the output directory in its environment variables.

    Args:
        worker: name of the worker's group, which the patterns of NRL_NSYS_WORKER_PATTERNS match.
        rank: the worker's rank in its group; the report's name has both.
        runtime_env: the runtime environment without profiling. Options in its `nsight` override the default ones.
        output_dir: root of captures, on a file system that the workers' machines share; else BRIDGE_PROFILING_DIR. Without
            either, reports stay where Ray keeps them, in the session's `logs/nsight`.
        cuda: whether the worker has a GPU, whose profiler API then opens nsys' capture range; else an NVTX range does. None
            means whether the Ray cluster has any.

    Raises:
        ProfilingConfigError: contradictory or malformed variables, or a directory that a shell would change.
    """
    given = dict(runtime_env or {})
    request = RayRequest.from_environment()
    if request is None or not request.selects(worker):
        return given
    variables = {**given.get("env_vars", {}), **request.variables()}
    root = output_dir or variables.get(OUTPUT_DIR_VARIABLE) or os.environ.get(OUTPUT_DIR_VARIABLE)
    variables[OUTPUT_DIR_VARIABLE] = str(resolve_output_dir(ProfilingConfig(), root))
    if request.profiler == "nsys":
        # Ray starts `python`, whatever interpreter the workers have otherwise; `uv run …` names none.
        interpreter = str(given.get("py_executable", ""))
        interpreter = interpreter if os.path.isabs(interpreter) else sys.executable
        variables["PATH"] = f"{os.path.dirname(interpreter)}:{variables.get('PATH', '${PATH}')}"
        theirs = given.pop("_nsight", None) or given.get("nsight")
        asked = check_options(theirs if isinstance(theirs, Mapping) else {}, name='runtime_env["nsight"]')
        given["nsight"], warnings = ray_options(
            [*asked.items(), *request.extra_options.items()],
            cuda=_cluster_has_gpus() if cuda is None else cuda,
            report=f"{folder_of(worker)}_rank-{rank}_{request.window}",
            reports=_made(Path(variables[OUTPUT_DIR_VARIABLE], _REPORTS)) if root else None,
            # Workers usually run in the same container as the driver.
            version=_nsys_here(),
        )
        for warning in warnings:
            logger.warning("%s", warning)
    logger.info("worker %s, rank %d: %s will capture steps %s", worker, rank, request.profiler, request.window)
    return given | {"env_vars": variables}


def folder_of(worker: str) -> str:
    """The name of a worker's group as a directory name."""
    return re.sub(r"[^\w.-]+", "_", worker, flags=re.ASCII)


def _made(reports: Path) -> Path | None:
    """Create the directory, because nsys writes to a temporary one if it is missing; None if that fails."""
    require(
        not changed_by_a_shell(str(reports)),
        f"nsys' reports cannot go to {str(reports)!r}",
        why="Ray starts nsys through a shell, which would change that path",
        instead=f"Choose an {OUTPUT_DIR_VARIABLE} of letters, digits and ._/- only",
    )
    try:
        reports.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("nsys' reports stay in Ray's session directory: %s", error)
        return None
    return reports


@functools.cache
def _nsys_here() -> NsysVersion | None:
    try:
        return find_nsys()
    except CaptureError:
        return None


def _cluster_has_gpus() -> bool:
    """Whether the connected cluster has GPUs; NeMo RL expects them, so True without a connection."""
    ray = sys.modules.get("ray")
    return ray is None or not ray.is_initialized() or ray.cluster_resources().get("GPU", 0) > 0


# -- a worker ---------------------------------------------------------------------------------------------------------


class WorkerProfiling(Closing):
    """Captures the requested steps in one Ray worker, and writes their manifest.

    Create it in every rank of the group, in the worker, after torch.distributed is initialized if the worker uses it. Captures
    go to `<output_dir>/<worker>/`, a run of its own for `bridge-profiling analyze` and the other commands.

    An exception in a step inside the window ends and writes the capture, because another step may never come; later steps run
    unprofiled. The worker's end by `exit_actor()`, `__ray_terminate__` or the release of its last handle also ends it.
    `ray.kill` leaves a process no time: nsys still reports the steps so far, a torch trace is lost, and the manifest says so.
    So it does where Ray's own threads abort a worker that ends (Ray 2.60 on a busy machine, `Mutex corrupt`): `close` is safer.

    Args:
        worker: name of the worker's group, as passed to `worker_runtime_env`.
        rank: the worker's rank in the group.
        world_size: number of workers in the group.
        layout: the group's parallel layout, for manifests and `profile_ranks="pp"`.
        output_dir: root of the captures of all groups; overrides the settings' and BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig`, which override the variables. Without variables, they alone
            count: `use_pytorch_profiler=True, profile_step_start=2, profile_step_end=3`. A worker that the variables do not
            select is not profiled, whatever its settings. All ranks are profiled unless `profile_ranks` says otherwise.

    Raises:
        ProfilingConfigError: an invalid request, or an unknown setting.
    """

    def __init__(
        self,
        worker: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        layout: ParallelLayout | None = None,
        output_dir: OutputDir = None,
        **settings: Any,
    ) -> None:
        config = _config_of(worker, settings)
        chosen = output_dir or config.output_dir or os.environ.get(OUTPUT_DIR_VARIABLE)
        if not chosen and not config.enabled and config.slow_iteration_factor is None and config.on_demand is None:
            # The hook gets a directory below, which must not look like one that the user chose to send requests to.
            config.on_demand = False
        facts: dict[str, object] = {"name": "ray", "worker": worker}
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            context = ray.get_runtime_context()
            facts |= {"version": ray.__version__, "actor_id": context.get_actor_id()}
            # Workers of one driver choose the same folder by this name; they may be unable to communicate.
            session = context.get_session_name() if hasattr(context, "get_session_name") else context.gcs_address
            os.environ.setdefault(LAUNCH_VARIABLE, f"{session}/{context.get_job_id()}")
        root = resolve_output_dir(config, output_dir) / folder_of(worker)
        self._session = Session(config, root, close_on_error=True)
        self._session.start(facts, rank=rank, world_size=world_size, layout=layout)

    def step(self, step: int) -> AbstractContextManager:
        """A context manager around step `step`, counted from 1 like the variables, across resumes."""
        return self._session.step(step)

    def begin_step(self, step: int) -> None:
        """Begin step `step`, for code that a `with` cannot enclose; ends an open step."""
        self._session.begin_iteration(step)

    def end_step(self, error: BaseException | None = None) -> None:
        """End the step, which `error` ended, if given."""
        self._session.end_iteration(error)

    def range(self, name: str) -> AbstractContextManager:
        """A context manager that names a phase of the step (`forward-backward`, `optimizer`, …) inside the window."""
        return self._session.range(name)

    def close(self, error: BaseException | None = None) -> None:
        """Write the capture after the worker's last step. More steps may follow, unprofiled."""
        self.end_step(error)
        self._session.close(error)

    _close = close


def _config_of(worker: str, settings: Mapping[str, Any]) -> ProfilingConfig:
    """The request of the variables and the settings for this worker."""
    asked: dict[str, Any] = {"profile_ranks": "all"}
    request = RayRequest.from_environment()
    if request is not None:
        if not request.selects(worker):
            return ProfilingConfig(on_demand=False)
        asked |= {"profile_step_start": request.window.start, "profile_step_end": request.window.end}
        asked["use_nsys_profiler" if request.profiler == "nsys" else "use_pytorch_profiler"] = True
    return config_from("WorkerProfiling", {**asked, **settings})
