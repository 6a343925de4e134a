"""The recipes: plain functions that return a ConfigContainer. Architectures are as their authors published them.

`llama32_1b` and `llama3_8b` also train with megatron-core's own layers; `llama3_8b` then needs `model.sequence_parallel=false`.
"""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from torch.nn.functional import silu

from recipes.config import ConfigContainer, GPTModelConfig, SchedulerConfig, TrainConfig


def gpt_tiny() -> ConfigContainer:
    """A GPT of 112 thousand parameters in fp32: a step takes about 20 ms on one CPU core. The default on a laptop."""
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
    model = _bf16_model(num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50304, seq_length=2048)
    train = TrainConfig(train_iters=50, micro_batch_size=2, global_batch_size=32)
    return _training(model, train, lr=6e-4, min_lr=6e-5)


def llama32_1b() -> ConfigContainer:
    """Llama 3.2 1B (1.24 billion parameters, tied embeddings) at 4,096 tokens in bf16, for one or more GPUs of 80 GB.

    Data parallelism only: TP=1, PP=1. The model was published for 131,072 tokens; `model.seq_length` is the training's.
    """
    model = _llama_model(
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        seq_length=4096,
        rope_scaling=True,
        rope_scaling_factor=32.0,
        share_embeddings_and_output_weights=True,
    )
    return _training(model, _train(global_batch_size=64))


def llama3_8b() -> ConfigContainer:
    """Llama 3 8B (8.03 billion parameters) at its 8,192 tokens in bf16, for one or more nodes of 8 GPUs of 80 GB.

    TP=2 with sequence parallelism, so that a rank holds half of the weights and activations; DP over the rest.
    """
    model = _llama_model(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        seq_length=8192,
        share_embeddings_and_output_weights=False,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    config = _training(model, _train(global_batch_size=128))
    config.ddp.overlap_param_gather = True
    return config


def qwen3_30b_a3b() -> ConfigContainer:
    """Qwen3 30B-A3B (30.5 billion parameters, 3.3 active a token) at 4,096 tokens in bf16, for 2 nodes of 8 GPUs of 80 GB.

    A mixture of 128 experts, of which each token takes 8: EP=8 within a node, PP=2 over the two. Needs Transformer Engine.
    """
    model = _swiglu_model(
        num_layers=48,
        hidden_size=2048,
        # Published, but unused: the width of a dense layer, and every layer has experts.
        ffn_hidden_size=6144,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        qk_layernorm=True,
        vocab_size=151936,
        seq_length=4096,
        share_embeddings_and_output_weights=False,
        layernorm_epsilon=1e-6,
        rotary_base=1000000,
        num_moe_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-3,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        expert_model_parallel_size=8,
        pipeline_model_parallel_size=2,
    )
    return _training(model, _train(global_batch_size=256))


def _bf16_model(**settings: object) -> GPTModelConfig:
    return GPTModelConfig(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        **settings,
    )


def _swiglu_model(**settings: object) -> GPTModelConfig:
    """Llama and Qwen: RMSNorm, SwiGLU, no biases, RoPE."""
    return _bf16_model(
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        position_embedding_type="rope",
        **settings,
    )


def _llama_model(**settings: object) -> GPTModelConfig:
    """The Llama 3 family: 32 heads that share 8 keys and values."""
    return _swiglu_model(
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=128256,
        layernorm_epsilon=1e-5,
        rotary_base=500000,
        **settings,
    )


def _train(global_batch_size: int) -> TrainConfig:
    return TrainConfig(
        train_iters=50, micro_batch_size=1, global_batch_size=global_batch_size, manual_gc=True, manual_gc_interval=100
    )


def _training(model: GPTModelConfig, train: TrainConfig, *, lr: float = 3e-4, min_lr: float = 3e-5) -> ConfigContainer:
    """The optimizer, schedule and gradient reduction of all recipes in bf16."""
    return ConfigContainer(
        model=model,
        train=train,
        optimizer=OptimizerConfig(lr=lr, min_lr=min_lr, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=10),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True),
    )
