"""`quick_benchmark` measures a model and restores its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bridge_profiling import ProfilingConfigError
from bridge_profiling.easy import quick_benchmark


class Seen(torch.nn.Module):
    """Records how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        self.calls: list[tuple[bool, bool, tuple[int, ...]]] = []

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.calls.append((self.training, torch.is_grad_enabled(), tuple(x.shape)))
        return {"logits": self.layers(x), "hidden": [x, None]}


@pytest.mark.parametrize("train", [False, True])
def test_it_calls_the_model_as_asked_and_leaves_it_as_it_was(train: bool) -> None:
    model = Seen().eval() if train else Seen()
    model.layers[0].weight.grad = torch.full((4, 4), 3.0)
    before = copy.deepcopy(model.state_dict())
    mode = model.training
    torch.manual_seed(5)
    following = torch.rand(3)
    torch.manual_seed(5)
    timing = quick_benchmark(model, (8, 4), train=train, warmup=2, iterations=7)
    assert torch.equal(torch.rand(3), following)
    assert model.calls == [(train, train, (8, 4))] * 9
    assert model.training is mode
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.layers[0].weight.grad.unique().tolist() == [3.0]
    assert model.layers[0].bias.grad is None
    assert (timing.iterations, timing.warmup, timing.samples_per_iteration) == (7, 2, 8)
    assert timing.samples_per_s.low <= timing.samples_per_s.median <= timing.samples_per_s.high
    assert timing.samples_per_s.median == pytest.approx(8 / timing.seconds.median)
    assert "samples/s (" in str(timing)


def test_token_numbers_and_custom_inputs() -> None:
    embedding = torch.nn.Embedding(2, 4)
    assert quick_benchmark(embedding, (3, 5), dtype=torch.long, warmup=0, iterations=1).samples_per_iteration == 3
    tokens = torch.tensor([[0, 1]])
    assert quick_benchmark(embedding, tokens, train=True, warmup=0, iterations=1).samples_per_iteration == 1
    bilinear = torch.nn.Bilinear(2, 3, 4)
    timing = quick_benchmark(bilinear, (torch.ones(6, 2), torch.ones(6, 3)), warmup=0, iterations=2)
    assert timing.samples_per_iteration == 6
    assert "too few iterations for bounds" in str(timing)


def test_a_custom_loss_is_differentiated() -> None:
    taken = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        taken.append(output.shape)
        return output.square().sum()

    quick_benchmark(torch.nn.Linear(2, 3), (4, 2), train=True, loss=loss, warmup=1, iterations=2)
    assert taken == [(4, 3)] * 3


def test_what_cannot_be_measured_is_refused() -> None:
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ProfilingConfigError, match="holds no sample"):
        quick_benchmark(linear, (0, 2))
    with pytest.raises(ProfilingConfigError, match="nothing to differentiate"):
        quick_benchmark(Text(), (1, 2), train=True)
    with pytest.raises(ProfilingConfigError, match="no parameter"):
        quick_benchmark(torch.nn.ReLU(), (1, 2), train=True)
    with pytest.raises(ProfilingConfigError, match="measure nothing"):
        quick_benchmark(linear, (1, 2), iterations=0)
    assert linear.training


@pytest.mark.parametrize("shape", [4, None, "ab", (2.0, 4), (-1, 4), ((6, 2), (6, 3)), {"x": torch.ones(2, 4)}])
def test_an_invalid_shape_is_refused_with_an_example(shape: Any) -> None:
    with pytest.raises(ProfilingConfigError, match=r"is not the shape of one tensor.*the tensors themselves"):
        quick_benchmark(torch.nn.Linear(4, 2), shape)


def test_a_model_of_tokens_says_how_to_ask_for_them() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 2))
    with pytest.raises(ProfilingConfigError, match=r"random numbers of torch.float32. Pass dtype=torch.long"):
        quick_benchmark(model, (3, 5))
    with pytest.raises(RuntimeError, match="indices"):
        quick_benchmark(model, torch.ones(3, 5))


def test_a_buffer_that_the_model_replaces_is_restored() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("unused", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return x

    model = Counts()
    calls = model.calls
    assert quick_benchmark(model, (2,), warmup=1, iterations=2).samples_per_iteration == 2
    assert model.calls is calls
    assert calls == 0


class Text(torch.nn.Linear):
    """Returns no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> str:
        return "text"
