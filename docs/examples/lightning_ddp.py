"""Lightning under DDP: torchrun --nproc-per-node 2 lightning_ddp.py"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from bridge_profiling.frameworks.lightning import ProfilingCallback


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch):
        loss = self.layers(batch).square().mean()
        print(f"rank {self.global_rank} loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


seed_everything(0)
profiling = ProfilingCallback(use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5, profile_ranks="all")
data = torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=4)
trainer = Trainer(strategy="ddp", devices=2, max_steps=8, callbacks=[profiling])
trainer.fit(Model(), data)
