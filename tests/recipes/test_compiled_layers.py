"""Layers under torch.compile: what sets the GPU's random numbers stays out of it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("megatron")


class Generator:
    """A GPU's generator, as far as dynamo sees one: it cannot be traced."""

    def __init__(self):
        self.states = []

    def set_state(self, state):
        import torch

        torch._dynamo.graph_break()
        self.states.append(state)


@pytest.fixture
def random(monkeypatch):
    """megatron-core's random states, with a GPU's generator where there is none, and functions put back afterwards."""
    import torch
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_set_cuda_rng_state", random._set_cuda_rng_state)
    monkeypatch.setattr(random, "_lazy_call", lambda call: call())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", [Generator()], raising=False)
    # `make test` switches dynamo off for speed.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with torch._dynamo.config.patch(disable=False):
        yield random
    torch._dynamo.reset()


def compiled_names(random):
    """Names of the functions that dynamo takes up when a compiled layer sets a random state."""
    import torch
    from torch._dynamo import convert_frame

    def layer(hidden):
        random._set_cuda_rng_state(hidden)
        return hidden + 1

    before = len(convert_frame.input_codes.seen)
    assert torch.compile(layer, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(torch.cuda.default_generators[0].states) == 1
    return [code().co_name for code in convert_frame.input_codes.seen[before:] if code() is not None]


def test_nothing_is_compiled_while_torch_holds_the_lock_under_which_a_random_state_is_set(random):
    import torch

    from recipes.megatron.layers import compile_layers

    compile_layers(torch.nn.ModuleList())
    compile_layers(torch.nn.ModuleList())
    assert "cb" not in compiled_names(random)


def test_without_that_it_would_be(random):
    assert "cb" in compiled_names(random)
