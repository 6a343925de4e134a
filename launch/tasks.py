"""Recipes as NeMo-Run tasks: a `run.Script` of launch/pretrain.py, or a `run.Partial(pretrain, config=…)` to edit and submit.

Submit host only; on the NeMo-Run command line they are `--factory gpt_tiny`, `llama3_8b` and so on.
"""

# No `from __future__ import annotations`: NeMo-Run reads the return annotations of factories.

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nemo_run as run

from bridge_profiling.doctor.request import SETTINGS_KEY
from bridge_profiling.plugins import nemo_run_patches  # noqa: F401  # checks what an experiment makes of these tasks
from bridge_profiling.plugins.task import STARTS_NSYS_KEY, check_sendable
from launch.pretrain import build_config, pretrain
from recipes.catalog import RANKS, get_recipe, known_settings
from recipes.tasks import training_config

_ROOT = Path(__file__).resolve().parent.parent


def pretrain_script(
    recipe: str, overrides: Sequence[str] = (), *, config: Path | None = None, packaged: bool = False
) -> run.Script:
    """launch/pretrain.py as a task for an experiment; its metadata says that it starts nsys itself. Needs no megatron-core.

    Args:
        recipe: a recipe's name.
        overrides: Hydra-style settings, for example `train.train_iters=8`.
        config: YAML file of settings, applied before the overrides.
        packaged: the job gets a copy of this checkout and starts in it, as on a cluster.
    """
    metadata: dict[str, Any] = {STARTS_NSYS_KEY: True}
    if importlib.util.find_spec("megatron") is not None:
        # `bridge-profiling doctor` reads the recipe's settings here, since it imports no recipe.
        metadata[SETTINGS_KEY] = " ".join(known_settings(get_recipe(recipe)()))
    path = Path("launch", "pretrain.py") if packaged else _ROOT / "launch" / "pretrain.py"
    arguments = ["--recipe", recipe, *(["--config", str(config.resolve())] if config else []), *overrides]
    return run.Script(path=str(path), entrypoint="python", args=arguments, metadata=metadata)


def pretrain_partial(recipe: str, overrides: Sequence[str] = (), *, config: Path | None = None) -> run.Partial:
    """The training of a recipe, as a task for an experiment.

    Args:
        recipe: a recipe's name (`gpt_tiny`, `llama3_8b`).
        overrides: Hydra-style settings applied to it, for example `train.train_iters=8`.
        config: YAML file of settings, applied before the overrides.

    Raises:
        ProfilingConfigError: an unknown recipe or setting, or a value that cannot be sent to the job.
    """
    task = run.Partial(pretrain, config=training_config(build_config(recipe, [str(config)] if config else [], overrides)))
    check_sendable(task)
    return task


# On the NeMo-Run command line, `--factory gpt_tiny`.
for _name in RANKS:
    run.cli.factory(functools.partial(pretrain_partial, _name), target=pretrain, name=_name)
