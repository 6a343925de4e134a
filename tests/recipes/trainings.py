"""Trainings in forked ranks, several one after the other: `{"name": "section.field=value …", "other": "--recipe=… …"}`.

Each one's losses are in folder/name.jsonl, its captures in folder/name.
"""

import json
import sys
from pathlib import Path

from tests.forked_ranks import run_ranks

#: A learning rate so small that no weight changes: what is left of a loss is its data.
FROZEN = "optimizer.lr=1e-30 optimizer.weight_decay=0"


def window(start: int, end: int) -> str:
    return f"profiling.use_pytorch_profiler=true profiling.profile_step_start={start} profiling.profile_step_end={end}"


class Losses:
    """What a training wrote: iteration to loss as a hexadecimal float, for training and evaluation."""

    def __init__(self, file: Path) -> None:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        self.train = {r["iteration"]: r["hex"] for r in records if r["split"] == "train"}
        self.evaluation = {r["iteration"]: r["hex"] for r in records if r["split"] == "evaluation"}
        self.values = [float.fromhex(loss) for loss in self.train.values()]


def run_cases(folder: Path, cases: dict[str, str], ranks: int = 1) -> tuple[dict[str, Losses], str]:
    """Train every case on that many ranks; gives their losses and the output."""
    ended = run_ranks(train_cases, folder, cases, folder=folder, ranks=ranks, check=True)
    return {name: Losses(folder / f"{name}.jsonl") for name in cases}, ended.stdout


def train_cases(folder: Path, cases: dict[str, str]) -> None:
    """A rank's part; six iterations unless a case says otherwise."""
    # Imported late, in the rank: the process that starts a training may not have megatron-core.
    from recipes.megatron.train import pretrain
    from tests.recipes.builders import recipe

    for name, text in cases.items():
        trained, overrides = text.split(" ", 1) if text.startswith("--recipe=") else ("gpt_tiny", text)
        places = f"logger.loss_file={folder}/{name}.jsonl profiling.output_dir={folder}/{name}"
        pretrain(recipe(trained.removeprefix("--recipe="), f"train.train_iters=6 {places} {overrides}"))
        assert "nemo_run" not in sys.modules
