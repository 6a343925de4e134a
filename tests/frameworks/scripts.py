"""Scripts that know nothing of profiling, and how they are run: by Python itself, and by `bridge-profiling run`."""

import subprocess
import sys
from pathlib import Path

from tests.frameworks.captured import Captured
from tests.system import jobs

#: The beginning of scripts. They are compiled also where `make test` switches compiling off.
HEAD = """
import os
os.environ.pop("TORCHDYNAMO_DISABLE", None)
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps, optimizer=sgd, model=model):
    for i in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""

#: Two optimizers (a GAN's), gradient accumulation over two batches, a step that GradScaler leaves out, DataLoader workers, and
#: a process of its own that trains as well. Ends with exit code 3.
EVERYTHING = f"""{HEAD}
import multiprocessing, sys
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, i):
        return torch.full((8,), float(i % 7)), torch.tensor([float(i % 3)])

if __name__ == "__main__":
    print(sys.argv, __file__, sys.path[0], Data.__module__)
    g, d = torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    of_g, of_d = torch.optim.AdamW(g.parameters()), torch.optim.SGD(d.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    iteration = 0
    for micro, (x, y) in enumerate(DataLoader(Data(), batch_size=8, num_workers=2)):
        loss = (d(g(x)) - y).square().mean()
        scaler.scale(loss).backward()
        if micro % 2 == 0:
            continue
        if iteration == 4:
            d[0].weight.grad.fill_(float("inf"))
        scaler.step(of_d)
        scaler.step(of_g)
        scaler.update()
        g.zero_grad()
        d.zero_grad()
        print(iteration, loss.item().hex())
        iteration += 1
        if iteration == 4:
            process = multiprocessing.get_context("fork").Process(target=train, args=(10,))
            process.start()
            process.join()
            print("child", process.exitcode)
    sys.exit(3)
"""


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a folder."""
    variables = jobs.environment(**{"COLUMNS": "200"} | environment)
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=240)


def bridge_profiling(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `bridge-profiling ARGUMENTS` in a folder."""
    return python(folder, "-m", "bridge_profiling.cli", *arguments, **environment)


def start(*arguments: str) -> None:
    """What `bridge-profiling run` starts, in a process that has loaded torch already."""
    from bridge_profiling.frameworks.start import main

    # `python -m` begins the search path with the working directory.
    sys.path.insert(0, "")
    sys.argv = ["-m", *arguments]
    main(arguments)


def manifest(root: Path, rank: int = 0, folder: str = "iter-3-6") -> dict:
    """What a rank wrote down."""
    return Captured(root, folder).manifest(rank)


def ranges(root: Path, rank: int = 0, folder: str = "iter-3-6") -> list[str]:
    """Names of the ranges in a rank's trace, in order."""
    return Captured(root, folder).ranges(rank)
