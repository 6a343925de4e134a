"""Trains on two connected ranks until it is stopped, for tests that trigger captures.

    torchrun --nproc-per-node 2 triggered_training.py FOLDER SETTINGS

It stops when `FOLDER/stop` is there, and writes `FOLDER/losses-RANK.json`.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook


def main(folder: Path, settings: dict) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    config = ProfilingConfig(**settings)
    with ProfilingHook(config, rank=rank, world_size=dist.get_world_size(), output_dir=folder / "profiles") as hook:
        iteration = 0
        while True:
            with hook.iteration(iteration):
                loss = model(torch.full((4, 8), float(iteration % 7 + rank))).square().mean()
                optimizer.zero_grad()
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                losses.append(loss.item().hex())
                time.sleep(0.02)
            iteration += 1
            stop = torch.tensor(float((folder / "stop").exists()))
            dist.all_reduce(stop)
            if stop:
                break
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
