"""Phases found by hooks: in which order, nested, compiled, on other threads."""

from __future__ import annotations

import copy
import pickle
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.utils.checkpoint

from bridge_profiling.integrations.phases import PhaseWatch, watch_phases


class Recorded:
    """Begins and ends of ranges, in order."""

    def __init__(self):
        self.seen = []

    @contextmanager
    def range(self, name):
        self.seen.append(name)
        yield
        self.seen.append(f"/{name}")


@pytest.fixture
def recorded():
    return Recorded()


class Scaled(torch.nn.Module):
    """torch.compile traces a module that is not torch's own."""

    def forward(self, batch):
        return batch * 2


def train_once(model, optimizer=None):
    model(torch.randn(2, 4)).sum().backward()
    if optimizer:
        optimizer.step()


STEP = ["forward", "/forward", "backward", "/backward"]


def test_a_backward_inside_a_backward_is_part_of_it(recorded):
    class Recomputed(torch.nn.Linear):
        def forward(self, batch):
            return torch.utils.checkpoint.checkpoint(super().forward, batch.requires_grad_(), use_reentrant=True)

    watch = watch_phases(recorded.range, model := Recomputed(4, 4))
    train_once(model)
    watch.detach()
    assert recorded.seen == STEP


def test_any_optimizer_is_watched_where_none_is_named(recorded):
    model = torch.nn.Linear(4, 4)
    watch = watch_phases(recorded.range, model)
    train_once(model, torch.optim.SGD(model.parameters()))
    watch.detach()
    train_once(model, torch.optim.SGD(model.parameters()))
    assert recorded.seen == [*STEP, "optimizer", "/optimizer"]


def test_an_optimizer_that_raised_is_ended_with_the_iteration(recorded):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters())
    watch = watch_phases(recorded.range, model, optimizer)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert recorded.seen == ["optimizer"]
    watch.end_open()
    assert recorded.seen == ["optimizer", "/optimizer"]
    train_once(model)
    watch.detach()
    assert recorded.seen[2:] == STEP


def test_a_forward_that_raises_is_ended(recorded):
    watch = watch_phases(recorded.range, model := torch.nn.Linear(4, 4))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5))
    watch.detach()
    assert recorded.seen == ["forward", "/forward"]


@pytest.mark.parametrize("watched_first", [False, True])
def test_a_model_compiled_in_place_has_no_hook_in_its_graph(recorded, watched_first, monkeypatch):
    # `make test` switches compiling off, for what megatron-core's import costs.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = Scaled()
    watch = PhaseWatch(recorded.range)
    if watched_first:
        watch.model(model)
    model.compile(backend=backend, fullgraph=True)
    if not watched_first:
        watch.model(model)
    model(torch.randn(2, 4))
    watch.detach()
    assert len(graphs) == 1
    # Hooks that were there when it was compiled are compiled as well, to nothing.
    assert recorded.seen == ([] if watched_first else ["forward", "/forward"])


def test_other_threads_are_left_alone(recorded):
    model = torch.nn.Linear(4, 4)
    watch = watch_phases(recorded.range, model)
    thread = threading.Thread(target=train_once, args=(model,))
    thread.start()
    thread.join()
    watch.detach()
    assert recorded.seen == []


def test_where_there_is_no_range_nothing_is_kept_open():
    model = torch.nn.Linear(4, 4)
    watch = watch_phases(nullcontext, model)
    train_once(model)
    assert not watch._open
    assert not watch._depth
    watch.detach()


def test_a_model_is_copied_and_saved_whole_without_what_watches_it(recorded):
    watch = PhaseWatch(recorded.range)
    watch.model(model := torch.nn.Linear(4, 4))
    saved = pickle.dumps(model)
    assert b"bridge_profiling" not in saved, "it is to be loaded where this package is not"
    for copied in (pickle.loads(saved), copy.deepcopy(model)):
        copied(torch.randn(2, 4))
    assert recorded.seen == []
    train_once(model)
    watch.detach()
    assert recorded.seen == ["forward", "/forward"]


def test_replicas_of_data_parallel_compute_with_their_own_weights(recorded):
    """DataParallel copies the model's `__dict__` for each device, as the Hugging Face Trainer does on several GPUs."""
    watch = PhaseWatch(recorded.range)
    watch.model(model := torch.nn.Linear(4, 1))
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(1, 4), torch.full((1,), 7.0)
    assert replica(torch.ones(2, 4)).tolist() == [[7.0], [7.0]]
    watch.detach()


def test_two_watches_come_off_in_any_order(recorded):
    original = torch.autograd.backward
    model = torch.nn.Linear(4, 4)
    first, second = PhaseWatch(recorded.range), PhaseWatch(nullcontext)
    first.backward()
    second.backward()
    first.detach()
    second.detach()
    train_once(model)
    assert recorded.seen == []
    assert getattr(torch.autograd.backward, "__wrapped__", original) is original
    torch.autograd.backward = original
