"""Profilers that exclude each other, in both orders and by every route."""

import copy
import logging
from unittest.mock import MagicMock

import nemo_run as run
import pytest

from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins import FaultTolerancePlugin
from tests.plugins.conftest import nsys, pytorch

WARNING = "Nsys not supported with the FaultTolerancePlugin"


def switch_on(task, name):
    """As a user would by hand; of two overrides the last counts."""
    if isinstance(task, run.Script):
        task.args += [f"profiling.{name}=false", f"'++profiling.{name}=True'"]
    else:
        task.config.profiling = run.Config(ProfilingConfig, **{name: True})


def refuses(plugin, task, executor):
    before = copy.deepcopy((task, executor))
    with pytest.raises(ProfilingConfigError, match=r"NsysPlugin.*PyTorchProfilerPlugin") as error:
        plugin.setup(task, executor)
    assert (task, executor) == before
    assert all((error.value.what, error.value.why, error.value.instead))


@pytest.mark.parametrize("first", [[nsys], [pytorch], [FaultTolerancePlugin, pytorch]])
def test_nsys_and_the_torch_profiler_refuse_each_other(first, task, torchrun):
    for plugin in first:
        plugin().setup(task, torchrun)
    refuses(pytorch() if nsys in first else nsys(), task, torchrun)


@pytest.mark.parametrize(("name", "plugin"), [("use_nsys_profiler", pytorch), ("use_pytorch_profiler", nsys)])
def test_a_profiler_refuses_the_other_in_the_config(name, plugin, task, local):
    switch_on(task, name)
    refuses(plugin(), task, local)


def test_the_torch_profiler_refuses_a_launcher_with_nsys_set_by_hand(task):
    refuses(pytorch(), task, run.LocalExecutor(launcher=run.Torchrun(nsys_profile=True)))
    pytorch().setup(task, MagicMock())  # a mocked launcher is not taken for nsys


@pytest.mark.parametrize("launcher", [None, "torchrun"])
@pytest.mark.parametrize("plugins", [(nsys, FaultTolerancePlugin), (FaultTolerancePlugin, nsys)])
def test_fault_tolerance_switches_nsys_off_in_either_order(plugins, launcher, task, built, caplog):
    executor, ended = run.LocalExecutor(ntasks_per_node=2, launcher=launcher), []
    for _ in range(2):
        for plugin in plugins:
            plugin().setup(task, executor)
        ended.append(copy.deepcopy((task, executor)))
    assert ended[0] == ended[1]
    assert isinstance(executor.launcher, run.FaultTolerance)
    assert (executor.launcher.nsys_profile, built(task).profiling.use_nsys_profiler) == (False, False)
    assert WARNING in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("by_hand", [True, False])
def test_fault_tolerance_switches_nsys_off_that_was_set_by_hand_and_warns_of_nothing_else(by_hand, task, built, caplog):
    if by_hand:
        switch_on(task, "use_nsys_profiler")
    executor = run.LocalExecutor(launcher=run.Torchrun(nsys_profile=by_hand))
    FaultTolerancePlugin().setup(task, executor)
    assert executor.launcher.nsys_profile is False
    assert built(task).profiling.use_nsys_profiler is False
    FaultTolerancePlugin().setup(task, MagicMock())
    assert (WARNING in caplog.text) is by_hand
