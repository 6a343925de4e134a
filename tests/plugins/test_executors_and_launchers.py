"""What each plugin does to an executor: launcher fields, retries, environment, and the arguments of a process."""

import copy
import logging
from unittest.mock import MagicMock

import nemo_run as run
import pytest

from bridge_profiling.plugins import FaultTolerancePlugin
from bridge_profiling.settings.profiling import ProfilingConfig
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
