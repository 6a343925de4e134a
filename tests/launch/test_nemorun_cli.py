"""The NeMo-Run command line trains with a plugin, and its traps end with an error and an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bridge_profiling.errors import ProfilingConfigError

pytest.importorskip("nemo_run")
pytest.importorskip("megatron.core")

from launch.nemorun_cli import check_arguments, main

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "nemorun_cli.py"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A NEMORUN_HOME of its own, and no environment is activated."""
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path


def cli(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--yes", "--factory=gpt_tiny", *arguments]
    return subprocess.run(command, cwd=home, capture_output=True, text=True)


@pytest.mark.system
def test_it_trains_and_profiles(home):
    window = ["run.plugins.profile_step_start=2", "run.plugins.profile_step_end=3", "run.plugins.profile_ranks=[0,1]"]
    plugin = ["run.executor=local_torchrun", "run.plugins=pytorch_profiler", *window]
    done = cli(home, *plugin, "config.train.train_iters=4")
    assert done.returncode == 0, done.stdout + done.stderr
    traces = sorted(path.name for path in home.glob("experiments/**/profiles/torch/iter-2-3/*.json.gz"))
    assert traces == ["rank-0.pt.trace.json.gz", "rank-1.pt.trace.json.gz"]


@pytest.mark.system
def test_a_job_that_fails_exits_with_1(home):
    done = cli(home, "run.executor=local", "config.train.micro_batch_size=3")
    assert done.returncode == 1
    assert "ended as FAILED" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--factory=gpt_tiny run.plugins=nsys", "no executor is given"),
        ("run.executor=local", "no recipe is given"),
        ("--factory=gpt_tiny run.executor=lokal", "Type local, local_torchrun"),
        ("--factory=gpt_tiny run.executor=local run.plugins=[nsys,pytorch_profiler]", "exclude each other"),
        ("--factory=gpt_tiny run.executor=local config.train.train_itrs=4", "train_iters"),
        ("--factory=gpt_tiny run.executor=local train.train_iters=4", "Type config.train.train_iters=4"),
    ],
)
def test_a_usage_error_exits_with_2_before_anything_runs(home, monkeypatch, capsys, arguments, named):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--yes", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
    assert not list(home.glob("experiments/**/*"))


def test_a_dry_run_applies_the_plugins(home, monkeypatch, capfd):
    arguments = ["--dryrun", "--factory=gpt_tiny", "run.executor=local", "run.plugins=fault_tolerance"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    main()
    assert "ft_launcher" in capfd.readouterr().out


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
def test_arguments_that_nemo_run_would_mangle_are_refused_and_no_others(argument):
    with pytest.raises(ProfilingConfigError):
        check_arguments([argument])
    check_arguments(["run.plugins=plugins.NsysPlugin", "run.plugins[0].x=1", "config.a=run.b", "run.executor.time=1"])
