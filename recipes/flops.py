"""Floating-point operations of a training, by arithmetic over its config: nothing is allocated, no rank is needed.

Counted as PaLM counts them (Chowdhery et al. 2022, appendix B): two for each multiplication and addition of the forward
pass's matrix products, and twice as many again for the backward pass, which has the gradients of both factors to compute.
Norms, activations, the softmax, rotary embeddings, the embedding's lookup and the optimizer are not counted, and neither is
what activation recomputation does again: these are the *model's* FLOPs, whatever an implementation makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bridge_profiling.capture.work import IterationWork, Precision
from recipes.config import ConfigContainer, GPTModelConfig
from recipes.parameters import has_experts

#: Forward and backward: the gradients of the input and of the weight each cost as much as the product itself.
_PASSES = 3


@dataclass(frozen=True)
class ModelFlops:
    """Model FLOPs of one token, forward and backward, over all ranks.

    Attributes:
        projections: products with weights: of the attention, the MLPs or experts and their routers, and the output layer.
        attention: products of activations: queries with keys, and the scores with the values, over the whole square of
            positions. That is PaLM's count. Under a causal mask half of the square is zero, and Megatron-LM's own
            log (`num_floating_point_operations`) counts the other half alone; `causal` is that count.
    """

    projections: int
    attention: int

    @property
    def total(self) -> int:
        """PaLM's count."""
        return self.projections + self.attention

    @property
    def causal(self) -> int:
        """The same, with half of the attention's square."""
        return self.projections + self.attention // 2


def flops_per_token(model: GPTModelConfig) -> ModelFlops:
    """Model FLOPs of a token in a sequence of `model.seq_length` tokens.

    Args:
        model: a finalized model section: its derived sizes count.
    """
    layers = sum(_layer_weights(model, experts=experts) for experts in has_experts(model))
    output = model.hidden_size * model.vocab_size
    # A token's queries meet the keys of every position, and its scores their values: one product each.
    meetings = 2 * model.num_layers * model.num_attention_heads * model.kv_channels * model.seq_length
    return ModelFlops(projections=_PASSES * 2 * (layers + output), attention=_PASSES * 2 * meetings)


def uncounted(model: GPTModelConfig) -> str | None:
    """The setting for which this arithmetic does not hold, as one types it; None where it holds."""
    for name in ("experimental_attention_variant", "window_size"):
        if getattr(model, name) is not None:
            return f"model.{name}={getattr(model, name)}"
    return None


def iteration_work(config: ConfigContainer, world_size: int) -> IterationWork | None:
    """What one iteration of this training computes, over all ranks; None where that is not counted here.

    Args:
        config: a finalized configuration.
        world_size: ranks of the job, one device each.
    """
    if uncounted(config.model):
        return None
    tokens, flops = config.train.global_batch_size * config.model.seq_length, flops_per_token(config.model)
    return IterationWork(
        model_flops=tokens * flops.total,
        attention_flops=tokens * flops.attention,
        tokens=tokens,
        devices=world_size,
        precision=_precision(config.model),
    )


def _precision(model: GPTModelConfig) -> Precision:
    if model.fp8 is not None:
        return "fp8"
    if model.bf16 or model.fp16:
        return "bf16" if model.bf16 else "fp16"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _layer_weights(model: GPTModelConfig, *, experts: bool) -> int:
    """Weights of one layer that a token is multiplied with."""
    heads = model.num_attention_heads * model.kv_channels
    queries = 2 * heads if model.attention_output_gate else heads
    attention = model.hidden_size * (queries + 2 * model.num_query_groups * model.kv_channels + heads)
    return attention + (_expert_weights(model) if experts else _mlp_weights(model, model.hidden_size, model.ffn_hidden_size))


def _expert_weights(model: GPTModelConfig) -> int:
    """The router, the experts that a token takes, and those that all tokens share."""
    router = model.hidden_size * model.num_moe_experts
    # With a latent size, what goes to the experts is made smaller before them, and larger again behind them.
    width, resizing = model.hidden_size, 0
    if model.moe_latent_size:
        width, resizing = model.moe_latent_size, 2 * model.hidden_size * model.moe_latent_size
    taken = model.moe_router_topk * _mlp_weights(model, width, model.moe_ffn_hidden_size)
    shared = 0
    if model.moe_shared_expert_intermediate_size is not None:
        shared = _mlp_weights(model, model.hidden_size, model.moe_shared_expert_intermediate_size)
        shared += model.hidden_size if model.moe_shared_expert_gate else 0
    return router + resizing + taken + shared


def _mlp_weights(model: GPTModelConfig, hidden: int, width: int) -> int:
    """Up and down, with a second way up that gates the first in SwiGLU."""
    return hidden * width * (3 if model.gated_linear_unit else 2)
