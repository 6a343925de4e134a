"""Trains on two connected ranks until FOLDER/stop is there, for tests that trigger captures; writes FOLDER/losses-RANK.json.

torchrun --nproc-per-node 2 triggered_training.py FOLDER
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook


def step(state: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    return torch.sin(state + gradients)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, state, losses = dist.get_rank(), torch.zeros(8), []
    # Ten polls a second, so that a request is carried out within half a second.
    config = ProfilingConfig(on_demand_seconds=0.1)
    with ProfilingHook(config, rank=rank, world_size=2, output_dir=folder / "profiles") as hook:
        stop = torch.zeros(1)
        while not stop:
            with hook.iteration(len(losses)):
                gradients = torch.full((8,), float(len(losses) + rank))
                dist.all_reduce(gradients)
                state = step(state, gradients)
                losses.append(state.sum().item().hex())
                time.sleep(0.02)
            stop = torch.tensor(float((folder / "stop").exists()))
            dist.all_reduce(stop)
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
