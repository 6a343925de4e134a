"""Submits gpt_tiny with plugins that `launch/experiment.py` has no option for, and waits for it.

fault_tolerant_job.py nsys|hang section.field=value …

`hang`: the torch profiler, and a monitor that waits no longer than 10 s for a heartbeat. Exit code 1 if the job fails. Runs as
a program, because NeMo-Run's fdl_runner imports a driver's module in every rank.
"""

from __future__ import annotations

import sys

import nemo_run as run
from torchx.specs import AppState

from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin
from launch.tasks import pretrain_partial, pretrain_script
from recipes.executors import local_torchrun

WINDOW = {"profile_step_start": 4, "profile_step_end": 6, "profile_ranks": [0, 1]}

if __name__ == "__main__":
    name, *settings = sys.argv[1:]
    if name == "hang":
        watched = FaultTolerancePlugin(rank_heartbeat_timeout=10, initial_rank_heartbeat_timeout=120)
        task, plugins = pretrain_script("gpt_tiny", settings), [PyTorchProfilerPlugin(**WINDOW), watched]
    else:
        task, plugins = pretrain_partial("gpt_tiny", settings), [FaultTolerancePlugin(), NsysPlugin(**WINDOW)]
    with run.Experiment("watched") as experiment:
        experiment.add(task, executor=local_torchrun(ntasks_per_node=2), name="watched", plugins=plugins)
        experiment.run(detach=False, tail_logs=True)
    sys.exit(experiment.jobs[0].state != AppState.SUCCEEDED)
