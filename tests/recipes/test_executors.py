"""What is submitted: executors that refuse what would go wrong later, and tasks that build the config they came from."""

import os
import sys
from pathlib import Path

import fiddle as fdl
import nemo_run as run
import pytest
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.doctor.request import SETTINGS_KEY
from bridge_profiling.plugins.task import STARTS_NSYS_KEY, starts_nsys
from launch.tasks import pretrain_partial, pretrain_script
from recipes import executors
from recipes.executor_checks import check_submission
from recipes.tasks import as_config

ROOT = Path(__file__).resolve().parents[2]

ELSEWHERE = "/home/me/nemo_run/x"


@pytest.mark.parametrize(("make", "launcher", "ranks"), [(executors.local, None, 1), (executors.local_torchrun, "torchrun", 2)])
def test_a_local_job_finds_this_interpreter_and_this_checkout(make, launcher, ranks):
    executor = make(env={"A": "1"})
    assert (executor.launcher, executor.nproc_per_node()) == (launcher, ranks)
    env = executor.env_vars
    assert env["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert (env["OMP_NUM_THREADS"], env["A"]) == ("1", "1")


BARE = {"container_image": None}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nodes": 0}, "nodes"),
        ({"mounts": ["/data:/data"]} | BARE, "no container"),
        ({"mounts": ["/data:/nemo_run/data"]}, "/nemo_run"),
        ({"mounts": ["/a,b:/data"]}, "commas"),
        ({"mounts": ["/data"]}, "/data:/data"),
        ({"account": None}, 'account="…"'),
        ({"env": {"A-B": "x"}}, "name"),
        ({"env": {"PATH": "/opt/bin:$PATH"}}, "setup_lines='export PATH=\"/opt/bin:\\$PATH\"'"),
        ({"setup_lines": f"cd {ELSEWHERE}"} | BARE, "setup_lines"),
        ({"srun_args": [f"--bcast={ELSEWHERE}"]} | BARE, "srun_args"),
        ({"additional_parameters": {"chdir": ELSEWHERE}} | BARE, "additional_parameters"),
        ({"tunnel": run.LocalTunnel(job_dir="/elsewhere")}, "LocalTunnel"),
        ({"tunnel": run.SSHTunnel(host="h", user="u", job_dir="/a/nemo_run/b")} | BARE, "/nemo_run"),
        ({"tunnel": run.SSHTunnel(host="h", user="u", job_dir="~/jobs")}, "absolute"),
    ],
)
def test_slurm_refuses_what_would_fail_in_the_queue(options, named):
    with pytest.raises(ProfilingConfigError, match=named):
        executors.slurm(**{"account": "team", "container_image": "image"} | options)


@pytest.mark.parametrize(
    ("home", "container"), [("/home/me/nemo_run", None), ("/home/my runs", "image"), ("/runs/%j", "image")]
)
def test_a_home_that_a_shell_slurm_or_nemo_run_would_read_otherwise_is_refused(monkeypatch, home, container):
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", home)
    with pytest.raises(ProfilingConfigError, match="NEMORUN_HOME"):
        executors.slurm("team", container_image=container)


@pytest.mark.parametrize(
    ("name", "value"), [("A", "two words"), ("A", '{"a": 1}'), ("A", "$HOME"), ("A", ELSEWHERE), ("http_proxy", "x")]
)
def test_a_variable_set_later_that_would_not_arrive_is_refused(name, value):
    executor = executors.slurm("team", env={name: value})  # given here, it arrives
    executors.check_executor(executor)
    executor.env_vars[name] = value
    with pytest.raises(ProfilingConfigError, match=r"capitals.*slurm\(env="):
        executors.check_executor(executor)


@pytest.mark.parametrize(("name", "arguments"), [("nemo_run_1", []), ("two words", []), ("x", [f"data.path={ELSEWHERE}"])])
def test_a_submission_that_the_batch_script_would_change_is_refused(name, arguments):
    with pytest.raises(ProfilingConfigError, match=r"nemo_run|two words"):
        check_submission(executors.slurm("team"), name, arguments)
    check_submission(executors.slurm("team"), "profile", ["data.path=/nemo_run/code/x"])
    check_submission(executors.local(), name, arguments)


@pytest.mark.needs("megatron")
@pytest.mark.parametrize("name", ["gpt_tiny", "gpt_125m", "llama32_1b", "llama3_8b", "qwen3_30b_a3b"])
def test_a_recipe_survives_the_way_to_the_job_finalized_or_not(name):
    from recipes.catalog import RANKS, get_recipe
    from recipes.finalize import finalize

    serializer = ZlibJSONSerializer()
    task = pretrain_partial(name, ["train.train_iters=60"])
    config = fdl.build(serializer.deserialize(serializer.serialize(task)).config)
    expected = get_recipe(name)()
    expected.train.train_iters = 60
    assert config == expected
    finalize(config, RANKS[name])
    rebuilt = fdl.build(as_config(config))
    finalize(rebuilt, RANKS[name])
    assert rebuilt.model.ffn_hidden_size == config.model.ffn_hidden_size


@pytest.mark.needs("megatron")
def test_what_cannot_be_sent_to_the_job_is_refused():
    with pytest.raises(ProfilingConfigError, match=r"config\.model\.params_dtype is a torch\.dtype"):
        pretrain_partial("gpt_tiny", ["model.params_dtype=bfloat16"])


@pytest.mark.needs("megatron")
def test_both_kinds_of_task_carry_the_recipes_settings_for_doctor_and_the_mark_that_they_start_nsys():
    from recipes.catalog import known_settings
    from tests.recipes.builders import recipe

    script, partial = pretrain_script("gpt_125m"), pretrain_partial("gpt_125m")
    assert script.metadata[SETTINGS_KEY].split() == known_settings(recipe("gpt_125m"))
    others = run.Script(path="a.py", metadata={STARTS_NSYS_KEY: "no"}), run.Partial(print)
    assert [starts_nsys(task) for task in (script, partial, *others)] == [True, True, False, False]
    assert (
        partial.config.train.__arguments__.items()
        >= {"train_iters": 50, "micro_batch_size": 2, "global_batch_size": 32}.items()
    )
