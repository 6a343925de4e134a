"""Profiles ten calls of one function, times its parts, and measures the model alone: `python docs/examples/auto_profile.py`."""

import torch

from bridge_profiling.easy import auto_profile, phase, phase_times, quick_benchmark

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@auto_profile(warmup=3, iterations=10)
def train_step(batch: torch.Tensor) -> float:
    """One step."""
    with phase("forward"):
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
    with phase("backward"):
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    return loss.item()


losses = [train_step(torch.randn(256, 64)) for _ in range(20)]
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
print(phase_times())
quick_benchmark(model, (256, 64), train=True)
