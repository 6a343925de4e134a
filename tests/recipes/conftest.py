"""Runs trainings of gpt_tiny in processes of their own, and reads what they wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_ranks import run_ranks
from tests.recipes.run_cases import train_cases


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


def _run_cases(folder: Path, cases: dict[str, list[str]], ranks: int = 1) -> tuple[dict[str, Losses], str]:
    ended = run_ranks(train_cases, folder, cases, folder=folder, ranks=ranks)
    assert ended.exit_codes == [0] * ranks, ended.stdout + ended.stderr
    return {name: Losses(folder / f"{name}.jsonl") for name in cases}, ended.stdout


@pytest.fixture(scope="session")
def run_cases():
    """Trains every case, `{name: overrides}`, on one rank or several; gives their losses and the output."""
    return _run_cases
