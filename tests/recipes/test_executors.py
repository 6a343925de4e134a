"""Executors are real, find our code and our interpreter, and refuse what would go wrong after submission."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nemo_run as run
import pytest

from bridge_profiling.errors import ProfilingConfigError
from recipes import executors
from recipes.executor_checks import check_submission

ROOT = Path(__file__).resolve().parents[2]


def test_local_is_one_process_without_a_launcher():
    executor = executors.local()
    assert isinstance(executor, run.LocalExecutor)
    assert (executor.launcher, executor.ntasks_per_node) == (None, 1)


def test_local_torchrun_starts_its_ranks_under_torchrun():
    executor = executors.local_torchrun(ntasks_per_node=3)
    assert (executor.launcher, executor.nproc_per_node()) == ("torchrun", 3)


@pytest.mark.parametrize("make", [executors.local, executors.local_torchrun])
def test_a_local_job_finds_this_interpreter_and_this_checkout(make):
    env = make(env={"A": "1"}).env_vars
    assert env["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert (env["OMP_NUM_THREADS"], env["A"]) == ("1", "1")


def test_slurm_starts_one_rank_a_gpu_under_torchrun():
    executor = executors.slurm("team", "batch", nodes=2, gpus_per_node=8, time="1-00:00:00")
    executor.get_launcher()
    assert (executor.nnodes(), executor.nproc_per_node(), executor.gpus_per_node) == (2, 8, 8)


def test_slurm_without_a_launcher_starts_one_task_a_rank():
    executor = executors.slurm("team", ntasks_per_node=4, launcher=None, cpus_per_task=2)
    assert (executor.launcher, executor.ntasks_per_node, executor.cpus_per_task) == (None, 4, 2)


def test_slurm_takes_a_container_and_its_mounts():
    executor = executors.slurm("team", container_image="image", mounts=["/data:/data:ro"], env={"HF_HOME": "/data/hf"})
    assert executor.container_mounts == ["/data:/data:ro"]
    assert executor.env_vars["HF_HOME"] == "/data/hf"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"account": ""}, "account"),
        ({"nodes": 0}, "nodes"),
        ({"gpus_per_node": 0}, "per_node"),
        ({"ntasks_per_node": True}, "ntasks_per_node"),
        ({"time": "half an hour"}, "time"),
        ({"mounts": ["/data"]}, "mount"),
        ({"mounts": ["/data:/data"], "container_image": None}, "no container"),
        ({"mounts": ["/data:/nemo_run"]}, "/nemo_run"),
        ({"mounts": ["/data:/nemo_run/data"]}, "/nemo_run"),
        ({"mounts": ["/a,b:/data"]}, "commas"),
        ({"env": {"A": 1}}, "not text"),
        ({"env": {"A": "a\0b"}}, "not text"),
        ({"env": {"A-B": "x"}}, "name"),
        ({"env": {"PATH": "/opt/bin:$PATH"}}, "setup_lines='export PATH=\"/opt/bin:\\$PATH\"'"),
        ({"env": {"LD_LIBRARY_PATH": "${LD_LIBRARY_PATH}:/x"}}, "refers to itself"),
        ({"setup_lines": "cd /home/me/nemo_run", "container_image": None}, "setup_lines"),
        ({"srun_args": ["--bcast=/home/me/nemo_run"], "container_image": None}, "srun_args"),
        ({"additional_parameters": {"chdir": "/home/me/nemo_run"}, "container_image": None}, "additional_parameters"),
        ({"venv": "venv", "container_image": None}, "venv"),
        ({"tunnel": run.LocalTunnel(job_dir="/elsewhere")}, "LocalTunnel"),
        ({"tunnel": run.SSHTunnel(host="h", user="u", job_dir="/a/nemo_run/b"), "container_image": None}, "/nemo_run"),
        ({"host": "h", "job_dir": "/a/nemo_run", "container_image": None}, "/nemo_run"),
        ({"host": "h"}, "without job_dir"),
        ({"host": "h", "job_dir": "~/jobs"}, "absolute"),
        ({"host": "h", "job_dir": "/my jobs"}, "absolute"),
        ({"host": "", "job_dir": "/jobs"}, "host"),
        ({"job_dir": "/jobs"}, "without host"),
        ({"host": "h", "tunnel": run.LocalTunnel(job_dir="")}, "tunnel and host"),
        ({"gpus": 3}, "gpus"),
        ({"launcher": "torch-run"}, "launcher"),
    ],
)
def test_slurm_refuses_what_would_fail_in_the_queue(options, named):
    arguments = {"account": "team", "container_image": "image"} | options
    with pytest.raises(ProfilingConfigError, match=named):
        executors.slurm(**arguments)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_local_torchrun_refuses_a_number_of_ranks_that_is_none(count):
    with pytest.raises(ProfilingConfigError, match="ntasks_per_node"):
        executors.local_torchrun(ntasks_per_node=count)


def test_a_home_named_like_nemo_runs_placeholder_is_refused_without_a_container(monkeypatch):
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", "/home/me/nemo_run")
    with pytest.raises(ProfilingConfigError, match="NEMORUN_HOME"):
        executors.slurm("team")
    executors.slurm("team", container_image="image")


@pytest.mark.parametrize("home", ["/home/my runs", "/runs/%j"])
def test_a_home_that_a_shell_or_slurm_would_read_otherwise_is_refused(monkeypatch, home):
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", home)
    with pytest.raises(ProfilingConfigError, match="NEMORUN_HOME"):
        executors.slurm("team", container_image="image")


def test_through_ssh_the_user_is_the_one_here_unless_named(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    tunnel = executors.slurm("team", host="login", job_dir="/scratch/jobs", identity="/home/me/.ssh/key").tunnel
    assert isinstance(tunnel, run.SSHTunnel)
    assert (tunnel.host, tunnel.user, tunnel.job_dir, tunnel.identity) == ("login", "me", "/scratch/jobs", "/home/me/.ssh/key")
    assert executors.slurm("team", host="login", user="you", job_dir="/scratch/jobs").tunnel.user == "you"


def test_a_bare_job_uses_the_environment_that_submits_it_or_the_one_named():
    here = os.path.dirname(sys.executable)
    assert executors.slurm("team").setup_lines == f"export PATH='{here}':\"$PATH\""
    assert executors.slurm("team", venv="/shared/venv").setup_lines == "export PATH='/shared/venv/bin':\"$PATH\""
    assert executors.slurm("team", venv="/venv", setup_lines="module load cuda").setup_lines.endswith("\nmodule load cuda")
    for elsewhere in ({"container_image": "image"}, {"host": "login", "job_dir": "/jobs"}, {"env": {"PATH": "/bin"}}):
        assert executors.slurm("team", **elsewhere).setup_lines is None


@pytest.mark.parametrize("value", ["two words", '{"a": 1}', "$HOME", "/home/me/nemo_run/x"])
def test_a_variable_set_later_that_would_not_arrive_is_refused(value):
    executor = executors.slurm("team")
    executor.env_vars["A"] = value
    with pytest.raises(ProfilingConfigError, match=r"slurm\(env="):
        executors.check_executor(executor)


def test_a_variable_set_later_in_lower_case_is_refused():
    executor = executors.slurm("team", env={"http_proxy": "x"})  # given here, it arrives
    executors.check_executor(executor)
    executor.env_vars["http_proxy"] = "x"
    with pytest.raises(ProfilingConfigError, match="capitals"):
        executors.check_executor(executor)


def test_in_a_container_a_path_with_nemo_runs_placeholder_is_left_alone():
    executor = executors.slurm("team", container_image="image", srun_args=["--bcast=/home/me/nemo_run"])
    executor.env_vars["A"] = "/home/me/nemo_run/x"
    executors.check_executor(executor)


@pytest.mark.parametrize(
    ("name", "arguments"), [("nemo_run_1", []), ("two words", []), ("x", ["data.path=/home/me/nemo_run/x"])]
)
def test_a_submission_that_the_batch_script_would_change_is_refused(name, arguments):
    with pytest.raises(ProfilingConfigError, match=r"nemo_run|two words"):
        check_submission(executors.slurm("team"), name, arguments)
    check_submission(executors.slurm("team"), "profile", ["data.path=/nemo_run/code/x"])
    check_submission(executors.local(), name, arguments)


@pytest.mark.parametrize("name", ["local", "local_torchrun", "slurm"])
def test_the_command_line_knows_them_by_name(name):
    factory = {factory.__name__: factory for factory in run.cli.list_factories(run.Executor)}[f"{name}_config"]
    assert isinstance(factory(), run.Config)
