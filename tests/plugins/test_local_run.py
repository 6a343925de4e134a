"""Under a real experiment on this machine, a script's process receives its arguments as they were written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import sys
import nemo_run as run
from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin

if __name__ == "__main__":
    profiler, script = sys.argv[1:]
    plugin = {"nsys": NsysPlugin, "torch": PyTorchProfilerPlugin}[profiler]
    task = run.Script(path=script, entrypoint="python", args=["model.sizes=[1,2]"])
    with run.Experiment("arguments", executor=run.LocalExecutor(ntasks_per_node=2, launcher="torchrun")) as experiment:
        plugins = [plugin(profile_step_start=1, profile_step_end=2, profile_ranks=[0, 1])]
        experiment.add(task, plugins=plugins, name="t")
        experiment.run()
    assert experiment.status(return_dict=True)["t"]["status"].name == "SUCCEEDED"
"""

SCRIPT = """
import json, os, pathlib, sys
where = pathlib.Path(os.environ["BRIDGE_PROFILING_DIR"])
where.mkdir(parents=True, exist_ok=True)
(where / f"{os.environ['RANK']}.json").write_text(json.dumps(sys.argv[1:]))
"""

#: Stands in for nsys: says which options it knows, and runs what comes after them, as nsys does. (The real one:
#: tests/system/test_nsys.py.)
NSYS = """#!/bin/bash
if [[ "$2" == --help ]]; then echo "  --trace=  --output=  --capture-range="; exit; fi
shift
while [[ "$1" == -* ]]; do
  if [[ "$1" == -? ]]; then shift; fi
  shift
done
exec "$@"
"""


@pytest.mark.needs("megatron")
@pytest.mark.parametrize("profiler", ["torch", "nsys"])
def test_list_overrides_arrive_and_nothing_is_added(profiler, tmp_path):
    environment = {
        **os.environ,
        "NEMORUN_HOME": str(tmp_path),
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    for name, text in (("driver.py", DRIVER), ("script.py", SCRIPT), ("nsys", NSYS)):
        (tmp_path / name).write_text(text)
    (tmp_path / "nsys").chmod(0o755)
    command = [sys.executable, str(tmp_path / "driver.py"), profiler, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    arguments = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("experiments/**/profiles/*.json"))]
    assert len(arguments) == 2
    for received in arguments:
        assert received[0] == "model.sizes=[1,2]"
        assert "profiling.profile_ranks=[0,1]" in received
        assert received[-1] == "profiling.record_shapes=false"
