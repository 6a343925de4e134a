"""What each plugin does to an executor: launcher fields, retries, signal, environment, and the arguments of a process."""

import copy
import logging
from unittest.mock import MagicMock

import nemo_run as run
import pytest

from bridge_profiling.config import ProfilingConfig
from bridge_profiling.plugins import FaultTolerancePlugin, PreemptionPlugin
from bridge_profiling.plugins.preemption import time_limit_seconds
from tests.plugins.conftest import nsys, package, pytorch

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


def test_gpu_metrics_where_there_are_none_say_so(task, local, slurm, caplog):
    for executor in (slurm, local):
        nsys(nsys_gpu_metrics=True).setup(task, executor)
        assert executor.get_launcher().nsys_gpu_metrics is True
    assert not caplog.records
    nsys(nsys_gpu_metrics=True).setup(task, run.DockerExecutor(container_image="image"))
    assert "no effect on DockerExecutor" in caplog.text


@pytest.mark.parametrize("kept", [{}, {"log_level": "DEBUG"}])
def test_fault_tolerance_sets_launcher_and_retries_and_keeps_what_was_set_by_hand(kept, task):
    executor = run.LocalExecutor(launcher=run.FaultTolerance(**kept) if kept else None)
    FaultTolerancePlugin(num_in_job_restarts=0, num_job_retries_on_failure=0).setup(task, executor)
    expected = {"max_restarts": 0, "initial_rank_heartbeat_timeout": 1800, "rank_heartbeat_timeout": 300}
    assert (executor.launcher, executor.retries) == (run.FaultTolerance(**expected | kept), 0)


def test_fault_tolerance_on_slurm_is_set_up_also_after_someone_asked_for_the_launcher(task, slurm, built):
    slurm.assign("exp_1", "/runs/exp_1", "t", "t")
    slurm.get_launcher()
    FaultTolerancePlugin(initial_rank_heartbeat_timeout=1, rank_heartbeat_timeout=1).setup(task, slurm)
    assert (slurm.get_launcher().max_restarts, slurm.retries, built(task).ft.calc_ft_timeouts) == (3, 2, True)
    assert slurm.get_launcher().cfg_path.endswith("_ft_cfg.yml")
    assert (slurm.ntasks_per_node, slurm.torchrun_nproc_per_node) == (1, 4)


@pytest.mark.parametrize("launcher", [None, "torchrun"])
def test_nsys_starts_through_a_script_that_knows_where_its_options_end(launcher, tmp_path):
    executor = run.LocalExecutor(launcher=launcher, job_dir=str(tmp_path))
    script = run.Script(path="train.py", entrypoint="python")
    nsys(nsys_extra_args=["--delay", "5"]).setup(script, executor)
    role = package(script, executor).roles[0]
    mark, name, count, *words = role.args[0], *role.args[2:]
    assert (role.entrypoint, mark, name) == ("bash", "-c", "nsys")
    assert words[:3] == ["", f"{tmp_path}/nsys_profile", "--gpu-metrics-devices,--gpu-metrics-device"]
    options, application = words[3 : 3 + int(count)], words[3 + int(count) :]
    assert (options[:5], options[-1]) == (["profile", "-s", "none", "-t", "nvtx,cuda"], "--delay=5")
    assert (application[0], application[-1]) == ("torchrun" if launcher else "python", "")


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


@pytest.mark.parametrize(("value", "asked"), [("SIGTERM", {}), ("15", {}), ("SIGUSR1", {"enable_exit_handler": False})])
def test_a_signal_that_the_training_does_not_handle_otherwise_is_sent(value, asked, script, slurm):
    script.args = [f"train.exit_signal={value}"]
    PreemptionPlugin(preempt_time=120, **asked).setup(script, slurm)
    assert (len(script.args) == 1, slurm.signal) == (bool(asked), "TERM@120")


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
