"""The hook in a loop around Accelerate: an iteration is what comes to an optimizer step, however it is looped over."""

from __future__ import annotations

import importlib

import pytest

from bridge_profiling.errors import ProfilingConfigError
from tests.integrations.example_run import ExampleRun
from tests.integrations.trainings import Accelerate

pytestmark = [pytest.mark.system, pytest.mark.needs("hugging_face")]

#: One batch of an iteration. A prepared loader moves a batch to the device while it fetches.
BATCH = ["data-loading", "host-to-device", "forward", "backward"]
STEP = [*BATCH, "optimizer"]


@pytest.fixture
def training(tmp_path):
    return Accelerate(tmp_path).prepare()


def test_the_example_captures_its_window_on_each_rank_and_changes_no_loss(tmp_path):
    example = ExampleRun("accelerate_loop.py", tmp_path)
    example.check("accelerate", [*BATCH, *STEP])
    framework = example.captured.manifest()["framework"]
    assert (framework["strategy"], framework["gradient_accumulation"]) == ("MULTI_CPU", 2)


def test_an_epochs_end_begins_no_iteration_and_its_last_may_have_fewer_batches(training):
    training.prepare(accumulation=3, batches=5)
    with training.profiling() as profiling:
        for _ in range(3):
            for batch in profiling.batches(training.loader):
                training.step(batch)
    assert training.ending() == ("complete", [3, 4], [])
    assert training.iterations() == list(range(6))
    assert training.captured.phases() == {3: [*BATCH, *STEP], 4: [*BATCH, *BATCH, *STEP]}


def test_accelerates_own_profiler_and_this_one_exclude_each_other(training):
    from accelerate.utils import ProfileKwargs

    training.prepare(handlers=[ProfileKwargs()])
    with pytest.raises(ProfilingConfigError, match="without ProfileKwargs"):
        training.profiling()


def test_tensor_and_context_parallelism_of_a_parallelism_config_are_the_layout(training, monkeypatch):
    layout_of = importlib.import_module("bridge_profiling.integrations.accelerate").layout_of
    from accelerate.parallelism_config import ParallelismConfig

    state = training.accelerator.state
    assert layout_of(state).coordinates(0) == dict.fromkeys(("tp", "cp", "dp", "pp", "ep"), (0, 1))
    monkeypatch.setattr("bridge_profiling.integrations.accelerate.world_size", lambda: 8)
    state.parallelism_config = ParallelismConfig(dp_shard_size=4, tp_size=2)
    assert layout_of(state).coordinates(5) == {"tp": (1, 2), "cp": (0, 1), "dp": (2, 4), "pp": (0, 1), "ep": (0, 1)}
