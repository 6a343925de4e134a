"""A plain PyTorch script that knows nothing of profiling: `bridge-profiling run [--nproc 2] docs/examples/plain_loop.py`."""

import os

import torch
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
samples = torch.randn(4096, 64)
targets = samples.sum(dim=1, keepdim=True)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples, targets), batch_size=256)

distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
if distributed:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (batch, target) in enumerate(loader):
    loss = torch.nn.functional.mse_loss(model(batch), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.9f}")

if distributed:
    torch.distributed.destroy_process_group()
