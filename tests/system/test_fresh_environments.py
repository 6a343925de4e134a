"""What a stranger gets: a fresh clone trains and profiles, and the plugins work where there is no torch."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]


def clean_environment(**more: str) -> dict[str, str]:
    """The environment of somebody who has not built this project yet."""
    ours = (
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "NEMORUN_HOME",
        "UV_CACHE_DIR",
        "MAKEFLAGS",
        "MAKELEVEL",
        "TMPDIR",
        "TORCHDYNAMO_DISABLE",
    )
    return {name: value for name, value in os.environ.items() if name not in ours} | more


def test_make_profile_on_a_fresh_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    base_python = Path(sys.base_prefix) / "bin" / "python3"
    for _ in range(2):  # the second time nothing is set up anew
        done = subprocess.run(
            ["make", "profile", f"PYTHON={base_python}"], cwd=clone, env=clean_environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert "window 4-6" in done.stdout
    manifests = [json.loads(path.read_text()) for path in (clone / ".runs").rglob("rank-*.json")]
    assert len(manifests) == 4
    assert all(manifest["status"] == "complete" for manifest in manifests)
    assert all(manifest["captured"]["iterations"] == [4, 5] for manifest in manifests)
    assert (
        subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True).stdout == ""
    ), "the run changed tracked files, or left some that git does not ignore"


def test_the_plugins_work_where_there_is_no_torch(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".venv", ".cache", ".runs", ".git", "site"))
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    subprocess.run(
        [python, "tools/install.py", "--constraint", "constraints.txt", "."], cwd=source, env=clean_environment(), check=True
    )
    script = tmp_path / "submit.py"
    script.write_text(
        textwrap.dedent("""
        import importlib.util, sys
        assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("megatron") is None
        import bridge_profiling.plugins
        assert "nemo_run" not in sys.modules
        import nemo_run as run
        from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin

        task = run.Script("train.py", entrypoint="python")
        executor = run.LocalExecutor(ntasks_per_node=2, launcher="torchrun")
        PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6).setup(task, executor)
        assert "profiling.use_pytorch_profiler=true" in task.args, task.args
        FaultTolerancePlugin().setup(task, executor)
        assert isinstance(executor.launcher, run.FaultTolerance)
        NsysPlugin(profile_step_start=4, profile_step_end=6).setup(run.Script("train.py"), run.LocalExecutor())
        print("plugins work")
        """)
    )
    done = subprocess.run([python, str(script)], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "plugins work" in done.stdout
