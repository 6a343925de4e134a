"""Executors are real, find our code and our interpreter, and refuse what would go wrong after submission."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nemo_run as run
import pytest

from bridge_profiling.errors import ProfilingConfigError
from recipes import executors

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
        ({"env": {"A": "two words"}}, "unquoted"),
        ({"env": {"A": '{"a": 1}'}}, "unquoted"),
        ({"env": {"A": "$HOME"}}, "unquoted"),
        ({"env": {"A": 1}}, "not text"),
        ({"env": {"http_proxy": "x"}}, "capitals"),
        ({"tunnel": run.LocalTunnel(job_dir="/elsewhere")}, "LocalTunnel"),
        ({"tunnel": run.SSHTunnel(host="h", user="u", job_dir="/a/nemo_run/b"), "container_image": None}, "/nemo_run"),
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
    monkeypatch.setattr(executors, "get_nemorun_home", lambda: "/home/me/nemo_run")
    with pytest.raises(ProfilingConfigError, match="NEMORUN_HOME"):
        executors.slurm("team")
    executors.slurm("team", container_image="image")


@pytest.mark.parametrize("name", ["local", "local_torchrun", "slurm"])
def test_the_command_line_knows_them_by_name(name):
    factory = {factory.__name__: factory for factory in run.cli.list_factories(run.Executor)}[f"{name}_config"]
    assert isinstance(factory(), run.Config)
