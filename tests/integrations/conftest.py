"""The published wheel of Megatron Bridge, and its training loop around a small model."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations import bridge_loop, bridge_wheel


@pytest.fixture(scope="session")
def wheel():
    """Megatron Bridge's published wheel."""
    missing = bridge_wheel.why_no_wheel()
    if missing:
        pytest.skip(missing)
    return bridge_loop.Wheel(bridge_wheel.WHEEL)


@pytest.fixture(scope="session")
def connected(tmp_path_factory):
    """torch.distributed with the one rank of this process, as Megatron Bridge always has it."""
    bridge_loop.connect(tmp_path_factory.mktemp("distributed") / "store")
    yield
    torch.distributed.destroy_process_group()


class Run:
    """Trainings in the wheel's loop that write to one root, and readers of what they leave."""

    def __init__(self, wheel, root: Path) -> None:
        self._wheel, self.root = wheel, root

    def training(self, **asked):
        return bridge_loop.BridgeTraining(self._wheel, **asked)

    def process(self, *, launcher: tuple[str, ...] = (), **asked) -> subprocess.CompletedProcess:
        """The same in a process of its own; `end` says in which iteration a signal arrives or a step raises."""
        command = [*(launcher or [sys.executable]), bridge_loop.__file__]
        self.root.parent.mkdir(parents=True, exist_ok=True)
        arguments = [str(self._wheel.path), str(self.root.parent), json.dumps(asked)]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)

    def trace(self, folder: str, rank: int = 0) -> dict:
        with gzip.open(self.root / "torch" / folder / f"rank-{rank}.pt.trace.json.gz", "rt") as file:
            return json.load(file)

    def iterations(self, folder: str, rank: int = 0) -> list[int]:
        """The iterations a trace holds, from its own annotations."""
        names = [event["name"] for event in self.trace(folder, rank)["traceEvents"] if event.get("ph") == "X"]
        return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))

    def manifest(self, folder: str, rank: int = 0) -> dict:
        return json.loads((self.root / "manifest" / folder / f"rank-{rank}.json").read_text())


@pytest.fixture
def run(wheel, connected, tmp_path):
    return Run(wheel, tmp_path / "profiles")
