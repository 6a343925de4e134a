"""Starts launch/pretrain.py the way a launcher does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_ranks import LAUNCHER_VARIABLES

SCRIPT = str(Path(__file__).parents[2] / "launch" / "pretrain.py")
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node")


def start(folder: Path, *arguments: str, ranks: int | None = None) -> subprocess.Popen:
    """Start the script in a process of its own, from elsewhere, with no path to the checkout; or `ranks` of them."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    launcher = () if ranks is None else (*TORCHRUN, str(ranks))
    return subprocess.Popen(
        [sys.executable, *launcher, SCRIPT, *arguments],
        env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process group of its own, which a test that kills it can kill whole.
        start_new_session=True,
    )


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """This process was started by no launcher."""
    for name in (*LAUNCHER_VARIABLES, "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
