"""Parameters and floating-point operations of a model, by arithmetic over its config: no model is allocated.

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
class ParameterCount:
    """Parameters of a whole model, over all its ranks.

    Attributes:
        total: all of them; an embedding that is also the output layer counts once.
        active: those that one token uses: of a layer's experts, only the ones its router selects.
    """

    total: int
    active: int


@dataclass(frozen=True)
class ModelFlops:
    """Model FLOPs of one token, forward and backward, over all ranks.

    Attributes:
        projections: products with weights: of the attention, the MLPs or experts and their routers, and the output layer.
        attention: products of activations: queries with keys, and the scores with the values, over the whole square of
            positions. That is PaLM's count. Under a causal mask half of the square is zero, and Megatron-LM's own
            log (`num_floating_point_operations`) counts only the other half; `causal` is that count.
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


def count_parameters(model: GPTModelConfig) -> ParameterCount:
    """The parameters of the GPTModel that megatron-core builds from this config.

    Args:
        model: a finalized model section; its derived sizes are used.
    """
    layers = [_layer(model, experts=experts) for experts in _has_experts(model)]
    embedding = model.vocab_size * model.hidden_size
    positions = model.seq_length * model.hidden_size if model.position_embedding_type == "learned_absolute" else 0
    output = 0 if model.share_embeddings_and_output_weights else embedding
    active = embedding + positions + _norm(model, model.hidden_size) + output
    active += sum(layer.weights + layer.vectors for layer in layers)
    return ParameterCount(total=active + sum(layer.inactive for layer in layers), active=active)


def flops_per_token(model: GPTModelConfig) -> ModelFlops:
    """Model FLOPs of a token in a sequence of `model.seq_length` tokens.

    Args:
        model: a finalized model section; its derived sizes are used.
    """
    layers = sum(_layer(model, experts=experts).weights for experts in _has_experts(model))
    output = model.hidden_size * model.vocab_size
    # A token's queries are multiplied with the keys of every position, and its scores with their values.
    products = 2 * model.num_layers * model.num_attention_heads * model.kv_channels * model.seq_length
    return ModelFlops(projections=_PASSES * 2 * (layers + output), attention=_PASSES * 2 * products)


def uncounted(model: GPTModelConfig) -> str | None:
    """The setting that makes this count of FLOPs invalid, as one types it, or None."""
    for name in ("experimental_attention_variant", "window_size"):
        if getattr(model, name) is not None:
            return f"model.{name}={getattr(model, name)}"
    return None


def iteration_work(config: ConfigContainer, world_size: int) -> IterationWork | None:
    """The work of one iteration over all ranks, or None if it cannot be counted (`uncounted`).

    Args:
        config: a finalized configuration.
        world_size: ranks of the job, one device each.
    """
    model = config.model
    if uncounted(model):
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


@dataclass(frozen=True)
class _Layer:
    """Parameters of one layer.

    Attributes:
        weights: of matrix products with each token.
        vectors: norms and biases that each token uses.
        inactive: of the experts that a token's router does not select.
    """

    weights: int
    vectors: int
    inactive: int = 0


def _has_experts(model: GPTModelConfig) -> list[bool]:
    if model.num_moe_experts is None:
        return [False] * model.num_layers
    pattern = model.moe_layer_freq
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(model.num_layers)]
    return [bool(entry) for entry in pattern]


def _layer(model: GPTModelConfig, *, experts: bool) -> _Layer:
    hidden = model.hidden_size
    heads = model.num_attention_heads * model.kv_channels
    queries_keys_values = heads + 2 * model.num_query_groups * model.kv_channels
    queries_keys_values += heads if model.attention_output_gate else 0
    weights = hidden * (queries_keys_values + heads)
    # One norm before the attention and one before the MLP or the experts.
    vectors = 2 * _norm(model, hidden) + (2 * _norm(model, model.kv_channels) if model.qk_layernorm else 0)
    vectors += queries_keys_values if model.add_bias_linear or model.add_qkv_bias else 0
    vectors += hidden if model.add_bias_linear else 0
    if not experts:
        mlp = _mlp(model, hidden, model.ffn_hidden_size)
        return _Layer(weights + mlp.weights, vectors + mlp.vectors)
    # The router.
    weights += hidden * model.num_moe_experts
    vectors += model.num_moe_experts if model.add_bias_linear else 0
    if model.moe_shared_expert_intermediate_size is not None:
        shared = _mlp(model, hidden, model.moe_shared_expert_intermediate_size)
        weights += shared.weights + (hidden if model.moe_shared_expert_gate else 0)
        vectors += shared.vectors
    if model.moe_latent_size:
        # Projections to the latent size before the experts, and back after them.
        weights += 2 * hidden * model.moe_latent_size
        vectors += hidden + model.moe_latent_size if model.add_bias_linear else 0
    expert, selected = _mlp(model, model.moe_latent_size or hidden, model.moe_ffn_hidden_size), model.moe_router_topk
    inactive = (model.num_moe_experts - selected) * (expert.weights + expert.vectors)
    return _Layer(weights + selected * expert.weights, vectors + selected * expert.vectors, inactive)


def _norm(model: GPTModelConfig, width: int) -> int:
    """A scale, and LayerNorm's shift."""
    return width if model.normalization == "RMSNorm" else 2 * width


def _mlp(model: GPTModelConfig, hidden: int, width: int) -> _Layer:
    """Up and down; SwiGLU has a second way up, which gates the first."""
    up = 2 * width if model.gated_linear_unit else width
    return _Layer(weights=hidden * (up + width), vectors=up + hidden if model.add_bias_linear else 0)
