"""Trains a small model with DistributedDataParallel. Type: torchrun --nproc-per-node 2 docs/examples/ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from bridge_profiling.frameworks.ddp_fsdp import Profiling

dist.init_process_group()
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
torch.cuda.set_device(device if device.type == "cuda" else -1)  # -1 changes nothing
torch.manual_seed(0)
data = torch.randn(64, 32)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
model = DistributedDataParallel(layers.to(device))
optimizer = torch.optim.AdamW(model.parameters())

window = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5, "profile_ranks": "all"}
with Profiling(model, optimizer, record_shapes=True, **window) as profiling:
    for batch in profiling.steps(loader):
        with profiling.phase("host-to-device"):
            batch = batch.to(device)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} loss {loss.item().hex()}", flush=True)
dist.destroy_process_group()
