"""Profilers that exclude each other, in both orders and by every route."""

from __future__ import annotations

import copy
import logging
from unittest.mock import MagicMock

import nemo_run as run
import pytest

from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin

WARNING = "Nsys not supported with the FaultTolerancePlugin"


def nsys(**more):
    return NsysPlugin(profile_step_start=4, profile_step_end=6, **more)


def pytorch(**more):
    return PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6, **more)


def switch_on(task, section, name, config_class=ProfilingConfig):
    """As a user would by hand."""
    if isinstance(task, run.Script):
        task.args.append(f"{section}.{name}=true")
    else:
        setattr(task.config, section, run.Config(config_class, **{name: True}))


def refuses(plugin, task, executor):
    before = copy.deepcopy((task, executor))
    with pytest.raises(ProfilingConfigError, match=r"NsysPlugin.*PyTorchProfilerPlugin") as error:
        plugin.setup(task, executor)
    assert (task, executor) == before
    assert all((error.value.what, error.value.why, error.value.instead))


@pytest.mark.parametrize("order", [(nsys, pytorch), (pytorch, nsys)])
def test_nsys_and_the_torch_profiler_refuse_each_other(order, task, torchrun):
    order[0]().setup(task, torchrun)
    refuses(order[1](), task, torchrun)


def test_the_torch_profiler_refuses_a_launcher_with_nsys_set_by_hand(task):
    refuses(pytorch(), task, run.LocalExecutor(launcher=run.Torchrun(nsys_profile=True)))


def test_the_torch_profiler_refuses_nsys_in_the_config(task, local):
    switch_on(task, "profiling", "use_nsys_profiler")
    refuses(pytorch(), task, local)


def test_nsys_refuses_the_torch_profiler_in_the_config(task, local):
    switch_on(task, "profiling", "use_pytorch_profiler")
    refuses(nsys(), task, local)


def test_fault_tolerance_does_not_lift_the_refusal(task, local):
    FaultTolerancePlugin().setup(task, local)
    pytorch().setup(task, local)
    refuses(nsys(), task, local)


def test_of_two_overrides_the_last_counts(script, local):
    script.args = ["profiling.use_pytorch_profiler=true", "profiling.use_pytorch_profiler=false"]
    nsys().setup(script, local)
    script.args = ["profiling.use_pytorch_profiler=false", "'++profiling.use_pytorch_profiler=True'"]
    refuses(nsys(), script, local)


def test_a_mocked_launcher_is_not_taken_for_nsys(task):
    pytorch().setup(task, MagicMock())


def check_nsys_is_off(task, executor, built):
    launcher = executor.launcher
    assert isinstance(launcher, run.FaultTolerance)
    assert launcher.nsys_profile is False
    assert built(task).profiling.use_nsys_profiler is False
    if isinstance(task, run.Script):
        assert "profiling.use_nsys_profiler=true" not in task.args


@pytest.mark.parametrize("launcher", [None, "torchrun"])
@pytest.mark.parametrize("order", [(nsys, FaultTolerancePlugin), (FaultTolerancePlugin, nsys)])
def test_fault_tolerance_switches_nsys_off_everywhere(order, launcher, task, built, caplog):
    executor = run.LocalExecutor(ntasks_per_node=2, launcher=launcher)
    for plugin in order:
        plugin().setup(task, executor)
    check_nsys_is_off(task, executor, built)
    assert WARNING in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    once = copy.deepcopy((task, executor))
    for plugin in order:
        plugin().setup(task, executor)
    assert (task, executor) == once


@pytest.mark.parametrize("order", [(nsys, FaultTolerancePlugin), (FaultTolerancePlugin, nsys), (pytorch, FaultTolerancePlugin)])
def test_a_partial_and_a_script_end_in_the_same_config(order, partial, script, built):
    executors = run.LocalExecutor(), run.LocalExecutor()
    for plugin in order:
        plugin().setup(partial, executors[0])
        plugin().setup(script, executors[1])
    assert built(partial) == built(script)
    assert executors[0] == executors[1]


def test_both_orders_of_nsys_and_fault_tolerance_end_the_same(task, built):
    other, executors = copy.deepcopy(task), (run.LocalExecutor(), run.LocalExecutor())
    for plugin in (nsys, FaultTolerancePlugin):
        plugin().setup(task, executors[0])
    for plugin in (FaultTolerancePlugin, nsys):
        plugin().setup(other, executors[1])
    assert built(task) == built(other)
    assert executors[0] == executors[1]


@pytest.mark.parametrize("launcher", ["ft", run.FaultTolerance(nsys_profile=True)])
def test_a_fault_tolerance_launcher_set_by_hand_counts(launcher, task, built, caplog):
    executor = run.LocalExecutor(launcher=copy.deepcopy(launcher))
    nsys().setup(task, executor)
    assert WARNING in caplog.text
    assert executor.get_launcher().nsys_profile is False
    assert built(task).profiling.use_nsys_profiler is False


def test_nsys_set_by_hand_is_switched_off(task, built, caplog):
    switch_on(task, "profiling", "use_nsys_profiler")
    executor = run.LocalExecutor(launcher=run.Torchrun(nsys_profile=True))
    FaultTolerancePlugin().setup(task, executor)
    check_nsys_is_off(task, executor, built)
    assert WARNING in caplog.text


def test_fault_tolerance_alone_warns_of_nothing(task, caplog):
    FaultTolerancePlugin().setup(task, run.LocalExecutor())
    FaultTolerancePlugin().setup(task, MagicMock())
    assert WARNING not in caplog.text


def test_a_converter_of_a_disabled_nsys_is_not_asked_for_arguments(script, local):
    FaultTolerancePlugin(script_args_converter_fn=lambda _: ["--ft"]).setup(script, local)
    nsys(script_args_converter_fn=lambda _: ["--nsys"]).setup(script, local)
    assert script.args == ["--ft"]


def test_mocked_executors_see_nsys_switched_off_again(task, caplog):
    executor = MagicMock()
    launcher = executor.get_launcher.return_value
    nsys().setup(task, executor)
    assert launcher.nsys_profile is True
    FaultTolerancePlugin().setup(task, executor)
    assert launcher.nsys_profile is False
    assert isinstance(executor.launcher, run.FaultTolerance)
    assert WARNING in caplog.text


@pytest.mark.parametrize("order", [(pytorch, FaultTolerancePlugin), (FaultTolerancePlugin, pytorch)])
def test_the_torch_profiler_goes_with_fault_tolerance(order, task, local, built, caplog):
    for plugin in order:
        plugin().setup(task, local)
    assert built(task).profiling.use_pytorch_profiler
    assert built(task).ft.enable_ft_package
    assert not caplog.records
