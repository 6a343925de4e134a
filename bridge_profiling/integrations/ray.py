"""Profiling of Ray workers, by NeMo RL's convention: environment variables say which steps, of which workers.

The driver gives each worker its runtime environment, with Ray's nsys around the selected ones; a worker tells where its
steps begin and end. Never starts Ray, and never changes a worker that is not selected.

    # the driver: NRL_NSYS_PROFILE_STEP_RANGE=2:3 NRL_NSYS_WORKER_PATTERNS="*policy*" python train.py
    worker = Policy.options(runtime_env=worker_runtime_env("policy_worker", rank=0)).remote(rank=0)

    # the worker
    self.profiling = WorkerProfiling("policy_worker", rank=rank, world_size=2)
    with self.profiling.step(step):
        ...
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.config import OUTPUT_DIR_VARIABLE, ProfilingConfig, resolve_output_dir
from bridge_profiling.errors import CaptureError, ProfilingConfigError
from bridge_profiling.launch_env import LAUNCH_VARIABLE
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.nsys.command import ray_options
from bridge_profiling.nsys.version import NsysVersion, find_nsys
from bridge_profiling.ray_request import RayRequest, changed_by_a_shell, check_options

logger = logging.getLogger(__name__)

#: Beside the workers' own directories: reports under the names that nsys wrote them.
_REPORTS = "nsight"


# -- the driver -------------------------------------------------------------------------------------------------------


def worker_runtime_env(
    worker: str,
    *,
    rank: int = 0,
    runtime_env: Mapping[str, Any] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    cuda: bool | None = None,
) -> dict[str, Any]:
    """The runtime environment to start a worker with: the given one, with what its profile needs.

    A worker that is not selected gets what was given, unchanged. A selected one gets Ray's `nsight` options (or none, for
    the torch profiler), and in its environment variables what was asked for, and where captures go.

    Args:
        worker: name of the worker's group; the patterns of NRL_NSYS_WORKER_PATTERNS are matched against it.
        rank: the worker's rank in its group; with the group's name it names the report.
        runtime_env: what the worker is started with anyway. Options of a `nsight` in it win over the default ones.
        output_dir: root of what is written, on a file system that the workers' machines share; else BRIDGE_PROFILING_DIR.
            Without either, reports stay where Ray keeps them, the session's `logs/nsight`.
        cuda: whether the worker has a GPU, whose profiler API then opens nsys' capture range; else an NVTX range does. None
            is whether the Ray cluster has any.

    Raises:
        ProfilingConfigError: the variables contradict each other, or cannot be read; a directory that nsys cannot be told of.
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
        reports = _made(Path(variables[OUTPUT_DIR_VARIABLE], _REPORTS)) if root else None
        theirs = given.pop("_nsight", None) or given.get("nsight")
        given["nsight"] = nsight_options(
            worker,
            rank=rank,
            request=request,
            cuda=_cluster_has_gpus() if cuda is None else cuda,
            given=theirs if isinstance(theirs, Mapping) else {},
            reports=reports,
        )
    logger.info("worker %s, rank %d: %s will capture steps %s", worker, rank, request.profiler, request.window)
    return given | {"env_vars": variables}


def nsight_options(
    worker: str,
    *,
    rank: int,
    request: RayRequest,
    cuda: bool,
    given: Mapping[str, object] | None = None,
    reports: Path | None = None,
) -> dict[str, str]:
    """What Ray's `runtime_env={"nsight": …}` takes: options of `nsys profile` without their dashes.

    Args:
        worker: name of the worker's group.
        rank: its rank there.
        request: what is asked for; its extra options win over all others.
        cuda: whether the worker has a GPU.
        given: options over the default ones.
        reports: directory of the reports; None leaves it to Ray.
    """
    theirs = check_options(given or {}, name='runtime_env["nsight"]')
    options, warnings = ray_options(
        [*theirs.items(), *request.extra_options.items()],
        cuda=cuda,
        report=f"{folder_of(worker)}_rank-{rank}_{request.window}",
        reports=reports,
        # Workers run in the same container as the driver, as a rule.
        version=_nsys_here(),
    )
    for warning in warnings:
        logger.warning("%s", warning)
    return options


def _made(reports: Path) -> Path | None:
    """The directory, made here, since nsys writes to the temporary one where it is missing.

    Raises:
        ProfilingConfigError: nsys could not be told of it.
    """
    if changed_by_a_shell(str(reports)):
        raise ProfilingConfigError(
            f"nsys' reports cannot go to {str(reports)!r}",
            why="Ray starts nsys through a shell, which would change that path",
            instead=f"Choose an {OUTPUT_DIR_VARIABLE} of letters, digits and ._/- alone",
        )
    try:
        reports.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("nsys' reports stay in Ray's session directory: %s", error)
        return None
    return reports


def folder_of(worker: str) -> str:
    """The name of a worker's group as that of a directory."""
    return re.sub(r"[^\w.-]+", "_", worker, flags=re.ASCII)


@functools.cache
def _nsys_here() -> NsysVersion | None:
    try:
        return find_nsys()
    except CaptureError:
        return None


def _cluster_has_gpus() -> bool:
    """Whether the connected cluster has GPUs; without one, as NeMo RL expects."""
    ray = sys.modules.get("ray")
    return ray is None or not ray.is_initialized() or ray.cluster_resources().get("GPU", 0) > 0


# -- a worker ---------------------------------------------------------------------------------------------------------


class WorkerProfiling:
    """Captures the steps asked for in one Ray worker, and writes a manifest of it: the training hook, by steps.

    Make it in the worker, when torch.distributed is up, if the worker uses it, and in every rank of the group. Captures go
    to `<output_dir>/<worker>/`, a run of its own for `bridge-profiling analyze` and the others.

    A step that ends by an exception inside the window ends the capture, which is written, since nobody knows whether
    another step will come; steps after it run unprofiled. So does the end of the worker by `exit_actor()`,
    `__ray_terminate__` or its last handle's end. `ray.kill` leaves a process no time: nsys' report of the steps so far is
    there all the same, a torch trace is not, and the manifest says so.

    Args:
        worker: name of the worker's group, as `worker_runtime_env` got it.
        rank: the worker's rank in the group.
        world_size: number of workers in the group.
        layout: the group's parallel layout, for manifests and `profile_ranks="pp"`.
        output_dir: root of what is written by all groups; wins over the settings' and over BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig`, which win over the variables. Where the variables ask for
            nothing, they alone count: `use_pytorch_profiler=True, profile_step_start=2, profile_step_end=3`. A worker that
            the variables leave out is not profiled, whatever its settings are. All ranks are profiled unless
            `profile_ranks` says otherwise.

    Raises:
        ProfilingConfigError: a request that cannot work, or a setting that does not exist.
    """

    def __init__(
        self,
        worker: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        layout: ParallelLayout | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        config = _config_of(worker, settings)
        self._step: AbstractContextManager | None = None
        chosen = output_dir or config.output_dir or os.environ.get(OUTPUT_DIR_VARIABLE)
        if not chosen and not config.enabled and config.slow_iteration_factor is None and config.on_demand is None:
            # The hook is given a directory below, and must not take it for one that the user chose to have requests in.
            config.on_demand = False
        root = resolve_output_dir(config, output_dir) / folder_of(worker)
        self._hook = ProfilingHook(config, rank=rank, world_size=world_size, layout=layout, output_dir=root)
        self._hook.facts.update(_framework(worker))
        _name_launch()
        self._hook.__enter__()

    def step(self, step: int) -> AbstractContextManager:
        """A context manager around step `step`, as the variables count it: from 1, and on after a resume."""
        return _Step(self, step)

    def begin_step(self, step: int) -> None:
        """Step `step` begins, where no `with` can be written around it; a step that was not ended is ended by it."""
        self.end_step()
        self._step = self._hook.iteration(step)
        self._step.__enter__()

    def end_step(self, error: BaseException | None = None) -> None:
        """The step is over, by an exception or not."""
        step, self._step = self._step, None
        if step is None:
            return
        ends_capture = error is not None and self._hook.capturing
        step.__exit__(type(error) if error else None, error, None)
        if ends_capture:
            self.close(error)

    def range(self, name: str) -> AbstractContextManager:
        """A context manager that names a phase of the step (`forward-backward`, `optimizer`, …) inside the window."""
        return self._hook.range(name)

    def close(self, error: BaseException | None = None) -> None:
        """The worker's last step is over: what was captured is written. More steps may follow, unprofiled."""
        self.end_step()
        self._hook.__exit__(type(error) if error else None, error, None)

    def __enter__(self) -> WorkerProfiling:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)


class _Step:
    __slots__ = ("_number", "_profiling")

    def __init__(self, profiling: WorkerProfiling, number: int) -> None:
        self._profiling, self._number = profiling, number

    def __enter__(self) -> None:
        self._profiling.begin_step(self._number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._profiling.end_step(error)


def _config_of(worker: str, settings: Mapping[str, Any]) -> ProfilingConfig:
    """What the variables and the settings ask of this worker."""
    # Not above: it loads torch, which a driver does without.
    from bridge_profiling.integrations.callback_hook import config_from

    asked: dict[str, Any] = {"profile_ranks": "all"}
    request = RayRequest.from_environment()
    if request is not None and not request.selects(worker):
        return ProfilingConfig(on_demand=False)
    if request is not None:
        asked |= {"profile_step_start": request.window.start, "profile_step_end": request.window.end}
        asked["use_nsys_profiler" if request.profiler == "nsys" else "use_pytorch_profiler"] = True
    return config_from("WorkerProfiling", {**asked, **settings})


def _framework(worker: str) -> dict[str, object]:
    """What the manifest says of this worker."""
    context = _context()
    if context is None:
        return {"name": "ray", "worker": worker}
    return {
        "name": "ray",
        "version": sys.modules["ray"].__version__,
        "worker": worker,
        "actor": context.get_actor_name() or None,
        "actor_id": context.get_actor_id(),
        "job_id": context.get_job_id(),
        "node_id": context.get_node_id(),
    }


def _name_launch() -> None:
    """Have the workers of a driver agree on a folder without asking each other, which they may have no way to."""
    context = _context()
    if context is not None:
        session = context.get_session_name() if hasattr(context, "get_session_name") else context.gcs_address
        os.environ.setdefault(LAUNCH_VARIABLE, f"{session}/{context.get_job_id()}")


def _context() -> Any:
    ray = sys.modules.get("ray")
    return ray.get_runtime_context() if ray is not None and ray.is_initialized() else None
