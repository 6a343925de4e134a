"""Trainings in forked ranks, several one after the other: `{"name": ["section.field=value", …], "other": ["--recipe=…", …]}`.

Each one's losses are in folder/name.jsonl, its captures in folder/name.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.forked_ranks import run_ranks

PROFILED = "profiling.use_pytorch_profiler=true"

#: A learning rate so small that no weight changes: what is left of a loss is its data.
FROZEN = ["optimizer.lr=1e-30", "optimizer.weight_decay=0"]


def window(start: int, end: int) -> list[str]:
    return [PROFILED, f"profiling.profile_step_start={start}", f"profiling.profile_step_end={end}"]


class Losses:
    """What a training wrote: iteration to loss as a hexadecimal float, for training and evaluation."""

    def __init__(self, file: Path) -> None:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        self.train = {r["iteration"]: r["hex"] for r in records if r["split"] == "train"}
        self.evaluation = {r["iteration"]: r["hex"] for r in records if r["split"] == "evaluation"}
        self.values = [float.fromhex(loss) for loss in self.train.values()]


def run_cases(folder: Path, cases: dict[str, list[str]], ranks: int = 1) -> tuple[dict[str, Losses], str]:
    """Train every case on that many ranks; gives their losses and the output."""
    ended = run_ranks(train_cases, folder, cases, folder=folder, ranks=ranks)
    assert ended.exit_codes == [0] * ranks, ended.stdout + ended.stderr
    return {name: Losses(folder / f"{name}.jsonl") for name in cases}, ended.stdout


def train_cases(folder: Path, cases: dict[str, list[str]]) -> None:
    """A rank's part; six iterations unless a case says otherwise."""
    # Imported late, in the rank: the process that starts a training may not have megatron-core.
    from recipes.megatron.train import pretrain
    from tests.recipes.builders import recipe

    for name, overrides in cases.items():
        trained = "gpt_tiny"
        if overrides and overrides[0].startswith("--recipe="):
            trained, overrides = overrides[0].removeprefix("--recipe="), overrides[1:]
        places = [f"logger.loss_file={folder}/{name}.jsonl", f"profiling.output_dir={folder}/{name}"]
        pretrain(recipe(trained, "train.train_iters=6", *places, *overrides))


def annotations(trace: Path) -> list[str]:
    """The names of a trace's annotated ranges."""
    with gzip.open(trace, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]


def iterations(trace: Path) -> list[int]:
    """The iterations in a trace."""
    steps = [name for name in annotations(trace) if name.startswith("ProfilerStep#")]
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in steps)
