"""A task that starts nsys itself is told what to do in its settings, and the launcher stays as it is."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import nemo_run as run
import pytest

from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin
from bridge_profiling.plugins.launchers import current_launcher
from bridge_profiling.plugins.task import starts_nsys_itself

pytestmark = pytest.mark.needs("megatron")

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"nsys_trace": ["nvtx", "osrt"], "nsys_extra_args": ["--trace-fork-before-exec=true", "--env-var=A=1,B=2"]}


def nsys(**more):
    return NsysPlugin(profile_step_start=4, profile_step_end=6, profile_ranks=[0, 3], **more)


def script(path="launch/pretrain.py", **more):
    return run.Script(path=path, entrypoint="python", **more)


def partial():
    from launch.tasks import pretrain_partial

    return pretrain_partial("gpt_tiny")


def settings(task):
    """The profiling section as the job will have it."""
    from launch.pretrain import build_config

    if isinstance(task, run.Script):
        return build_config("gpt_tiny", [], [argument.strip("'") for argument in task.args]).profiling
    import fiddle as fdl

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


@pytest.mark.parametrize(
    ("task", "itself"),
    [
        (script(), True),
        (script("/a/cluster/code/launch/pretrain.py"), True),
        (script("launch.pretrain", m=True), True),
        (script("train.py"), False),
        (script("launch/experiment.py"), False),
        (run.Script(inline="launch/pretrain.py"), False),
    ],
)
def test_our_entry_point_is_known_by_its_path(task, itself):
    assert starts_nsys_itself(task) is itself


def test_anothers_script_of_the_same_name_is_not_taken_for_ours(tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "pretrain.py").write_text("print('mine')")
    assert not starts_nsys_itself(script(str(tmp_path / "launch" / "pretrain.py")))
    assert starts_nsys_itself(script(str(ROOT / "launch" / "pretrain.py")))


def test_who_set_the_launchers_nsys_by_hand_keeps_it():
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
