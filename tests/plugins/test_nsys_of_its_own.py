"""A task that starts nsys itself receives settings, and the launcher stays unchanged."""

import copy

import fiddle as fdl
import nemo_run as run
import pytest

from bridge_profiling.plugins.executors import current_launcher
from bridge_profiling.plugins.task import STARTS_NSYS_KEY, starts_nsys
from launch.tasks import pretrain_script
from tests.plugins.conftest import nsys

pytestmark = pytest.mark.needs("megatron")

OPTIONS = {"nsys_trace": ["nvtx", "osrt"], "nsys_extra_args": ["--trace-fork-before-exec=true", "--env-var=A=1,B=2"]}


def script(**more):
    task = pretrain_script("gpt_tiny", packaged=True)
    task.args = []
    for name, value in more.items():
        setattr(task, name, value)
    return task


def partial():
    from launch.tasks import pretrain_partial

    return pretrain_partial("gpt_tiny")


def settings(task):
    """The profiling section as the job will have it."""
    from launch.pretrain import build_config

    if isinstance(task, run.Script):
        return build_config("gpt_tiny", [], [argument.strip("'") for argument in task.args]).profiling
    return fdl.build(task.config.profiling)


@pytest.mark.parametrize("launcher", [None, "torchrun"])
@pytest.mark.parametrize("make", [script, partial])
def test_the_launcher_stays_as_it_is_and_the_settings_say_everything(make, launcher):
    task, executor = make(), run.LocalExecutor(ntasks_per_node=4, launcher=launcher)
    for _ in range(2):
        nsys(profile_ranks=[0, 3], **OPTIONS, nsys_gpu_metrics=True, export_sqlite=True).setup(task, executor)
    assert getattr(current_launcher(executor), "nsys_profile", False) is False
    found = settings(task)
    window = {"use_nsys_profiler": True, "profile_step_start": 4, "profile_step_end": 6, "profile_ranks": [0, 3]}
    expected = window | OPTIONS | {"nsys_gpu_metrics": True, "nsys_export_sqlite": True}
    assert {name: getattr(found, name) for name in expected} == expected


def marked() -> None: ...


marked.starts_nsys_itself = True


@pytest.mark.parametrize(
    ("task", "itself"),
    [
        (script(), True),
        (script(metadata={STARTS_NSYS_KEY: "no"}), False),
        (run.Script(inline="launch/pretrain.py"), False),
        (run.Partial(marked), True),
        (run.Partial(print), False),
    ],
)
def test_a_task_says_by_a_mark_that_it_starts_nsys(task, itself):
    assert starts_nsys(task) is itself


@pytest.mark.parametrize(("task", "launcher"), [(script(metadata={}), "torchrun"), (script(), run.Torchrun(nsys_profile=True))])
def test_without_the_mark_or_by_hand_the_launcher_starts_nsys(task, launcher):
    executor = run.LocalExecutor(ntasks_per_node=4, launcher=copy.deepcopy(launcher))
    nsys().setup(copy.deepcopy(task), executor)
    assert executor.launcher.nsys_profile is True
