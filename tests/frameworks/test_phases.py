"""Phases found by hooks (in which order, nested, compiled, on other threads), and their memory."""

import copy
import pickle
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.utils.checkpoint

from bridge_profiling.frameworks.phase_memory import PhaseMemory
from bridge_profiling.frameworks.phases import PhaseWatch, watch_phases

FORWARD = ["forward", "/forward"]
STEP = [*FORWARD, "backward", "/backward"]


@pytest.fixture
def seen():
    """Begins and ends of ranges, in order."""
    return []


@pytest.fixture
def range_of(seen):
    @contextmanager
    def range_of(name):
        seen.append(name)
        yield
        seen.append(f"/{name}")

    return range_of


@pytest.fixture
def model():
    return torch.nn.Linear(4, 4)


def train_once(model, optimizer=None):
    model(torch.randn(2, 4)).sum().backward()
    if optimizer:
        optimizer.step()


def test_a_backward_inside_a_backward_is_part_of_it(seen, range_of):
    class Recomputed(torch.nn.Linear):
        def forward(self, batch):
            return torch.utils.checkpoint.checkpoint(super().forward, batch.requires_grad_(), use_reentrant=True)

    watch = watch_phases(range_of, model := Recomputed(4, 4))
    train_once(model)
    watch.detach()
    assert seen == STEP


def test_any_optimizer_is_watched_where_none_is_named_and_other_threads_are_left_alone(seen, range_of, model):
    watch = watch_phases(range_of, model)
    thread = threading.Thread(target=train_once, args=(model, torch.optim.SGD(model.parameters())))
    thread.start()
    thread.join()
    assert seen == []
    train_once(model, torch.optim.SGD(model.parameters()))
    watch.detach()
    train_once(model, torch.optim.SGD(model.parameters()))
    assert seen == [*STEP, "optimizer", "/optimizer"]


def test_an_optimizer_that_raised_is_ended_with_the_iteration(seen, range_of, model):
    optimizer = torch.optim.LBFGS(model.parameters())
    watch = watch_phases(range_of, model, optimizer)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert seen == ["optimizer"]
    watch.end_open()
    train_once(model)
    watch.detach()
    assert seen == ["optimizer", "/optimizer", *STEP]


def test_a_model_compiled_in_place_has_no_hook_in_its_graph(seen, range_of, monkeypatch):
    # `make test` switches compiling off, for what megatron-core's import costs.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    graphs = []

    # torch.compile traces a module that is not torch's own.
    class Scaled(torch.nn.Module):
        def forward(self, batch):
            return batch * 2

    model, watch = Scaled(), PhaseWatch(range_of)
    model.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    watch.model(model)
    model(torch.randn(2, 4))
    watch.detach()
    assert (len(graphs), seen) == (1, FORWARD)


def test_a_model_is_copied_and_saved_whole_without_what_watches_it(seen, range_of, model):
    watch = PhaseWatch(range_of)
    watch.model(model)
    saved = pickle.dumps(model)
    assert b"bridge_profiling" not in saved, "it is to be loaded where this package is not"
    for copied in (pickle.loads(saved), copy.deepcopy(model)):
        copied(torch.randn(2, 4))
    assert seen == []
    train_once(model)
    assert seen == FORWARD
    # DataParallel copies the model's `__dict__` for each device, as the Hugging Face Trainer does on several GPUs.
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(1, 4), torch.full((1,), 7.0)
    assert replica(torch.ones(2, 4)).tolist() == [[7.0], [7.0]]
    watch.detach()


def test_each_phase_has_its_own_peak_and_an_outer_one_the_highest_inside():
    # What is allocated, and the most since the last reading, before and after each phase.
    memory = PhaseMemory(iter([(100, 1000), (150, 150), (150, 150), (160, 160), (110, 560), (115, 115)]).__next__)
    with memory.around(3, "forward", nullcontext()):
        pass
    with memory.around(3, "optimizer", nullcontext()), memory.around(3, "backward", nullcontext()):
        pass
    assert memory.table == {
        "device": "cuda",
        "iteration": [3, 3, 3],
        "phase": ["forward", "backward", "optimizer"],
        "before_bytes": [100, 160, 150],
        "after_bytes": [150, 110, 115],
        "peak_bytes": [150, 560, 560],
    }
