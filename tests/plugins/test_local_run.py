"""Under a real experiment on this machine, a script's process receives its arguments as they were written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: One process for both, since loading NeMo-Run takes longer than its experiments.
DRIVER = """
import sys
import nemo_run as run
from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin

if __name__ == "__main__":
    for profiler, plugin in (("torch", PyTorchProfilerPlugin), ("nsys", NsysPlugin)):
        task = run.Script(path=sys.argv[1], entrypoint="python", args=["model.sizes=[1,2]"])
        with run.Experiment(profiler, executor=run.LocalExecutor(ntasks_per_node=2, launcher="torchrun")) as experiment:
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A NEMORUN_HOME with the experiments `torch` and `nsys`, each of two ranks."""
    home = tmp_path_factory.mktemp("local")
    environment = {**os.environ, "NEMORUN_HOME": str(home), "PATH": f"{home}:{Path(sys.executable).parent}:/usr/bin:/bin"}
    for name, text in (("driver.py", DRIVER), ("script.py", SCRIPT), ("nsys", NSYS)):
        (home / name).write_text(text)
    (home / "nsys").chmod(0o755)
    command = [sys.executable, str(home / "driver.py"), str(home / "script.py")]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (home / "stderr").write_text(done.stderr)
    return home


@pytest.mark.system
@pytest.mark.needs("megatron")
@pytest.mark.parametrize("profiler", ["torch", "nsys"])
def test_list_overrides_arrive_and_nothing_is_added(profiler, finished):
    files = sorted(finished.glob(f"experiments/{profiler}/*/t/profiles/*.json"))
    arguments = [json.loads(path.read_text()) for path in files]
    assert len(arguments) == 2
    for received in arguments:
        assert received[0] == "model.sizes=[1,2]"
        assert "profiling.profile_ranks=[0,1]" in received
        assert received[-1] == "profiling.record_shapes=false"


@pytest.mark.system
@pytest.mark.needs("megatron")
def test_a_script_that_ignores_its_overrides_ends_with_what_it_captured(finished):
    said = (finished / "stderr").read_text()
    assert said.count("t captured nothing: the script does not read profiling overrides, unless it failed early") == 2
    done = subprocess.run(
        [sys.executable, "-m", "bridge_profiling.cli", "report", "torch"],
        env={**os.environ, "NEMORUN_HOME": str(finished)}, cwd=finished, capture_output=True, text=True, check=False,
    )  # fmt: skip
    # The directory exists: the script of this test writes its arguments there.
    assert done.returncode == 1
    assert "captured nothing: the script does not read profiling overrides" in done.stderr
