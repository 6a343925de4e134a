"""The NeMo-Run command line trains with a plugin, and its traps end with an error and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_profiling.errors import ProfilingConfigError

pytestmark = pytest.mark.needs("megatron", "nemo_run")

ROOT = Path(__file__).resolve().parents[2]


def cli(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NEMORUN_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}  # no environment is activated
    command = [sys.executable, str(ROOT / "launch/nemorun_cli.py"), *arguments]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.system
def test_it_trains_and_profiles(tmp_path):
    done = cli(
        tmp_path,
        "--yes",
        "--factory=gpt_tiny",
        "run.executor=local_torchrun",
        "run.plugins=pytorch_profiler",
        "run.plugins.profile_step_start=2",
        "run.plugins.profile_step_end=3",
        "run.plugins.profile_ranks=[0,1]",
        "config.train.train_iters=4",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    traces = sorted(path.name for path in tmp_path.glob("experiments/**/profiles/torch/iter-2-3/*.json.gz"))
    assert traces == ["rank-0.pt.trace.json.gz", "rank-1.pt.trace.json.gz"]


@pytest.mark.system
def test_a_job_that_fails_exits_with_1(tmp_path):
    done = cli(tmp_path, "--yes", "--factory=gpt_tiny", "run.executor=local", "config.train.micro_batch_size=3")
    assert done.returncode == 1
    assert "ended as FAILED" in done.stderr


@pytest.mark.system
def test_a_dry_run_applies_the_plugins(tmp_path):
    done = cli(tmp_path, "--dryrun", "--factory=gpt_tiny", "run.executor=local", "run.plugins=fault_tolerance")
    assert done.returncode == 0, done.stderr
    assert "ft_launcher" in done.stdout


#: Requests that are refused, and what the refusal names.
REFUSED = [
    (["--factory=gpt_tiny", "run.plugins=nsys"], "no executor is given"),
    (["--factory=gpt_tini", "run.executor=local"], "gpt_tiny"),
    (["--factory=gpt_tiny", "run.executor=local", "run.plugins=[nsys,pytorch_profiler]"], "exclude each other"),
    (["--factory=gpt_tiny", "run.executor=local", "config.train.train_itrs=4"], "train_iters"),
]

#: Runs the command for one argument list after the other: loading NeMo-Run takes longer than all of them.
ALL = """
import contextlib, io, json, sys
from launch.nemorun_cli import main

results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main() or 0
        except SystemExit as ending:
            code = ending.code
    results.append([code, said.getvalue()])
print("RESULTS" + json.dumps(results))
"""


@pytest.mark.system
def test_a_usage_error_exits_with_2_before_anything_runs(tmp_path):
    environment = {**os.environ, "NEMORUN_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    requests = json.dumps([["--yes", *arguments] for arguments, _ in REFUSED])
    command = [sys.executable, "-c", ALL, requests]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert "RESULTS" in done.stdout, done.stdout + done.stderr
    results = json.loads(done.stdout.rpartition("RESULTS")[2])
    assert len(results) == len(REFUSED)
    for (arguments, named), (code, said) in zip(REFUSED, results, strict=True):
        assert code == 2, (arguments, said)
        assert named in said, arguments
    assert not list(tmp_path.glob("experiments/**/*"))


@pytest.mark.parametrize(
    "argument",
    [
        "--bogus",
        "run.plugins.memory_snapshot_path=/data/run.1/a",
        "run.plugins.memory_snapshot_path=/plugins.d/a",
        "run.executor.job_dir=/executor.d",
        "run.plugins[0].memory_snapshot_path=/plugins/a",
        "run.plugins=nsys(profile_step_start=3)",
    ],
)
def test_arguments_that_nemo_run_would_mangle_are_refused(argument):
    from launch.nemorun_cli import check_arguments

    with pytest.raises(ProfilingConfigError):
        check_arguments([argument])


def test_other_arguments_pass():
    from launch.nemorun_cli import check_arguments

    check_arguments(
        ["run.plugins=bridge_profiling.plugins.NsysPlugin", "run.plugins[0].x=1", "config.a=run.b", "run.executor.time=1"]
    )
