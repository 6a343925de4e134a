"""PreemptionPlugin: Slurm's signal, the training's exit handler, and what is refused before anything is changed."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from unittest.mock import MagicMock

import fiddle as fdl
import nemo_run as run
import pytest

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins import PreemptionPlugin
from bridge_profiling.plugins.preemption import time_limit_seconds
from tests.plugins.conftest import pretrain


@dataclass
class WithoutLoader:
    exit_signal_handler: bool = False


@dataclass
class Container:
    train: WithoutLoader = field(default_factory=WithoutLoader)


def handlers(config) -> tuple[bool, bool]:
    return config.train.exit_signal_handler, config.train.exit_signal_handler_for_dataloader


@pytest.mark.parametrize(("asked", "loader"), [({}, False), ({"enable_exit_handler_for_data_loader": True}, True)])
def test_the_signal_and_the_handlers_are_set_once(task, slurm, built, asked, loader):
    for _ in range(2):
        PreemptionPlugin(**asked).setup(task, slurm)
    assert handlers(built(task)) == (True, loader)
    # torchrun leaves its ranks the whole time, unless the user says otherwise.
    assert (slurm.signal, slurm.env_vars) == ("TERM@60", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"})
    PreemptionPlugin(preempt_time=120).setup(task, slurm)
    assert (slurm.signal, slurm.env_vars) == ("TERM@120", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"})


def test_a_config_without_the_loaders_field_is_refused_only_where_it_is_asked_for(slurm):
    task = run.Partial(pretrain, config=run.Config(Container))
    before = copy.deepcopy((task, slurm))
    with pytest.raises(ProfilingConfigError, match="'exit_signal_handler_for_dataloader' in WithoutLoader"):
        PreemptionPlugin(enable_exit_handler_for_data_loader=True).setup(task, slurm)
    assert (task, slurm) == before
    PreemptionPlugin().setup(task, slurm)
    assert fdl.build(task.config).train.exit_signal_handler


@pytest.mark.parametrize("executor", [run.LocalExecutor(), MagicMock()])
def test_where_nothing_sends_the_signal_a_warning_says_so(script, built, executor, caplog):
    PreemptionPlugin().setup(script, executor)
    assert "nothing sends a signal 60 seconds before the end of this job" in caplog.text
    assert handlers(built(script)) == (True, False)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        *(({"preempt_time": wrong}, f"preempt_time={wrong!r}") for wrong in (0, -60, "60", True, 1.5, 65536)),
        ({"preempt_time": 600}, "time limit of 600 seconds"),
        ({"script_args_converter_fn": "convert"}, "script_args_converter_fn"),
    ],
)
def test_a_request_that_cannot_work_is_refused_and_nothing_is_changed(asked, message, task, slurm):
    before = copy.deepcopy((task, slurm))
    with pytest.raises(ProfilingConfigError, match=message):
        PreemptionPlugin(**asked).setup(task, slurm)
    assert (task, slurm) == before


@pytest.mark.parametrize("value", ["SIGTERM", "15", "SIGUSR1", "Signals.SIGUSR1", "10"])
def test_a_training_that_handles_another_signal_is_refused(value, script, slurm):
    script.args = [f"train.exit_signal={value}"]
    PreemptionPlugin(preempt_time=120, enable_exit_handler=False).setup(script, slurm)
    assert (script.args, slurm.signal) == ([f"train.exit_signal={value}"], "TERM@120")
    refused = pytest.raises(ProfilingConfigError, match="handles another signal")
    with contextlib.nullcontext() if value in ("SIGTERM", "15") else refused:
        PreemptionPlugin().setup(script, slurm)
        assert slurm.signal == "TERM@60"


@pytest.mark.parametrize(
    ("workers", "asked", "warned"),
    [
        ("2", {}, True),
        ("0", {}, False),
        ("2", {"enable_exit_handler_for_data_loader": True}, False),
        ("2", {"enable_exit_handler": False}, False),
    ],
)
def test_data_loader_processes_that_the_signal_would_kill_are_warned_of(workers, asked, warned, script, slurm, caplog):
    script.args = [f"dataset.num_workers={workers}"]
    PreemptionPlugin(**asked).setup(script, slurm)
    assert ("enable_exit_handler_for_data_loader=True" in caplog.text) == warned


LIMITS = {"5": 300, "5:30": 330, "01:10:00": 4200, "1-0": 86400, "1-12:30": 131400, "2-00:00:01": 172801}


@pytest.mark.parametrize(("limit", "seconds"), [*LIMITS.items(), ("UNLIMITED", None), ("", None), (None, None)])
def test_slurms_forms_of_a_time_limit(limit, seconds):
    assert time_limit_seconds(limit) == seconds
