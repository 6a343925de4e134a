"""DeepSpeed on two CPU ranks: the example, ZeRO's stages, and what DeepSpeed measures itself."""

import importlib.metadata
from pathlib import Path

import pytest

from tests.forked_ranks import run_ranks
from tests.frameworks.captured import Captured
from tests.frameworks.example_run import ExampleRun

pytestmark = [pytest.mark.system, pytest.mark.needs("deepspeed")]

#: Of the example's model.
PARAMETERS = (32 * 64 + 64) + (64 * 4 + 4)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def test_the_example_is_captured_whole_and_its_manifest_has_what_deepspeed_measures(tmp_path):
    example = ExampleRun("deepspeed_zero.py", tmp_path)
    micro_batch = ["host-to-device", "forward", "backward"]
    example.check("deepspeed", [*micro_batch, "data-loading", *micro_batch, "optimizer", "data-loading"])
    for rank in (0, 1):
        found = example.captured.ranges(rank)
        # Of two iterations with two micro-batches each.
        assert (found.count("ZeRO::reduce"), found.count("ZeRO::all_gather")) == (4, 2)
        framework = example.captured.manifest(rank)["framework"]
        assert (framework["zero_stage"], framework["gradient_accumulation_steps"]) == (2, 2)
        assert (framework["version"], framework["backend"]) == (importlib.metadata.version("deepspeed"), "gloo")
    # The FLOPs profiler's result, of the rank that has it.
    found = example.captured.manifest(0)["framework"]["flops_profiler"]["result"]
    # A multiplication and an addition for each weight and sample, of 4 samples in one micro-batch; two micro-batches, biases.
    macs = 4 * (32 * 64 + 64 * 4)
    assert (found["iteration"], found["forward_macs"], found["parameters"]) == (1, macs, PARAMETERS)
    assert 2 * macs <= found["forward_flops"] <= 2.1 * macs
    assert example.captured.manifest(1)["framework"]["flops_profiler"]["result"] is None
    # The wall-clock breakdown of the window.
    framework = example.captured.manifest(1)["framework"]
    found = framework["wall_clock_breakdown"]
    assert found["iteration"] == [3, 4]
    assert all(len(found["timers_ms"][name]) == 2 and min(found["timers_ms"][name]) > 0 for name in ("fwd", "bwd", "step"))
    assert "wall_clock_breakdown is on" in framework["notes"][0]


def test_zero_3_is_captured_with_deepspeeds_own_ranges_and_an_epochs_end_shares_an_iteration_with_the_next(tmp_path):
    run_ranks(every_case, tmp_path, folder=tmp_path, ranks=2, check=True)
    captured = Captured(tmp_path / "zero3", "iter-3-5")
    for rank in (0, 1):
        assert captured.manifest(rank)["framework"]["zero_stage"] == 3
        found = captured.ranges(rank)
        assert any("all_gather" in name for name in found)
        assert "DeepSpeedZeroOptimizer_Stage3.step" in found
        step = ["forward", "backward", "optimizer"]
        assert captured.phases(rank) == {3: [*step, "data-loading"], 4: [*step, "checkpoint", "data-loading"]}

    captured = Captured(tmp_path / "epochs", "iter-3-5")
    # Five batches an epoch, two a step: iteration 2 has the first epoch's last one and the second's first.
    assert captured.manifest()["durations_ns"]["iteration"] == list(range(5))


WINDOW = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5, "profile_ranks": "all"}


def engine_of(stage: int, **config):
    """A small engine, and its micro-batches."""
    import deepspeed
    import torch

    from tests.frameworks.with_and_without import leave_deepspeed_uncompiled

    leave_deepspeed_uncompiled()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}} | config
    deepspeed.init_distributed(dist_backend="gloo")
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine, list(torch.randn(8, 2, 16))


def train(engine, batches, folder: Path, *, save_at: int | None = None, epochs: int = 1) -> None:
    from bridge_profiling.frameworks.deepspeed import Profiling

    with Profiling(engine, output_dir=folder, **WINDOW) as profiling:
        for batch in (batch for _ in range(epochs) for batch in profiling.steps(batches)):
            loss = engine(batch).square().mean()
            engine.backward(loss)
            engine.step()
            if engine.global_steps - 1 == save_at:
                engine.save_checkpoint(str(folder / "checkpoint"))


def every_case(folder: Path) -> None:
    """ZeRO 3 with a checkpoint, and epochs that end between two steps."""
    engine, batches = engine_of(3)
    train(engine, batches, folder / "zero3", save_at=4)
    engine, batches = engine_of(1, gradient_accumulation_steps=2)
    train(engine, batches[:5], folder / "epochs", epochs=2)
