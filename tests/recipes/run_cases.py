"""Several trainings one after the other in the same rank: `{"name": ["section.field=value", …], "other": ["--recipe=…", …]}`.

Each case's losses are in folder/name.jsonl, its captures in folder/name.
"""

from __future__ import annotations

from pathlib import Path


def train_cases(folder: Path, cases: dict[str, list[str]]) -> None:
    """Train every case, for six iterations unless it says otherwise."""
    # Imported late, in the rank: the process that starts a training may not have megatron-core.
    from bridge_profiling.overrides import apply_overrides
    from recipes.catalog import get_recipe
    from recipes.megatron.train import pretrain

    for name, overrides in cases.items():
        recipe = "gpt_tiny"
        if overrides and overrides[0].startswith("--recipe="):
            recipe, overrides = overrides[0].removeprefix("--recipe="), overrides[1:]
        config = get_recipe(recipe)()
        places = [f"logger.loss_file={folder}/{name}.jsonl", f"profiling.output_dir={folder}/{name}"]
        apply_overrides(config, ["train.train_iters=6", *places, *overrides])
        pretrain(config)
