"""Floating-point operations of a model, by arithmetic over its config: no model is allocated.

FLOPs are counted as in PaLM (Chowdhery et al. 2022, appendix B): two for each multiplication and addition of the forward
pass's matrix products, and twice as many for the backward pass, which computes the gradients of both factors. Norms,
activations, the softmax, rotary embeddings, the embedding's lookup, the optimizer and activation recomputation are not
counted: these are the *model's* FLOPs, independent of its implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bridge_profiling.capture.work import IterationWork
from bridge_profiling.common.peaks import Precision
from recipes.config import ConfigContainer, GPTModelConfig

#: Forward and backward: the gradients of the input and of the weight each cost as much as the product itself.
_PASSES = 3


@dataclass(frozen=True)
class ModelFlops:
    """Model FLOPs of one token, forward and backward, over all ranks.

    Attributes:
        projections: products with weights: of the attention, the MLPs or experts and their routers, and the output layer.
        attention: products of activations: queries with keys, and the scores with the values, over the whole square of
            positions. That is PaLM's count. Under a causal mask half of the square is zero, and Megatron-LM's own
            log (`num_floating_point_operations`) counts only the other half.
    """

    projections: int
    attention: int

    @property
    def total(self) -> int:
        """PaLM's count."""
        return self.projections + self.attention


def flops_per_token(model: GPTModelConfig) -> ModelFlops:
    """Model FLOPs of a token in a sequence of `model.seq_length` tokens.

    Args:
        model: a finalized model section; its derived sizes are used.
    """
    weights = sum(_layer_weights(model, experts=experts) for experts in _has_experts(model))
    output = model.hidden_size * model.vocab_size
    # A token's queries are multiplied with the keys of every position, and its scores with their values.
    products = 2 * model.num_layers * model.num_attention_heads * model.kv_channels * model.seq_length
    return ModelFlops(projections=_PASSES * 2 * (weights + output), attention=_PASSES * 2 * products)


def iteration_work(config: ConfigContainer, world_size: int) -> IterationWork | None:
    """The work of one iteration over all ranks, or None for a kind of attention that is not counted.

    Args:
        config: a finalized configuration.
        world_size: ranks of the job, one device each.
    """
    model = config.model
    if model.experimental_attention_variant is not None or model.window_size is not None:
        return None
    tokens, flops = config.train.global_batch_size * model.seq_length, flops_per_token(model)
    precision: Precision = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if model.fp8 is not None:
        precision = "fp8"
    elif model.bf16 or model.fp16:
        precision = "bf16" if model.bf16 else "fp16"
    return IterationWork(
        model_flops=tokens * flops.total,
        attention_flops=tokens * flops.attention,
        tokens=tokens,
        devices=world_size,
        precision=precision,
    )


def _has_experts(model: GPTModelConfig) -> list[bool]:
    if model.num_moe_experts is None:
        return [False] * model.num_layers
    pattern = model.moe_layer_freq
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(model.num_layers)]
    return [bool(entry) for entry in pattern]


def _layer_weights(model: GPTModelConfig, *, experts: bool) -> int:
    """Weights of one layer that each token is multiplied with: of the experts, only those that its router selects."""
    hidden = model.hidden_size
    heads = model.num_attention_heads * model.kv_channels
    queries_keys_values = heads + 2 * model.num_query_groups * model.kv_channels
    queries_keys_values += heads if model.attention_output_gate else 0
    weights = hidden * (queries_keys_values + heads)
    # Up and down; SwiGLU has a second way up, which gates the first.
    matrices = 3 if model.gated_linear_unit else 2
    if not experts:
        return weights + matrices * hidden * model.ffn_hidden_size
    # The router.
    weights += hidden * model.num_moe_experts
    if model.moe_shared_expert_intermediate_size is not None:
        weights += matrices * hidden * model.moe_shared_expert_intermediate_size
        weights += hidden if model.moe_shared_expert_gate else 0
    if model.moe_latent_size:
        # Projections to the latent size before the experts, and back after them.
        weights += 2 * hidden * model.moe_latent_size
    return weights + model.moe_router_topk * matrices * (model.moe_latent_size or hidden) * model.moe_ffn_hidden_size
