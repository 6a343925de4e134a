"""What each plugin does to an executor: launcher fields, retries, environment, and the arguments that reach a process."""

from __future__ import annotations

import copy
import importlib
import os
from unittest.mock import MagicMock

import nemo_run as run
import pytest

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin

DEFAULTS = [
    "--force-overwrite=true",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--cuda-graph-trace=node",
    "--cuda-event-trace=false",
]


def nsys(**more):
    return NsysPlugin(profile_step_start=4, profile_step_end=6, **more)


def pytorch(**more):
    return PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6, **more)


def package(name, task, executor):
    """The command NeMo-Run makes of a task."""
    packaging = importlib.import_module("nemo_run.run.torchx_backend.packaging")
    role = packaging.package(name, task, executor=executor).roles[0]
    return [role.entrypoint, *role.args]


@pytest.mark.parametrize("launcher", [None, "torchrun", run.Torchrun(rdzv_port=1)])
def test_nsys_sets_the_launchers_fields_and_keeps_its_kind(launcher, task):
    executor = run.LocalExecutor(launcher=copy.deepcopy(launcher))
    nsys().setup(task, executor)
    made = executor.get_launcher()
    assert (made.nsys_profile, made.nsys_trace, made.nsys_gpu_metrics) == (True, ["nvtx", "cuda"], False)
    assert made.nsys_extra_args == DEFAULTS
    assert made.nsys_filename == "profile_%p"
    assert isinstance(made, run.Torchrun) == (launcher is not None)
    if isinstance(launcher, run.Torchrun):
        assert made.rdzv_port == 1


def test_a_mocked_launcher_gets_the_fields():
    executor = MagicMock()
    executor.get_launcher.return_value = launcher = MagicMock()
    nsys(nsys_trace=["cuda"], nsys_gpu_metrics=True).setup(run.Script(path="a.py"), executor)
    assert launcher.nsys_profile is True
    assert launcher.nsys_trace == ["cuda"]
    assert launcher.nsys_gpu_metrics is True


def test_reports_on_slurm_carry_job_node_and_task(task, slurm):
    nsys().setup(task, slurm)
    assert slurm.launcher.nsys_filename == "profile_%p_%q{SLURM_JOB_ID}_node%q{SLURM_NODEID}_rank%q{SLURM_PROCID}"


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        (["--cuda-graph-trace=graph"], [*DEFAULTS[:3], DEFAULTS[4], "--cuda-graph-trace=graph"]),
        (["--cuda-graph-trace", "graph"], [*DEFAULTS[:3], DEFAULTS[4], "--cuda-graph-trace", "graph"]),
        (["-c", "none"], [DEFAULTS[0], *DEFAULTS[2:], "-c", "none"]),
        (["--env-var", "A=1", "--wait=all"], [*DEFAULTS, "--env-var", "A=1", "--wait=all"]),
        ([], DEFAULTS),
    ],
)
def test_nsys_options_of_the_user_win_by_name(given, merged, task, local):
    plugin = nsys(nsys_extra_args=given)
    plugin.setup(task, local)
    plugin.setup(task, local)
    assert local.launcher.nsys_extra_args == merged


def test_an_option_and_its_separate_value_in_the_launcher_are_replaced_together(task):
    executor = run.LocalExecutor(launcher=run.Torchrun(nsys_extra_args=["--delay", "5", "--stats=true"]))
    nsys(nsys_extra_args=["--delay=9"]).setup(task, executor)
    assert executor.launcher.nsys_extra_args == ["--stats=true", "--delay=9"]


def test_export_sqlite_adds_the_export_once(task, local):
    for _ in range(2):
        nsys(export_sqlite=True).setup(task, local)
    assert local.launcher.nsys_extra_args == [*DEFAULTS, "--export=sqlite"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"nsys_extra_args": "--wait=all"},
        {"nsys_extra_args": [1]},
        {"nsys_extra_args": ["graph"]},
        {"nsys_extra_args": ["--env-var=A='b c'"]},
        {"nsys_extra_args": ["--output=x"]},
        {"nsys_extra_args": ["-t", "cuda"]},
        {"nsys_extra_args": ["--export=json"], "export_sqlite": True},
        {"nsys_trace": "nvtx,cuda"},
        {"nsys_trace": []},
        {"nsys_trace": ["nvtx,cuda"]},
        {"script_args_converter_fn": "convert"},
    ],
)
def test_nsys_options_that_cannot_work_are_refused_and_nothing_is_changed(wrong, task, torchrun):
    before = copy.deepcopy((task, torchrun))
    with pytest.raises(ProfilingConfigError, match="|".join(wrong)):
        nsys(**wrong).setup(task, torchrun)
    assert (task, torchrun) == before


def test_gpu_metrics_where_there_are_none_say_so(task, local, slurm, caplog):
    for executor in (slurm, local):
        nsys(nsys_gpu_metrics=True).setup(task, executor)
    assert not caplog.records
    nsys(nsys_gpu_metrics=True).setup(task, run.DockerExecutor(container_image="image"))
    assert "no effect on DockerExecutor" in caplog.text
    executor = MagicMock()
    executor.get_launcher.return_value = MagicMock(spec=["nsys_profile", "nsys_extra_args"])
    nsys(nsys_gpu_metrics=True).setup(task, executor)
    assert "no such field" in caplog.text


def test_an_unknown_launcher_is_refused(task):
    with pytest.raises(ProfilingConfigError, match="'torch-run'"):
        nsys().setup(task, run.LocalExecutor(launcher="torch-run"))


def test_fault_tolerance_sets_launcher_and_retries(task, local):
    FaultTolerancePlugin(num_in_job_restarts=5, num_job_retries_on_failure=1, rank_heartbeat_timeout=60).setup(task, local)
    assert local.launcher == run.FaultTolerance(max_restarts=5, initial_rank_heartbeat_timeout=1800, rank_heartbeat_timeout=60)
    assert local.retries == 1


def test_fault_tolerance_keeps_what_a_launcher_set_by_hand_has(task):
    executor = run.LocalExecutor(launcher=run.FaultTolerance(log_level="DEBUG"))
    FaultTolerancePlugin().setup(task, executor)
    assert (executor.launcher.log_level, executor.launcher.max_restarts) == ("DEBUG", 3)


@pytest.mark.parametrize(
    "wrong", [{"num_in_job_restarts": -1}, {"rank_heartbeat_timeout": 0}, {"num_job_retries_on_failure": "2"}]
)
def test_fault_tolerance_refuses_numbers_that_are_none(wrong, task, local):
    before = copy.deepcopy((task, local))
    with pytest.raises(ProfilingConfigError, match=next(iter(wrong))):
        FaultTolerancePlugin(**wrong).setup(task, local)
    assert (task, local) == before


def test_fault_tolerance_on_slurm_is_set_up_also_after_someone_asked_for_the_launcher(task, slurm):
    slurm.assign("exp_1", "/runs/exp_1", "t", "t")
    slurm.get_launcher()
    FaultTolerancePlugin().setup(task, slurm)
    assert slurm.get_launcher().cfg_path.endswith("_ft_cfg.yml")
    assert (slurm.ntasks_per_node, slurm.torchrun_nproc_per_node) == (1, 4)


@pytest.mark.parametrize("plugin", [nsys, pytorch])
def test_a_launcher_named_after_the_plugin_ran_still_works(plugin, task, local):
    plugin().setup(task, local)
    local.launcher = "torchrun"
    assert isinstance(local.get_launcher(), run.Torchrun)


@pytest.mark.parametrize("launcher", [None, "torchrun"])
def test_the_torch_profiler_leaves_the_launcher_alone(launcher, task):
    executor = run.LocalExecutor(launcher=launcher)
    pytorch().setup(task, executor)
    assert executor.launcher == launcher


def test_profiles_go_to_the_jobs_directory(task, local, slurm):
    for executor in (local, slurm):
        executor.assign("exp_1", "/runs/exp_1", "t", "t")
        pytorch().setup(task, executor)
    assert local.env_vars == {"BRIDGE_PROFILING_DIR": "/runs/exp_1/t/profiles"}
    assert slurm.env_vars == {"BRIDGE_PROFILING_DIR": os.path.join(slurm.tunnel.job_dir, "t", "profiles")}


def test_profiles_in_a_container_go_to_its_mount_of_the_jobs_directory(task, slurm):
    slurm.container_image = "image"
    slurm.assign("exp_1", "/runs/exp_1", "t", "t")
    pytorch().setup(task, slurm)
    assert slurm.env_vars == {"BRIDGE_PROFILING_DIR": "/nemo_run/profiles"}


def test_without_a_job_directory_nothing_is_set_and_a_users_value_stays(task, local, slurm):
    for executor in (local, slurm):
        pytorch().setup(task, executor)
        assert executor.env_vars == {}
    local.assign("exp_1", "/runs/exp_1", "t", "t")
    local.env_vars["BRIDGE_PROFILING_DIR"] = "/mine"
    pytorch().setup(task, local)
    assert local.env_vars["BRIDGE_PROFILING_DIR"] == "/mine"


def test_a_job_group_sets_two_tasks_up_on_one_executor(local):
    tasks = [run.Script(path=path, entrypoint="python") for path in ("a.py", "b.py")]
    plugins = [nsys(nsys_extra_args=["--wait=all"], export_sqlite=True)]
    for plugin in plugins:
        for task in tasks:
            plugin.setup(task, local)
    assert tasks[0].args == tasks[1].args
    assert local.launcher.nsys_extra_args == [*DEFAULTS, "--wait=all", "--export=sqlite"]


@pytest.mark.parametrize("launcher", [run.Torchrun, run.FaultTolerance])
@pytest.mark.parametrize("module", [False, True])
def test_list_overrides_reach_a_process_without_quotes(launcher, module, tmp_path):
    executor = run.LocalExecutor(ntasks_per_node=2, launcher=launcher(), job_dir=str(tmp_path))
    script = run.Script(path="pkg.train" if module else "my train.py", entrypoint="python", m=module, args=["a=[1, 2]"])
    pytorch(profile_ranks=[0, 1]).setup(script, executor)
    command = package("t", script, executor)
    assert command[command.index("a=[1, 2]") - 1] == script.path
    assert "profiling.profile_ranks=[0,1]" in command
    assert not any("'" in argument for argument in command)


def test_a_partial_is_packaged_as_before(partial, torchrun, tmp_path):
    torchrun.job_dir = str(tmp_path)
    plain = [arg for arg in package("t", partial, torchrun) if not arg.isdigit()]
    pytorch().setup(partial, torchrun)
    assert [arg for arg in package("t", partial, torchrun) if not arg.isdigit()][:-1] == plain[:-1]


def test_an_inline_script_is_packaged_as_before(torchrun, tmp_path):
    torchrun.job_dir = str(tmp_path)
    script = run.Script(inline="echo hi")
    plain = [arg for arg in package("t", script, torchrun) if not arg.isdigit()]
    pytorch().setup(script, torchrun)
    assert [arg for arg in package("t", script, torchrun) if not arg.isdigit()] == plain


@pytest.mark.parametrize("launcher", [None, "torchrun"])
def test_nsys_starts_through_a_script_that_knows_where_its_options_end(launcher, tmp_path):
    executor = run.LocalExecutor(launcher=launcher, job_dir=str(tmp_path))
    script = run.Script(path="train.py", entrypoint="python")
    nsys(nsys_extra_args=["--delay", "5"]).setup(script, executor)
    command = package("t", script, executor)
    assert command[:2] == ["bash", "-c"]
    assert command[3] == "nsys"
    count = int(command[4])
    assert command[5:8] == ["", f"{tmp_path}/nsys_profile", "--gpu-metrics-devices,--gpu-metrics-device"]
    options, application = command[8 : 8 + count], command[8 + count :]
    assert options[:5] == ["profile", "-s", "none", "-t", "nvtx,cuda"]
    assert options[-1] == "--delay=5"
    assert application[0] == ("torchrun" if launcher else "python")
    assert application[-1] == ""


def test_a_copied_executor_mends_its_own_arguments(tmp_path):
    executor = run.LocalExecutor(launcher="torchrun", job_dir=str(tmp_path))
    script = run.Script(path="train.py", entrypoint="python", args=["a=[1]"])
    pytorch().setup(script, executor)
    copied = copy.deepcopy(executor)
    executor.launcher = None
    assert "a=[1]" in package("t", script, copied)
    assert isinstance(copied.launcher, run.Torchrun)
