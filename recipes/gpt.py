"""GPT recipes: plain functions that return a ConfigContainer."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

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
