"""What cannot work is refused with what to do instead, and neither the task nor the executor is changed."""

import copy

import nemo_run as run
import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin
from bridge_profiling.settings.overrides import apply_overrides
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE
from tests.plugins.conftest import nsys, pytorch

EXCLUDE = "NsysPlugin.*PyTorchProfilerPlugin"

EXECUTORS = {
    "torchrun": lambda: run.LocalExecutor(ntasks_per_node=2, launcher="torchrun"),
    "unknown launcher": lambda: run.LocalExecutor(launcher="torch-run"),
    "nsys by hand": lambda: run.LocalExecutor(launcher=run.Torchrun(nsys_profile=True)),
    "slurm that splits a path": lambda: run.SlurmExecutor(account="team", env_vars={OUTPUT_DIR_VARIABLE: "/our data"}),
    "torchrun to a number": lambda: run.LocalExecutor(launcher="torchrun", env_vars={OUTPUT_DIR_VARIABLE: 7}),
}


def case(plugin, message, *settings, on="torchrun", after=()):
    """A plugin for a task with these settings, on that executor, after other plugins."""
    return plugin, message, settings, on, after


def windows(plugin, start, end, ranks, message):
    return case(plugin(profile_step_start=start, profile_step_end=end, profile_ranks=ranks), message, "train.train_iters=100")


CASES = [
    case(pytorch(), EXCLUDE, after=[nsys()]),
    case(nsys(), EXCLUDE, after=[pytorch()]),
    case(nsys(), EXCLUDE, after=[FaultTolerancePlugin(), pytorch()]),
    case(pytorch(), EXCLUDE, "profiling.use_nsys_profiler=true"),
    # Of two overrides the last counts.
    case(nsys(), EXCLUDE, "profiling.use_pytorch_profiler=false", "'++profiling.use_pytorch_profiler=True'"),
    case(pytorch(), EXCLUDE, on="nsys by hand"),
    case(nsys(), "'torch-run'", on="unknown launcher"),
    *(case(nsys(nsys_extra_args=wrong), "extra_args") for wrong in ("--wait=all", [1], ["graph"], ["--env-var=A='b c'"])),
    *(case(nsys(nsys_extra_args=wrong), "extra_args") for wrong in (["--output=x"], ["-t", "cuda"])),
    case(nsys(nsys_extra_args=["--export=json"], export_sqlite=True), "nsys_extra_args|export_sqlite"),
    *(case(nsys(nsys_trace=wrong), "nsys_trace") for wrong in ("nvtx,cuda", [], ["nvtx,cuda"])),
    *(case(plugin(script_args_converter_fn="convert"), "script_args_converter_fn") for plugin in (nsys, FaultTolerancePlugin)),
    *(case(nsys(), OUTPUT_DIR_VARIABLE, on=executor) for executor in ("slurm that splits a path", "torchrun to a number")),
    case(nsys(record_shapes="no"), "record_shapes"),
    case(pytorch(record_memory_history=2), "record_memory_history"),
    case(pytorch(memory_snapshot_path=""), "memory_snapshot_path"),
    case(FaultTolerancePlugin(calc_ft_timeouts="no"), "calc_ft_timeouts"),
    case(FaultTolerancePlugin(num_in_job_restarts=-1), "num_in_job_restarts"),
    case(FaultTolerancePlugin(rank_heartbeat_timeout=0), "rank_heartbeat_timeout"),
    *(windows(NsysPlugin, *steps, [0], "profile_step") for steps in [(5, 5), (-1, 5), (True, 5), ("1", 5), (99, 101)]),
    *(windows(PyTorchProfilerPlugin, 1, 2, ranks, "profile_ranks") for ranks in ([], [-1], [True], "some", [0, 2], 1.5)),
]


@pytest.mark.parametrize(("plugin", "message", "settings", "on", "after"), CASES)
def test_what_cannot_work_is_refused_and_nothing_is_changed(plugin, message, settings, on, after, task, built):
    executor = EXECUTORS[on]()
    if isinstance(task, run.Script):
        task.args = list(settings)
    elif settings:
        task.config = built(task)
        apply_overrides(task.config, settings)
    for other in after:
        other.setup(task, executor)
    before = copy.deepcopy((task, executor))
    with pytest.raises(ProfilingConfigError, match=message) as error:
        plugin.setup(task, executor)
    assert (task, executor) == before
    assert error.value.instead


def test_a_value_whose_quotes_a_shell_would_read_is_refused_for_a_script(script):
    with pytest.raises(ProfilingConfigError, match="cannot be passed"):
        pytorch(memory_snapshot_path="it's.pickle").setup(script, EXECUTORS["torchrun"]())
