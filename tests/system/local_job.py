"""Runs a script under NeMo-Run's torchrun on this machine, with NsysPlugin: `local_job.py SCRIPT`. Fails if the job does."""

import sys

import nemo_run as run

from bridge_profiling.plugins import NsysPlugin

if __name__ == "__main__":
    marked = ["--capture-range=nvtx", "--nvtx-capture", "bridge_profiling_window"]
    window = {"profile_step_start": 2, "profile_step_end": 4}
    plugin = NsysPlugin(**window, export_sqlite=True, nsys_gpu_metrics=True, nsys_extra_args=marked)
    with run.Experiment("local", executor=run.LocalExecutor(launcher="torchrun")) as experiment:
        task = run.Script(path=sys.argv[1], entrypoint="python", args=["x=[1,2]"])
        experiment.add(task, plugins=[plugin], name="t")
        experiment.run(tail_logs=True)
    assert experiment.status(return_dict=True)["t"]["status"].name == "SUCCEEDED"
