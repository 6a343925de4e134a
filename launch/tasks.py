"""Recipes as NeMo-Run tasks: a `run.Script` of launch/pretrain.py, or a `run.Partial(pretrain, config=…)` to edit and submit.

Submit host only; on the NeMo-Run command line they are `--factory gpt_tiny`, `llama3_8b` and so on.
"""

# No `from __future__ import annotations`: NeMo-Run reads the return annotations of factories.

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nemo_run as run

from bridge_profiling.plugins import nemo_run_patches  # noqa: F401  # checks what an experiment makes of these tasks
from bridge_profiling.plugins.task import STARTS_NSYS_KEY, check_sendable
from bridge_profiling.settings.overrides import apply_overrides
from launch.pretrain import pretrain
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
    from bridge_profiling.doctor.request import SETTINGS_KEY

    metadata: dict[str, Any] = {STARTS_NSYS_KEY: True}
    if importlib.util.find_spec("megatron") is not None:
        from recipes.catalog import get_recipe, known_settings

        # `bridge-profiling doctor` reads the recipe's settings here, since it imports no recipe.
        metadata[SETTINGS_KEY] = " ".join(known_settings(get_recipe(recipe)()))
    path = Path("launch", "pretrain.py") if packaged else _ROOT / "launch" / "pretrain.py"
    arguments = ["--recipe", recipe, *(["--config", str(config.resolve())] if config else []), *overrides]
    return run.Script(path=str(path), entrypoint="python", args=arguments, metadata=metadata)


def pretrain_partial(recipe: str | Callable[[], Any], overrides: Sequence[str] = ()) -> run.Partial:
    """The training of a recipe, as a task for an experiment.

    Args:
        recipe: a recipe's name (`gpt_tiny`, `llama3_8b`), or a function that returns a ConfigContainer.
        overrides: Hydra-style settings applied to it, for example `train.train_iters=8`.

    Raises:
        ProfilingConfigError: an unknown recipe or setting, or a value that cannot be sent to the job.
    """
    from recipes.catalog import get_recipe

    config = (get_recipe(recipe) if isinstance(recipe, str) else recipe)()
    apply_overrides(config, overrides)
    task = run.Partial(pretrain, config=training_config(config))
    check_sendable(task)
    return task


@run.cli.factory(target=pretrain)
def gpt_tiny() -> run.Partial[pretrain]:
    """A GPT for two CPU cores."""
    return pretrain_partial("gpt_tiny")


@run.cli.factory(target=pretrain)
def gpt_125m() -> run.Partial[pretrain]:
    """A GPT of 125 million parameters."""
    return pretrain_partial("gpt_125m")


@run.cli.factory(target=pretrain)
def llama32_1b() -> run.Partial[pretrain]:
    """Llama 3.2 1B, for one GPU or more."""
    return pretrain_partial("llama32_1b")


@run.cli.factory(target=pretrain)
def llama3_8b() -> run.Partial[pretrain]:
    """Llama 3 8B, for 8 GPUs or a multiple."""
    return pretrain_partial("llama3_8b")


@run.cli.factory(target=pretrain)
def qwen3_30b_a3b() -> run.Partial[pretrain]:
    """Qwen3 30B-A3B, a mixture of experts, for 16 GPUs or a multiple."""
    return pretrain_partial("qwen3_30b_a3b")
