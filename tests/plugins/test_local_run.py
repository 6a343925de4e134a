"""Under a real experiment on this machine, a script receives its arguments as they were written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system import local_job
from tests.system.jobs import ended_well, environment

SCRIPT = """
import json, os, pathlib, sys
where = pathlib.Path(os.environ["BRIDGE_PROFILING_DIR"])
where.mkdir(parents=True, exist_ok=True)
(where / f"{os.environ['RANK']}.json").write_text(json.dumps(sys.argv[1:]))
"""


@pytest.mark.system
@pytest.mark.needs("megatron")
def test_a_script_that_ignores_its_overrides_receives_them_and_ends_with_what_it_captured(tmp_path):
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    here = {"env": environment(NEMORUN_HOME=str(tmp_path), PATH=path), "cwd": tmp_path}
    (tmp_path / "script.py").write_text(SCRIPT)
    job = {"script": f"{tmp_path}/script.py", "ranks": 2, "launcher": "torchrun", "plugin": "PyTorchProfilerPlugin"}
    job["settings"] = {"profile_step_start": 1, "profile_step_end": 2, "profile_ranks": [0, 1]}
    done = ended_well([sys.executable, local_job.__file__, json.dumps(job)], **here)
    received = [json.loads(path.read_text()) for path in tmp_path.glob("experiments/local/*/t/profiles/*.json")]
    ends = [(arguments[0], arguments[-1]) for arguments in received]
    assert ends == [("x=[1,2]", "profiling.record_shapes=false")] * 2
    assert all("profiling.profile_ranks=[0,1]" in arguments for arguments in received)
    said = "t captured nothing: the script does not read profiling overrides, unless it failed early"
    assert done.stderr.count(said) == 1
    report = [sys.executable, "-m", "bridge_profiling.cli", "report", "local"]
    done = subprocess.run(report, capture_output=True, text=True, check=False, **here)
    # The directory exists: the script of this test writes its arguments there.
    assert done.returncode == 1
    assert "captured nothing: the script does not read profiling overrides" in done.stderr
