"""Trains a small model with DeepSpeed's ZeRO 2. Type: torchrun --nproc-per-node 2 docs/examples/deepspeed_zero.py"""

import deepspeed
import torch

from bridge_profiling.frameworks.deepspeed import Profiling

deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
}
data = list(torch.randn(128, 32))
optimizer = torch.optim.AdamW(model.parameters())
engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, training_data=data)

window = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5, "profile_ranks": "all"}
with Profiling(engine, record_shapes=True, **window) as profiling:
    for inputs in profiling.steps(loader):
        with profiling.phase("host-to-device"):
            inputs = inputs.to(engine.device)
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        print(f"rank {engine.global_rank} loss {loss.item().hex()}", flush=True)
