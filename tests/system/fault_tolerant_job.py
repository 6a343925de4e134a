"""Submits gpt_tiny under the torch profiler and a monitor that waits no longer than 10 s for a heartbeat.

fault_tolerant_job.py section.field=value …

Exit code 1 if the job fails. Runs as a program, because NeMo-Run's fdl_runner imports a driver's module in every rank.
"""

import sys

import nemo_run as run
from torchx.specs import AppState

from bridge_profiling.plugins import FaultTolerancePlugin, PyTorchProfilerPlugin
from launch.tasks import pretrain_script
from recipes.executors import local_torchrun

if __name__ == "__main__":
    watched = FaultTolerancePlugin(rank_heartbeat_timeout=10, initial_rank_heartbeat_timeout=120)
    profiler = PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6, profile_ranks=[0, 1])
    with run.Experiment("watched") as experiment:
        task = pretrain_script("gpt_tiny", sys.argv[1:])
        experiment.add(task, executor=local_torchrun(ntasks_per_node=2), name="watched", plugins=[profiler, watched])
        experiment.run(detach=False, tail_logs=True)
    sys.exit(experiment.jobs[0].state != AppState.SUCCEEDED)
