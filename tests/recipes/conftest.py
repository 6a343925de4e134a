"""Runs trainings of gpt_tiny in a process of their own, and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: What would make a process believe that it has peers, or write somewhere else.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "BRIDGE_PROFILING_DIR")


class Losses:
    """What a case wrote: iteration to loss as a hexadecimal float, for training and evaluation."""

    def __init__(self, file: Path) -> None:
        self.folder = file.parent
        records = [json.loads(line) for line in file.read_text().splitlines()]
        self.train = {r["iteration"]: r["hex"] for r in records if r["split"] == "train"}
        self.evaluation = {r["iteration"]: r["hex"] for r in records if r["split"] == "evaluation"}

    @property
    def values(self) -> list[float]:
        return [float.fromhex(loss) for loss in self.train.values()]


def _run_cases(folder: Path, cases: dict[str, list[str]], launcher: list[str]) -> tuple[dict[str, Losses], str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    done = subprocess.run(
        [sys.executable, *launcher, str(Path(__file__).with_name("run_cases.py")), str(folder), json.dumps(cases)],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: Losses(folder / f"{name}.jsonl") for name in cases}, done.stdout


@pytest.fixture(scope="session")
def run_cases():
    """Trains every case, `{name: overrides}`, in one process or under a launcher; gives their losses and the output."""
    return _run_cases
