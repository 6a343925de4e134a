"""Tasks and executors as users have them."""

from __future__ import annotations

from dataclasses import dataclass, field

import nemo_run as run
import pytest

from bridge_profiling.config import FaultToleranceConfig, ProfilingConfig
from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin


@dataclass(kw_only=True)
class Train:
    train_iters: int = 100
    exit_signal_handler: bool = False
    exit_signal_handler_for_dataloader: bool = False
    exit_signal: str = "SIGTERM"


@dataclass(kw_only=True)
class Container:
    """A ConfigContainer without megatron-core, so that these tests need none."""

    train: Train = field(default_factory=Train)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)


def pretrain(config: Container) -> None:
    """The function a Partial would run."""


def nsys(**more) -> NsysPlugin:
    return NsysPlugin(profile_step_start=4, profile_step_end=6, **more)


def pytorch(**more) -> PyTorchProfilerPlugin:
    return PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6, **more)


@pytest.fixture
def partial() -> run.Partial:
    return run.Partial(pretrain, config=run.Config(Container))


@pytest.fixture
def script() -> run.Script:
    return run.Script(path="pretrain.py", entrypoint="python")


@pytest.fixture(params=["partial", "script"])
def task(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def local() -> run.LocalExecutor:
    return run.LocalExecutor()


@pytest.fixture
def torchrun() -> run.LocalExecutor:
    return run.LocalExecutor(ntasks_per_node=2, launcher="torchrun")


@pytest.fixture
def slurm() -> run.SlurmExecutor:
    return run.SlurmExecutor(account="team", nodes=2, ntasks_per_node=4)


@pytest.fixture
def built():
    """The config a task ends in: a Partial's, built; a Script's, its overrides applied to the defaults."""
    import fiddle as fdl

    from bridge_profiling.overrides import apply_overrides

    def build(task: run.Partial | run.Script) -> Container:
        if isinstance(task, run.Partial):
            return fdl.build(task.config)
        config = Container()
        apply_overrides(config, task.args)
        return config

    return build
