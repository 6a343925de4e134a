"""Scripts that know nothing of profiling, and how they are run: by Python itself, and by `bridge-profiling run`."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

#: Two optimizers (a GAN's), gradient accumulation over two batches, a step that GradScaler leaves out, DataLoader workers, and
#: a process of its own that trains as well. Ends with exit code 3.
EVERYTHING = """
import argparse, multiprocessing, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, i):
        return torch.full((8,), float(i % 7)), torch.tensor([float(i % 3)])

def child(done):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    done.put(True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps")
    print(parser.parse_args(), sys.argv[0], __file__, sys.path[0], Data.__module__)
    torch.manual_seed(0)
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
        of_d.zero_grad()
        of_g.zero_grad()
        print(iteration, loss.item().hex())
        iteration += 1
        if iteration == 4:
            context = multiprocessing.get_context("fork")
            done = context.Queue()
            process = context.Process(target=child, args=(done,))
            process.start()
            done.get()
            process.join()
            print("child", process.exitcode)
    sys.exit(3)
"""

#: Raises in the middle of iteration 4, out of a data loader.
RAISES = """
import torch
def batches():
    for i in range(9):
        if i == 4:
            raise KeyError("no such sample")
        yield torch.full((4, 2), float(i))
class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        return batches()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(Data(), batch_size=None):
    model(x).sum().backward()
    optimizer.step()
"""

#: Trains nothing; loads torch.
INFERS = """
import torch
with torch.inference_mode():
    print(torch.nn.Linear(2, 2)(torch.zeros(1, 2)).shape)
"""

#: The same without a single step before the window.
TOO_SHORT = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""

#: Trains in a thread of its own.
IN_A_THREAD = """
import threading, torch
def train():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(8):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""

#: Trains on with another optimizer, so many steps, and keeps the first.
TWO_PHASES = """
import torch
model = torch.nn.Linear(2, 1)
first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())
for optimizer, steps in ((first, 2), (second, {})):
    for i in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""

#: Has a profiler of its own, which begins inside the window and ends after it.
PROFILES_ITSELF = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.profiler.schedule(wait={}, warmup={}, active=3, repeat=1)
with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda it: it.export_chrome_trace("own.json")) as profiler:
    for i in range(12):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        profiler.step()
print(profiler.step_num)
"""

#: Saves its model whole, inside the window and after it, keeps a copy, and exports it.
SAVES = """
import copy, pickle, torch
class Net(torch.nn.Linear):
    pass
model = Net(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(10):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if i in (2, 9):
        best = copy.deepcopy(model)
        torch.save(best, "best.pt")
        assert b"bridge_profiling" not in pickle.dumps(model) + pickle.dumps(best)
        print(i, torch.load("best.pt", weights_only=False)._compiled_call_impl)
torch.jit.script(model)
print(i, "scripted")
"""


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "BRIDGE_PROFILING_"))}
    variables = inherited | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=240)


def bridge_profiling(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `bridge-profiling ARGUMENTS` in a folder."""
    return python(folder, "-m", "bridge_profiling.cli", *arguments, **environment)


def start(*arguments: str) -> None:
    """What `bridge-profiling run` starts, in a process that has loaded torch already."""
    from bridge_profiling.easy.start import main

    sys.argv = ["-m", *arguments]
    main(arguments)


def manifest(root: Path, rank: int = 0, folder: str = "iter-3-6") -> dict:
    """What a rank wrote down."""
    return json.loads((root / "manifest" / folder / f"rank-{rank}.json").read_text())


def ranges(root: Path, rank: int = 0, folder: str = "iter-3-6") -> list[str]:
    """Names of the ranges in a rank's trace, in order."""
    with gzip.open(root / "torch" / folder / f"rank-{rank}.pt.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]
