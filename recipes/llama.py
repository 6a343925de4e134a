"""Llama 3 recipes: plain functions that return a ConfigContainer. Architectures as Meta published them.

Both train with megatron-core's own layers too; `llama3_8b` then needs `model.sequence_parallel=false`.
"""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from torch.nn.functional import silu

from recipes.config import ConfigContainer, GPTModelConfig, SchedulerConfig, TrainConfig


def llama32_1b() -> ConfigContainer:
    """Llama 3.2 1B (1.24 billion parameters, tied embeddings) at 4,096 tokens in bf16, for one GPU of 80 GB or more of them.

    Data parallelism alone: TP=1, PP=1. The model was published for 131,072 tokens; `model.seq_length` is the training's.
    """
    return _llama(
        _model(
            num_layers=16,
            hidden_size=2048,
            ffn_hidden_size=8192,
            seq_length=4096,
            rope_scaling=True,
            rope_scaling_factor=32.0,
            share_embeddings_and_output_weights=True,
        ),
        TrainConfig(train_iters=50, micro_batch_size=1, global_batch_size=64, manual_gc=True, manual_gc_interval=100),
    )


def llama3_8b() -> ConfigContainer:
    """Llama 3 8B (8.03 billion parameters) at its 8,192 tokens in bf16, for a node of 8 GPUs of 80 GB, or several nodes.

    TP=2 with sequence parallelism, so that a rank holds half of the weights and activations; DP over the rest.
    """
    config = _llama(
        _model(
            num_layers=32,
            hidden_size=4096,
            ffn_hidden_size=14336,
            seq_length=8192,
            share_embeddings_and_output_weights=False,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
        ),
        TrainConfig(train_iters=50, micro_batch_size=1, global_batch_size=128, manual_gc=True, manual_gc_interval=100),
    )
    config.ddp.overlap_param_gather = True
    return config


def _model(**sizes: object) -> GPTModelConfig:
    """What the Llama 3 family has in common: RMSNorm, SwiGLU, no biases, 32 heads that share 8 keys and values, RoPE."""
    return GPTModelConfig(
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=128256,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=500000,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        **sizes,
    )


def _llama(model: GPTModelConfig, train: TrainConfig) -> ConfigContainer:
    return ConfigContainer(
        model=model,
        train=train,
        optimizer=OptimizerConfig(lr=3e-4, min_lr=3e-5, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=10),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True),
    )
