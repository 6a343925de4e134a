"""Timing of a step, the statistics of repeated measurements, and `quick_benchmark`, which leaves a model as it was."""

import copy
import itertools

import pytest
import torch

from bridge_profiling import ProfilingConfigError
from bridge_profiling.bench import step as bench_step
from bridge_profiling.bench.results import estimate
from bridge_profiling.bench.step import measure_step
from bridge_profiling.easy import quick_benchmark


@pytest.fixture
def clock(monkeypatch):
    """A clock that each step advances: by 9 s during the warm-up, then by 1, 3, 1, 3, … seconds."""
    now = [0.0]
    monkeypatch.setattr(bench_step.time, "perf_counter", lambda: now[0])
    takes = itertools.chain([9.0, 9.0], itertools.cycle([1.0, 3.0]))

    def step():
        now[0] += next(takes)

    return step


@pytest.mark.parametrize("samples", [6, None])
def test_warm_up_iterations_do_not_count(clock, samples):
    timing = measure_step(clock, warmup=2, iterations=8, samples_per_iteration=samples)
    assert (timing.warmup, timing.iterations, timing.device) == (2, 8, "cpu")
    assert (timing.seconds.median, timing.seconds.mean, timing.seconds.low, timing.seconds.high) == (2, 2, 1, 3)
    assert timing.iterations_per_s.median == 0.5
    assert timing.samples_per_s is None if samples is None else timing.samples_per_s.median == 3


def test_it_stops_at_the_time_limit_and_counts_at_least_one(clock):
    assert measure_step(clock, warmup=2, iterations=100, max_seconds=10).iterations == 6
    assert measure_step(clock, warmup=0, iterations=100, max_seconds=0).iterations == 1


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        # n = 10: the second smallest and the second largest hold the median with 97.9%, the third with 89.1% only.
        ([10, 1, 9, 2, 8, 3, 7, 4, 6, 5], (10, 5.5, 5.5, 2, 9)),
        # Fewer than six have no bounds.
        ([1, 1, 2, 2, 4], (5, 2, 2, None, None)),
    ],
)
def test_median_mean_and_bounds_agree_with_tables(samples, expected):
    found = estimate(samples)
    assert (found.count, found.median, found.mean, found.low, found.high) == expected


CALLS = []


class Seen(torch.nn.Module):
    """Records how it is called, and counts in a buffer that it replaces."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("unused", None)
        CALLS.clear()

    def forward(self, x):
        CALLS.append((self.training, torch.is_grad_enabled(), tuple(x.shape), x.device.type))
        self.count = self.count + 1
        return {"logits": self.layers(x), "hidden": [x, None]}


# The device of shapes alone stands in for a GPU.
@pytest.mark.parametrize(("train", "device"), [(False, "cpu"), (True, "cpu"), (False, "meta")])
def test_it_calls_a_copy_of_the_model_as_asked_and_leaves_the_model_as_it_was(train, device, capsys):
    model = Seen().train(not train)
    model.layers[0].weight.grad = torch.full((4, 4), 3.0)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    following = torch.rand(3)
    torch.manual_seed(5)
    timing = quick_benchmark(model, (8, 4), train=train, warmup=2, num_iterations=7, device=device)
    assert torch.equal(torch.rand(3), following)
    assert [(train, train, (8, 4), device)] * 9 == CALLS
    assert model.training is not train
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.layers[0].weight.grad.unique().tolist() == [3.0]
    assert model.layers[0].bias.grad is None
    assert (timing.iterations, timing.warmup, timing.samples_per_iteration) == (7, 2, 8)
    assert timing.samples_per_s.median == pytest.approx(8 / timing.seconds.median)
    assert capsys.readouterr().out == f"{timing}\n"
    milliseconds, samples_per_s = timing
    assert (milliseconds, samples_per_s) == (timing.seconds.mean * 1e3, pytest.approx(8e3 / milliseconds))


@pytest.mark.parametrize(
    ("model", "inputs", "settings", "samples"),
    [
        (torch.nn.Embedding(2, 4), torch.tensor([[0, 1]]), {"train": True}, 1),
        (torch.nn.Bilinear(2, 3, 4), (torch.ones(6, 2), torch.ones(6, 3)), {}, 6),
        (torch.nn.Linear(2, 3), (4, 2), {"train": True, "loss": lambda output: output.square().sum()}, 4),
    ],
)
def test_token_numbers_custom_inputs_and_losses(model, inputs, settings, samples):
    timing = quick_benchmark(model, inputs, warmup=0, num_iterations=2, **settings)
    assert timing.samples_per_iteration == samples
    assert "too few iterations for bounds" in str(timing)


NO_SHAPES = (4, None, "ab", (2.0, 4), (-1, 4), ((6, 2), (6, 3)), {"x": torch.ones(2, 4)})


@pytest.mark.parametrize(
    ("model", "shape", "settings", "said"),
    [
        (torch.nn.Linear(2, 2), (0, 2), {}, "holds no sample"),
        (torch.nn.Embedding(8, 4), (3, 5), {"dtype": torch.float32}, "of torch.float32. Pass dtype=torch.long"),
        *((torch.nn.Linear(4, 2), shape, {}, r"is not the shape of one tensor.*the tensors themselves") for shape in NO_SHAPES),
    ],
)
def test_what_cannot_be_measured_is_refused(model, shape, settings, said):
    with pytest.raises(ProfilingConfigError, match=said):
        quick_benchmark(model, shape, **settings)
    assert model.training
