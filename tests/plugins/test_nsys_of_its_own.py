"""A task that starts nsys itself receives settings, and the launcher stays unchanged."""

import copy

import nemo_run as run
import pytest

from bridge_profiling.plugins.task import STARTS_NSYS_KEY, starts_nsys
from launch.tasks import pretrain_script
from tests.plugins.conftest import nsys

pytestmark = pytest.mark.needs("megatron")


def script(**more):
    task = pretrain_script("gpt_tiny", packaged=True)
    task.args = []
    for name, value in more.items():
        setattr(task, name, value)
    return task


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


def test_options_that_a_shell_would_change_arrive_in_quotes():
    task = script()
    nsys(nsys_extra_args=["--env-var=A=1,B=2"]).setup(task, run.LocalExecutor())
    assert """'profiling.nsys_extra_args=["--env-var=A=1,B=2"]'""" in task.args
