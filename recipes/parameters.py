"""How many parameters a model has, by arithmetic over its config: nothing is allocated, no rank is needed."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.config import GPTModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a whole model, over all its ranks.

    Attributes:
        total: all of them; an embedding that is also the output layer counts once.
        active: those that one token meets: of a layer's experts, the ones its router takes.
    """

    total: int
    active: int


def count_parameters(model: GPTModelConfig) -> ParameterCount:
    """The parameters of the GPTModel that megatron-core builds from this config.

    Args:
        model: a finalized model section: its derived sizes count.
    """
    layers = [_layer(model, experts=experts) for experts in has_experts(model)]
    outside = _outside_layers(model)
    return ParameterCount(
        total=outside + sum(layer.total for layer in layers), active=outside + sum(layer.active for layer in layers)
    )


def has_experts(model: GPTModelConfig) -> list[bool]:
    """Which layers have experts."""
    if model.num_moe_experts is None:
        return [False] * model.num_layers
    pattern = model.moe_layer_freq
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(model.num_layers)]
    return [bool(entry) for entry in pattern]


def _outside_layers(model: GPTModelConfig) -> int:
    """Embeddings, the last norm and the output layer."""
    embedding = model.vocab_size * model.hidden_size
    positions = model.seq_length * model.hidden_size if model.position_embedding_type == "learned_absolute" else 0
    output = 0 if model.share_embeddings_and_output_weights else embedding
    return embedding + positions + _norm(model, model.hidden_size) + output


def _layer(model: GPTModelConfig, *, experts: bool) -> ParameterCount:
    """One transformer layer: a norm before the attention and one before the MLP or the experts."""
    shared = 2 * _norm(model, model.hidden_size) + _attention(model)
    if not experts:
        total = shared + _mlp(model, model.ffn_hidden_size)
        return ParameterCount(total, total)
    router = model.hidden_size * model.num_moe_experts + (model.num_moe_experts if model.add_bias_linear else 0)
    shared += router
    if model.moe_shared_expert_intermediate_size is not None:
        shared += _mlp(model, model.moe_shared_expert_intermediate_size)
    expert = _mlp(model, model.moe_ffn_hidden_size)
    return ParameterCount(shared + model.num_moe_experts * expert, shared + model.moe_router_topk * expert)


def _norm(model: GPTModelConfig, width: int) -> int:
    """A scale, and LayerNorm's shift."""
    return width if model.normalization == "RMSNorm" else 2 * width


def _attention(model: GPTModelConfig) -> int:
    """Queries of all heads, keys and values of each group, and the projection of the heads' outputs."""
    heads = model.num_attention_heads * model.kv_channels
    queries_keys_values = heads + 2 * model.num_query_groups * model.kv_channels
    weights = model.hidden_size * (queries_keys_values + heads)
    biases = queries_keys_values if model.add_bias_linear or model.add_qkv_bias else 0
    biases += model.hidden_size if model.add_bias_linear else 0
    return weights + biases + (2 * _norm(model, model.kv_channels) if model.qk_layernorm else 0)


def _mlp(model: GPTModelConfig, width: int) -> int:
    """Up and down, with a second way up that gates the first in SwiGLU."""
    up = 2 * width if model.gated_linear_unit else width
    return model.hidden_size * (up + width) + (up + model.hidden_size if model.add_bias_linear else 0)
