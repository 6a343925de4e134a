"""A loop of your own around Accelerate: torchrun --nproc-per-node 2 accelerate_loop.py"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from bridge_profiling.frameworks.accelerate import Profiling

set_seed(0)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.randn(128, 32), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

settings = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5, "profile_ranks": "all"}
with Profiling(accelerator, **settings) as profiling:
    for batch in profiling.steps(loader):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {accelerator.process_index} loss {loss.item()!r}", flush=True)
accelerator.end_training()
