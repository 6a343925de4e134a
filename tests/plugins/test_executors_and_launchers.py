"""What each plugin does to an executor: launcher fields, retries, environment, and the arguments that reach a process."""

import copy
from unittest.mock import MagicMock

import nemo_run as run
import pytest

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins import FaultTolerancePlugin, PreemptionPlugin
from tests.plugins.conftest import nsys, pytorch
from tests.plugins.remote import package

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


@pytest.mark.parametrize(
    ("plugin", "wrong"),
    [
        *((nsys, {"nsys_extra_args": wrong}) for wrong in ("--wait=all", [1], ["graph"], ["--env-var=A='b c'"])),
        *((nsys, {"nsys_extra_args": wrong}) for wrong in (["--output=x"], ["-t", "cuda"])),
        (nsys, {"nsys_extra_args": ["--export=json"], "export_sqlite": True}),
        *((nsys, {"nsys_trace": wrong}) for wrong in ("nvtx,cuda", [], ["nvtx,cuda"])),
        (nsys, {"script_args_converter_fn": "convert"}),
        (nsys, {"record_shapes": "no"}),
        (pytorch, {"record_memory_history": 2}),
        (pytorch, {"memory_snapshot_path": 3}),
        (FaultTolerancePlugin, {"calc_ft_timeouts": "no"}),
        (PreemptionPlugin, {"enable_exit_handler": "false"}),
        (FaultTolerancePlugin, {"num_in_job_restarts": -1}),
        (FaultTolerancePlugin, {"rank_heartbeat_timeout": 0}),
        (FaultTolerancePlugin, {"num_job_retries_on_failure": "2"}),
    ],
)
def test_options_that_cannot_work_are_refused_and_nothing_is_changed(plugin, wrong, task, torchrun):
    before = copy.deepcopy((task, torchrun))
    with pytest.raises(ProfilingConfigError, match="|".join(wrong)):
        plugin(**wrong).setup(task, torchrun)
    assert (task, torchrun) == before
    with pytest.raises(ProfilingConfigError, match="'torch-run'"):
        nsys().setup(task, run.LocalExecutor(launcher="torch-run"))


def test_gpu_metrics_where_there_are_none_say_so(task, local, slurm, caplog):
    for executor in (slurm, local):
        nsys(nsys_gpu_metrics=True).setup(task, executor)
        assert executor.get_launcher().nsys_gpu_metrics is True
    assert not caplog.records
    nsys(nsys_gpu_metrics=True).setup(task, run.DockerExecutor(container_image="image"))
    assert "no effect on DockerExecutor" in caplog.text
    executor = MagicMock()
    executor.get_launcher.return_value = MagicMock(spec=["nsys_profile", "nsys_extra_args"])
    nsys(nsys_gpu_metrics=True).setup(task, executor)
    assert "no such field" in caplog.text


@pytest.mark.parametrize("kept", [{}, {"log_level": "DEBUG"}])
def test_fault_tolerance_sets_launcher_and_retries_and_keeps_what_was_set_by_hand(kept, task):
    executor = run.LocalExecutor(launcher=run.FaultTolerance(**kept) if kept else None)
    FaultTolerancePlugin(num_in_job_restarts=5, num_job_retries_on_failure=1).setup(task, executor)
    expected = {"max_restarts": 5, "initial_rank_heartbeat_timeout": 1800, "rank_heartbeat_timeout": 300}
    assert (executor.launcher, executor.retries) == (run.FaultTolerance(**expected | kept), 1)


def test_fault_tolerance_on_slurm_is_set_up_also_after_someone_asked_for_the_launcher(task, slurm):
    slurm.assign("exp_1", "/runs/exp_1", "t", "t")
    slurm.get_launcher()
    FaultTolerancePlugin(initial_rank_heartbeat_timeout=1, rank_heartbeat_timeout=1).setup(task, slurm)
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
