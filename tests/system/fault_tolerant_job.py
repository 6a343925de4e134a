"""Submits gpt_tiny with plugins that `launch/experiment.py` has no option for, and waits for it.

fault_tolerant_job.py JOB section.field=value …

Exit code 1 if the job fails. Runs as a program, because NeMo-Run's fdl_runner imports a driver's module in every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import nemo_run as run
from torchx.specs import AppState

from bridge_profiling.config import ProfilingConfig
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin
from launch.tasks import pretrain_partial, pretrain_script
from recipes.executors import local_torchrun


def nsys() -> NsysPlugin:
    return NsysPlugin(profile_step_start=4, profile_step_end=6, profile_ranks=[0, 1])


def script(overrides: list[str]) -> run.Script:
    return pretrain_script("gpt_tiny", overrides)


def partial(overrides: list[str]) -> run.Partial:
    return pretrain_partial("gpt_tiny", overrides)


def hangs_noticed_soon(overrides: list[str], executor: run.LocalExecutor) -> tuple[run.Script, list[run.Plugin]]:
    """The torch profiler, and a monitor that waits no longer than 10 s for a heartbeat."""
    torch_profiler = PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6, profile_ranks=[0, 1])
    watched = FaultTolerancePlugin(rank_heartbeat_timeout=10, initial_rank_heartbeat_timeout=120)
    return script(overrides), [torch_profiler, watched]


def nsys_after(overrides: list[str], executor: run.LocalExecutor) -> tuple[run.Partial, list[run.Plugin]]:
    return partial(overrides), [FaultTolerancePlugin(), nsys()]


def nsys_by_hand(overrides: list[str], executor: run.LocalExecutor) -> tuple[run.Partial, list[run.Plugin]]:
    """On the launcher and in the config, as one who uses no plugin for it."""
    executor.launcher = run.Torchrun(nsys_profile=True)
    task = partial(overrides)
    task.config.profiling = run.Config(ProfilingConfig, use_nsys_profiler=True, profile_step_start=4, profile_step_end=6)
    return task, [FaultTolerancePlugin()]


JOBS: dict[str, Callable] = {job.__name__: job for job in (hangs_noticed_soon, nsys_after, nsys_by_hand)}


if __name__ == "__main__":
    name, *settings = sys.argv[1:]
    executor = local_torchrun(ntasks_per_node=2)
    task, plugins = JOBS[name](settings, executor)
    with run.Experiment("watched") as experiment:
        experiment.add(task, executor=executor, name="watched", plugins=plugins)
        experiment.run(detach=False, tail_logs=True)
    sys.exit(experiment.jobs[0].state != AppState.SUCCEEDED)
