"""What each plugin does to an executor: launcher fields, retries, signal, environment, and the arguments of a process."""

import copy
import logging
from unittest.mock import MagicMock

import nemo_run as run
import pytest

from bridge_profiling.config import ProfilingConfig
from bridge_profiling.plugins import FaultTolerancePlugin, PreemptionPlugin
from bridge_profiling.plugins.preemption import time_limit_seconds
from tests.plugins.conftest import nsys, pytorch

DEFAULTS = ["--force-overwrite=true", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
DEFAULTS += ["--cuda-graph-trace=node", "--cuda-event-trace=false"]


@pytest.mark.parametrize(
    ("launcher", "asked", "merged"),
    [
        ([], {}, DEFAULTS),
        ([], {"nsys_extra_args": ["--cuda-graph-trace", "graph"]}, [*DEFAULTS[:3], DEFAULTS[4], "--cuda-graph-trace", "graph"]),
        ([], {"nsys_extra_args": ["-c", "none"]}, [DEFAULTS[0], *DEFAULTS[2:], "-c", "none"]),
        ([], {"nsys_extra_args": ["--env-var", "A=1", "--wait=all"]}, [*DEFAULTS, "--env-var", "A=1", "--wait=all"]),
        ([], {"export_sqlite": True}, [*DEFAULTS, "--export=sqlite"]),
        (["--delay", "5", "--stats=true"], {"nsys_extra_args": ["--delay=9"]}, ["--stats=true", "--delay=9"]),
    ],
)
def test_nsys_options_of_the_user_win_by_name(launcher, asked, merged, task):
    """Once for each of a job group's tasks, which share an executor."""
    executor = run.LocalExecutor(launcher=run.Torchrun(nsys_extra_args=list(launcher) or list(DEFAULTS)))
    for each in (task, run.Script(path="b.py", entrypoint="python")):
        nsys(**asked).setup(each, executor)
    assert executor.launcher.nsys_extra_args == merged


@pytest.mark.parametrize("kept", [{}, {"log_level": "DEBUG"}])
def test_fault_tolerance_sets_launcher_and_retries_and_keeps_what_was_set_by_hand(kept, task):
    executor = run.LocalExecutor(launcher=run.FaultTolerance(**kept) if kept else None)
    FaultTolerancePlugin(num_in_job_restarts=0, num_job_retries_on_failure=0).setup(task, executor)
    expected = {"max_restarts": 0, "initial_rank_heartbeat_timeout": 1800, "rank_heartbeat_timeout": 300}
    # NeMo-Run's Slurm would skip the launcher's set-up if it believed that it had been done.
    assert (executor.launcher, executor.retries, executor._launcher_setup) == (run.FaultTolerance(**expected | kept), 0, False)


WARNING = "Nsys not supported with the FaultTolerancePlugin"


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
    profiling = built(task).profiling
    assert (executor.launcher.nsys_profile, profiling.use_nsys_profiler) == (False, False)
    assert profiling.profile_step_end == nsys().profile_step_end, "the window stays for a profiler that is chosen later"
    assert WARNING in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("by_hand", ["task", "launcher", None])
def test_fault_tolerance_switches_nsys_off_that_was_set_by_hand_and_warns_of_nothing_else(by_hand, task, built, caplog):
    if by_hand == "task":
        if isinstance(task, run.Script):
            task.args.append("profiling.use_nsys_profiler=true")
        else:
            task.config.profiling = run.Config(ProfilingConfig, use_nsys_profiler=True)
    executor = run.LocalExecutor(launcher=run.Torchrun(nsys_profile=by_hand == "launcher"))
    FaultTolerancePlugin().setup(task, executor)
    assert executor.launcher.nsys_profile is False
    assert built(task).profiling.use_nsys_profiler is False
    FaultTolerancePlugin().setup(task, MagicMock())
    pytorch().setup(task, MagicMock())  # a mocked launcher is not taken for nsys
    assert (WARNING in caplog.text) == (by_hand is not None)


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


@pytest.mark.parametrize("executor", [run.LocalExecutor(), MagicMock()])
def test_where_nothing_sends_the_signal_a_warning_says_so(script, built, executor, caplog):
    PreemptionPlugin().setup(script, executor)
    assert "nothing sends a signal 60 seconds before the end of this job" in caplog.text
    assert handlers(built(script)) == (True, False)


def test_a_script_gets_the_words_of_megatron_bridge_also_where_it_and_its_executor_are_only_mocked():
    script, executor = MagicMock(spec=run.Script, args=[]), MagicMock(spec=run.SlurmExecutor)
    PreemptionPlugin(preempt_time=120).setup(script, executor)
    assert script.args == ["train.exit_signal_handler=True", "train.exit_signal_handler_for_dataloader=False"]
    assert executor.signal == "TERM@120"


@pytest.mark.parametrize(("value", "asked"), [("SIGTERM", {}), ("15", {}), ("SIGUSR1", {"enable_exit_handler": False})])
def test_a_signal_that_the_training_does_not_handle_otherwise_is_sent(value, asked, script, slurm):
    script.args = [f"train.exit_signal={value}"]
    PreemptionPlugin(preempt_time=1, **asked).setup(script, slurm)
    assert (len(script.args) == 1, slurm.signal) == (bool(asked), "TERM@1")


@pytest.mark.parametrize(
    ("workers", "asked", "warned"),
    [("2", {}, True), ("0", {}, False), ("2", {"enable_exit_handler_for_data_loader": True}, False)],
)
def test_data_loader_processes_that_the_signal_would_kill_are_warned_of(workers, asked, warned, script, slurm, caplog):
    script.args = [f"dataset.num_workers={workers}"]
    PreemptionPlugin(**asked).setup(script, slurm)
    assert ("enable_exit_handler_for_data_loader=True" in caplog.text) == warned


LIMITS = {"5": 300, "5:30": 330, "01:10:00": 4200, "1-0": 86400, "1-12:30": 131400, "2-00:00:01": 172801}


@pytest.mark.parametrize(("limit", "seconds"), [*LIMITS.items(), ("UNLIMITED", None), ("", None), (None, None)])
def test_slurms_forms_of_a_time_limit(limit, seconds):
    assert time_limit_seconds(limit) == seconds
