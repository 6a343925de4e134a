"""Under a real experiment on this machine, a script receives its arguments as they were written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import sys
import nemo_run as run
from bridge_profiling.plugins import PyTorchProfilerPlugin

if __name__ == "__main__":
    task = run.Script(path=sys.argv[1], entrypoint="python", args=["model.sizes=[1,2]"])
    with run.Experiment("torch", executor=run.LocalExecutor(ntasks_per_node=2, launcher="torchrun")) as experiment:
        plugins = [PyTorchProfilerPlugin(profile_step_start=1, profile_step_end=2, profile_ranks=[0, 1])]
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


@pytest.mark.system
@pytest.mark.needs("megatron")
def test_a_script_that_ignores_its_overrides_receives_them_and_ends_with_what_it_captured(tmp_path):
    paths = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    here = {"env": {**os.environ, "NEMORUN_HOME": str(tmp_path), "PATH": paths}, "cwd": tmp_path}
    for name, text in (("driver.py", DRIVER), ("script.py", SCRIPT)):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "driver.py", tmp_path / "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, **here)
    files = tmp_path.glob("experiments/torch/*/t/profiles/*.json")
    received = [json.loads(path.read_text()) for path in files]
    assert [(arguments[0], arguments[-1]) for arguments in received] == [
        ("model.sizes=[1,2]", "profiling.record_shapes=false")
    ] * 2
    assert all("profiling.profile_ranks=[0,1]" in arguments for arguments in received)
    said = "t captured nothing: the script does not read profiling overrides, unless it failed early"
    assert done.stderr.count(said) == 1
    report = [sys.executable, "-m", "bridge_profiling.cli", "report", "torch"]
    done = subprocess.run(report, capture_output=True, text=True, check=False, **here)
    # The directory exists: the script of this test writes its arguments there.
    assert done.returncode == 1
    assert "captured nothing: the script does not read profiling overrides" in done.stderr
