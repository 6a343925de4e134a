"""Runs a script with a plugin under NeMo-Run on this machine, and fails if it does.

local_job.py '{"script": …, "ranks": 2, "launcher": "torchrun", "plugin": "NsysPlugin", "settings": {…}}'
"""

import json
import sys

import nemo_run as run

from bridge_profiling import plugins

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    executor = run.LocalExecutor(ntasks_per_node=asked["ranks"], launcher=asked["launcher"])
    with run.Experiment("local", executor=executor) as experiment:
        task = run.Script(path=asked["script"], entrypoint="python", args=["x=[1,2]"])
        experiment.add(task, plugins=[getattr(plugins, asked["plugin"])(**asked["settings"])], name="t")
        experiment.run(tail_logs=True)
    assert experiment.status(return_dict=True)["t"]["status"].name == "SUCCEEDED"
