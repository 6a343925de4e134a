"""Qwen3 recipes: plain functions that return a ConfigContainer. Architectures as Alibaba published them."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from torch.nn.functional import silu

from recipes.config import ConfigContainer, GPTModelConfig, SchedulerConfig, TrainConfig


def qwen3_30b_a3b() -> ConfigContainer:
    """Qwen3 30B-A3B (30.5 billion parameters, 3.3 active a token) at 4,096 tokens in bf16, for 2 nodes of 8 GPUs of 80 GB.

    A mixture of 128 experts, of which each token takes 8: EP=8 within a node, PP=2 over the two. Needs Transformer Engine.
    """
    return ConfigContainer(
        model=GPTModelConfig(
            num_layers=48,
            hidden_size=2048,
            # Every layer has experts; this width of a dense layer is published with them, and not used.
            ffn_hidden_size=6144,
            num_attention_heads=32,
            num_query_groups=4,
            kv_channels=128,
            qk_layernorm=True,
            vocab_size=151936,
            seq_length=4096,
            share_embeddings_and_output_weights=False,
            normalization="RMSNorm",
            layernorm_epsilon=1e-6,
            gated_linear_unit=True,
            activation_func=silu,
            add_bias_linear=False,
            position_embedding_type="rope",
            rotary_base=1000000,
            hidden_dropout=0.0,
            attention_dropout=0.0,
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
            bf16=True,
            bias_activation_fusion=True,
            bias_dropout_fusion=True,
        ),
        train=TrainConfig(train_iters=50, micro_batch_size=1, global_batch_size=256, manual_gc=True, manual_gc_interval=100),
        optimizer=OptimizerConfig(lr=3e-4, min_lr=3e-5, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=10),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True),
    )
