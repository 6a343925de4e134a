"""GPT recipes: plain functions that return a ConfigContainer, and the names under which a command line finds them."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from bridge_profiling.errors import ProfilingConfigError
from recipes.config import ConfigContainer, GPTModelConfig, SchedulerConfig, TrainConfig


def gpt_tiny() -> ConfigContainer:
    """A GPT of 112 thousand parameters in fp32: a step takes some 20 ms on one CPU core. The default on a laptop."""
    return ConfigContainer(
        model=GPTModelConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            vocab_size=128,
            seq_length=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        train=TrainConfig(train_iters=20, micro_batch_size=2, global_batch_size=8),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.01, clip_grad=1.0),
    )


def gpt_125m() -> ConfigContainer:
    """GPT of 125 million parameters (12 layers, hidden 768, 12 heads) in bf16, for one GPU or more."""
    return ConfigContainer(
        model=GPTModelConfig(
            num_layers=12,
            hidden_size=768,
            num_attention_heads=12,
            vocab_size=50304,
            seq_length=2048,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            bias_activation_fusion=True,
            bias_dropout_fusion=True,
        ),
        train=TrainConfig(train_iters=50, micro_batch_size=2, global_batch_size=32),
        optimizer=OptimizerConfig(lr=6e-4, min_lr=6e-5, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=10),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True),
    )


RECIPES: dict[str, Callable[[], ConfigContainer]] = {"gpt_tiny": gpt_tiny, "gpt_125m": gpt_125m}


def get_recipe(name: str) -> Callable[[], ConfigContainer]:
    """The recipe of that name.

    Raises:
        ProfilingConfigError: there is none; the message names the nearest.
    """
    if name in RECIPES:
        return RECIPES[name]
    nearest = difflib.get_close_matches(name, RECIPES, n=1)
    raise ProfilingConfigError(
        f"there is no recipe {name!r}",
        why=f"the recipes are {', '.join(RECIPES)}",
        instead=f"Type {nearest[0] if nearest else next(iter(RECIPES))}",
    )
