"""A task that starts nsys itself receives settings, and the launcher stays unchanged."""

from __future__ import annotations

import logging
import subprocess

import fiddle as fdl
import nemo_run as run
import pytest
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin
from bridge_profiling.plugins.executors import current_launcher
from bridge_profiling.plugins.task import STARTS_NSYS_KEY, starts_nsys
from launch.tasks import pretrain_script

pytestmark = pytest.mark.needs("megatron")

OPTIONS = {"nsys_trace": ["nvtx", "osrt"], "nsys_extra_args": ["--trace-fork-before-exec=true", "--env-var=A=1,B=2"]}


def nsys(**more):
    return NsysPlugin(profile_step_start=4, profile_step_end=6, profile_ranks=[0, 3], **more)


def script(**more):
    task = pretrain_script("gpt_tiny", packaged=True)
    task.args = []
    for name, value in more.items():
        setattr(task, name, value)
    return task


def partial():
    from launch.tasks import pretrain_partial

    return pretrain_partial("gpt_tiny")


def settings(task):
    """The profiling section as the job will have it."""
    from launch.pretrain import build_config

    if isinstance(task, run.Script):
        return build_config("gpt_tiny", [], [argument.strip("'") for argument in task.args]).profiling
    return fdl.build(task.config.profiling)


@pytest.mark.parametrize("launcher", [None, "torchrun"])
@pytest.mark.parametrize("make", [script, partial])
def test_the_launcher_stays_as_it_is_and_the_settings_say_everything(make, launcher):
    task, executor = make(), run.LocalExecutor(ntasks_per_node=4, launcher=launcher)
    for _ in range(2):
        nsys(**OPTIONS, nsys_gpu_metrics=True, export_sqlite=True).setup(task, executor)
    assert getattr(current_launcher(executor), "nsys_profile", False) is False
    told = settings(task)
    assert (told.use_nsys_profiler, told.profile_step_start, told.profile_step_end, told.profile_ranks) == (True, 4, 6, [0, 3])
    assert (told.nsys_trace, told.nsys_extra_args) == (OPTIONS["nsys_trace"], OPTIONS["nsys_extra_args"])
    assert (told.nsys_gpu_metrics, told.nsys_export_sqlite) == (True, True)


@pytest.mark.parametrize("make", [script, partial])
def test_with_upstreams_arguments_alone_only_upstreams_keys_are_written(make):
    task = make()
    nsys().setup(task, run.LocalExecutor(ntasks_per_node=4, launcher="torchrun"))
    if isinstance(task, run.Script):
        assert not [argument for argument in task.args if ".nsys_" in argument]
    assert settings(task).nsys_trace is None


def test_an_option_that_a_shell_would_take_apart_survives_it():
    task = script()
    nsys(**OPTIONS).setup(task, run.LocalExecutor())
    shell = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {' '.join(task.args)}"], capture_output=True, text=True, check=True, cwd="/"
    ).stdout.splitlines()
    assert 'profiling.nsys_extra_args=["--trace-fork-before-exec=true","--env-var=A=1,B=2"]' in shell


def mine() -> None: ...


def marked() -> None: ...


marked.starts_nsys_itself = True


@pytest.mark.parametrize(
    ("task", "itself"),
    [
        (script(), True),
        (script(metadata={STARTS_NSYS_KEY: "no"}), False),
        (script(metadata={}), False),
        (run.Script(inline="launch/pretrain.py"), False),
        (run.Partial(marked), True),
        (run.Partial(mine), False),
    ],
)
def test_a_task_says_by_a_mark_that_it_starts_nsys(task, itself):
    assert starts_nsys(task) is itself


def test_the_mark_is_part_of_the_task_that_the_experiment_saves():
    serializer = ZlibJSONSerializer()
    saved = serializer.deserialize(serializer.serialize(script().to_config()))
    assert starts_nsys(fdl.build(saved))


def test_a_script_without_the_mark_runs_under_nsys_as_a_whole():
    task, executor = script(metadata={}), run.LocalExecutor(ntasks_per_node=4, launcher="torchrun")
    nsys().setup(task, executor)
    assert executor.launcher.nsys_profile is True


def test_nsys_set_by_hand_in_the_launcher_stays():
    task, executor = script(), run.LocalExecutor(ntasks_per_node=4, launcher=run.Torchrun(nsys_profile=True))
    nsys().setup(task, executor)
    assert executor.launcher.nsys_profile is True
    assert "profiling.use_nsys_profiler=true" in task.args


@pytest.mark.parametrize("order", [(nsys, FaultTolerancePlugin), (FaultTolerancePlugin, nsys)])
@pytest.mark.parametrize("make", [script, partial])
def test_fault_tolerance_switches_it_off_in_any_order(order, make, caplog):
    task, executor = make(), run.LocalExecutor(ntasks_per_node=4, launcher="torchrun")
    with caplog.at_level(logging.WARNING):
        for plugin in order:
            plugin().setup(task, executor)
    assert "Nsys not supported with the FaultTolerancePlugin" in caplog.text
    assert settings(task).use_nsys_profiler is False
    assert executor.launcher.nsys_profile is False
