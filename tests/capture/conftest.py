"""Small real trainings under the real torch profiler, and readers of what they leave."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.control.protocol import RequestDirectory


class Run:
    """Trains `iterations` of a small model under a hook, and reads back what the hook wrote."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.losses: list[str] = []

    def config(self, start: int, end: int, **asked: object) -> ProfilingConfig:
        asked = {"use_pytorch_profiler": True, **asked}
        return ProfilingConfig(profile_step_start=start, profile_step_end=end, **asked)

    def train(
        self,
        config: ProfilingConfig | None,
        iterations,
        *,
        on_iteration=lambda i: None,
        between=lambda i, hook: None,
        rank=0,
        **hook,
    ):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ProfilingHook(config, rank=rank, output_dir=self.root, **hook) as opened:
            for iteration in iterations:
                with opened.iteration(iteration):
                    with opened.range("forward-backward"):
                        loss = model(torch.full((4, 8), float(iteration % 7))).square().mean()
                        optimizer.zero_grad()
                        loss.backward()
                    on_iteration(iteration)
                    with opened.range("optimizer"):
                        optimizer.step()
                    self.losses.append(loss.item().hex())
                between(iteration, opened)
        return opened

    def trace(self, folder: str, rank: int = 0) -> dict:
        with gzip.open(self.root / "torch" / folder / f"rank-{rank}.pt.trace.json.gz", "rt") as file:
            return json.load(file)

    def iterations(self, folder: str, rank: int = 0) -> list[int]:
        """The iterations a trace holds, from its own annotations."""
        return iterations_in(self.trace(folder, rank))

    def manifest(self, folder: str, rank: int = 0) -> dict:
        return json.loads((self.root / "manifest" / folder / f"rank-{rank}.json").read_text())


class Training:
    """A small training of one rank in this process.

    It polls for requests every 30 ms: often, but a busy machine still receives one within the four polls that it has.
    """

    def __init__(self, root, *, seconds=0.004, **settings):
        self.config = ProfilingConfig(output_dir=str(root), on_demand_seconds=0.03, **settings)
        self.requests, self.root, self.seconds = RequestDirectory(root), root, seconds
        self.losses: list[str] = []

    def run(self, iterations, on_iteration=lambda i: None, until=None, rank=0, world_size=1):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        deadline = time.monotonic() + 240
        with ProfilingHook(self.config, rank=rank, world_size=world_size) as hook:
            for iteration in iterations:
                with hook.iteration(iteration):
                    loss = model(torch.full((4, 8), float(iteration % 7))).square().mean()
                    loss.backward()
                    self.losses.append(loss.item().hex())
                    time.sleep(self.seconds)
                    on_iteration(iteration)
                if until is not None and until():
                    break
                assert time.monotonic() < deadline, "it never happened"
        return hook

    def done(self, count=1):
        return len(list((self.requests.path / "done").glob("*.json"))) >= count

    def manifests(self):
        found = [json.loads(path.read_text()) for path in (self.root / "manifest").glob("*/rank-0.json")]
        return sorted(found, key=lambda manifest: manifest["window"]["start"])


def iterations_in(trace: dict) -> list[int]:
    names = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "profiles")
