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
    """As a user would by hand."""
    if isinstance(task, run.Script):
        task.args.append(f"profiling.{name}=true")
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


def test_of_two_overrides_the_last_counts(script, local):
    script.args = ["profiling.use_pytorch_profiler=true", "profiling.use_pytorch_profiler=false"]
    nsys().setup(script, local)
    script.args = ["profiling.use_pytorch_profiler=false", "'++profiling.use_pytorch_profiler=True'"]
    refuses(nsys(), script, local)


@pytest.mark.parametrize("launcher", [None, "torchrun"])
def test_fault_tolerance_switches_nsys_off_everywhere_in_either_order(launcher, task, built, caplog):
    ended = []
    for order in ([nsys, FaultTolerancePlugin], [FaultTolerancePlugin, nsys]):
        caplog.clear()
        own, executor = copy.deepcopy(task), run.LocalExecutor(ntasks_per_node=2, launcher=launcher)
        for plugin in order:
            plugin().setup(own, executor)
        assert isinstance(executor.launcher, run.FaultTolerance)
        assert executor.launcher.nsys_profile is False
        assert "profiling.use_nsys_profiler=true" not in getattr(own, "args", [])
        assert WARNING in caplog.text
        assert caplog.records[0].levelno == logging.WARNING
        once = copy.deepcopy((own, executor))
        for plugin in order:
            plugin().setup(own, executor)
        assert (own, executor) == once
        ended.append((built(own), executor))
    assert ended[0] == ended[1]
    assert ended[0][0].profiling.use_nsys_profiler is False


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
