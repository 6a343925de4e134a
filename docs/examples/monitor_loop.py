"""A loop that is watched while it runs: `python docs/examples/monitor_loop.py monitor.jsonl [PORT]`."""

import sys

import torch

from bridge_profiling.monitor import Monitor

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
samples = torch.randn(4096, 64)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples, samples.sum(1, keepdim=True)), batch_size=128)

port = int(sys.argv[2]) if len(sys.argv) > 2 else None
with Monitor(jsonl=sys.argv[1], port=port) as monitor:
    for inputs, targets in monitor.training.loading(data):
        loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.training.end_step(samples=len(inputs), loss=loss)
        monitor.training.log_metrics({"elements": inputs.numel()})
print(monitor.training.get_summary())
