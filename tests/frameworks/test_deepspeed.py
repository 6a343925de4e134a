"""DeepSpeed on two CPU ranks: the example, ZeRO's stages, and what DeepSpeed measures itself."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_profiling.manifest import Window
from tests.forked_ranks import run_ranks
from tests.frameworks.captured import Captured

pytestmark = [pytest.mark.system, pytest.mark.needs("deepspeed")]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


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

    manifest = Captured(tmp_path / "epochs", "iter-3-5").manifest()
    # Five batches an epoch, two a step: iteration 2 has the first epoch's last one and the second's first.
    assert manifest["durations_ns"]["iteration"] == list(range(5))
    [note] = manifest["framework"]["notes"]
    assert "wall_clock_breakdown is on" in note


@pytest.mark.parametrize(
    ("on", "step", "notes"),
    [
        ("flops_profiler", 4, ["FLOPs profiler runs in iteration 4.*Set flops_profiler.profile_step outside"]),
        ("flops_profiler", 2, []),
        ("wall_clock", 4, ["wall_clock_breakdown is on: DeepSpeed waits"]),
        ("autotuning", 4, ["autotuning ends the process in iteration 4.*Move the window to 2-4"]),
        ("autotuning", 6, []),
    ],
)
def test_deepspeeds_own_measurements_are_noted_where_they_disturb_the_window(on, step, notes):
    engine = SimpleNamespace(
        flops_profiler_enabled=lambda: on == "flops_profiler",
        flops_profiler_profile_step=lambda: step,
        wall_clock_breakdown=lambda: on == "wall_clock",
        autotuning_enabled=lambda: on == "autotuning",
        autotuning_start_profile_step=lambda: step - 2,
        autotuning_end_profile_step=lambda: step,
    )
    found = importlib.import_module("bridge_profiling.frameworks.deepspeed")._disturbances(engine, Window(3, 6))
    assert [bool(re.search(text, note)) for text, note in zip(notes, found, strict=True)] == [True] * len(notes)


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
    engine, batches = engine_of(1, gradient_accumulation_steps=2, wall_clock_breakdown=True)
    train(engine, batches[:5], folder / "epochs", epochs=2)
