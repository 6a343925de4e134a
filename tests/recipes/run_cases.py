"""Runs several trainings one after the other in one process, since loading megatron-core takes seconds.

    run_cases.py FOLDER '{"name": ["section.field=value", …], "other": ["--recipe=llama32_1b", …], …}'

Each case's losses are in FOLDER/name.jsonl, its captures in FOLDER/name.
"""

from __future__ import annotations

import json
import os
import sys


def main(folder: str, cases: dict[str, list[str]]) -> None:
    # Imported late: a process that writes a checkpoint starts another one, which imports this module.
    import torch

    from bridge_profiling.overrides import apply_overrides
    from recipes.catalog import get_recipe
    from recipes.megatron.train import pretrain

    if "RANK" in os.environ:
        # One group for all cases: under torchrun a process can join its first one only.
        torch.distributed.init_process_group("gloo")
    for name, overrides in cases.items():
        recipe = "gpt_tiny"
        if overrides and overrides[0].startswith("--recipe="):
            recipe, overrides = overrides[0].removeprefix("--recipe="), overrides[1:]
        config = get_recipe(recipe)()
        places = [f"logger.loss_file={folder}/{name}.jsonl", f"profiling.output_dir={folder}/{name}"]
        apply_overrides(config, ["train.train_iters=6", *places, *overrides])
        pretrain(config)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
