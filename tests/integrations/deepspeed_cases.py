"""Trainings with a DeepSpeed engine on connected CPU ranks, each with its profiling; run by `forked_ranks.run_ranks`."""

from __future__ import annotations

from pathlib import Path

WINDOW = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5, "profile_ranks": "all"}


def engine_of(stage: int, **config):
    """A small engine, and its micro-batches."""
    import deepspeed
    import torch

    from tests.integrations.with_and_without import leave_deepspeed_uncompiled

    leave_deepspeed_uncompiled()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}} | config
    deepspeed.init_distributed(dist_backend="gloo")
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine, list(torch.randn(8, 2, 16))


def train(engine, batches, folder: Path, *, save_at: int | None = None, epochs: int = 1) -> None:
    from bridge_profiling.integrations.deepspeed import Profiling

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
