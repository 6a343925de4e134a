"""Parameters and model FLOPs by arithmetic: by hand, as published, and as torch counts those of a model that runs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from bridge_profiling.launch_env import LaunchEnv  # noqa: E402
from recipes.catalog import RANKS  # noqa: E402
from recipes.config import ConfigContainer  # noqa: E402
from recipes.counts import count_parameters, flops_per_token, iteration_work  # noqa: E402
from recipes.finalize import finalize  # noqa: E402
from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu  # noqa: E402
from recipes.megatron.setup import build_chunk, distributed  # noqa: E402
from tests.recipes.builders import recipe  # noqa: E402

#: What the publishers of each model say: total, and active a token.
PUBLISHED = {
    "gpt_125m": (125e6, 125e6),
    "llama32_1b": (1.236e9, 1.236e9),
    "llama3_8b": (8.03e9, 8.03e9),
    "qwen3_30b_a3b": (30.53e9, 3.35e9),
}

LLAMA = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.kv_channels=32",
    "model.ffn_hidden_size=96",
    "model.vocab_size=128",
    "model.seq_length=32",
    "model.bf16=false",
]
EXPERTS = [
    "model.num_moe_experts=4",
    "model.moe_router_topk=2",
    "model.moe_ffn_hidden_size=24",
    "model.moe_token_dispatcher_type=allgather",
    "model.moe_layer_freq=2",
    "model.moe_shared_expert_intermediate_size=40",
]
RUN = {
    "learned positions, biases, LayerNorm, tied": ("gpt_tiny", []),
    "untied": ("gpt_tiny", ["model.share_embeddings_and_output_weights=false"]),
    "grouped queries, SwiGLU, RMSNorm, RoPE": ("llama32_1b", LLAMA),
    "biases of queries, keys and values alone": ("llama32_1b", [*LLAMA, "model.add_qkv_bias=true"]),
    "norms of queries and keys": ("llama32_1b", [*LLAMA, "model.qk_layernorm=true", "model.normalization=LayerNorm"]),
    "experts in every other layer, and shared ones": ("llama32_1b", [*LLAMA, *EXPERTS]),
}


def finalized(name: str, *overrides: str) -> ConfigContainer:
    config = recipe(name, *overrides)
    finalize(config, RANKS[name])
    return config


def test_by_hand_for_gpt_125m():
    # A layer's weights: queries, keys, values and projection 768·(3·768 + 768), MLP 2·768·3072.
    layer = 2_359_296 + 4_718_592
    # Twelve of them and the output layer, 768·50304. Two FLOPs for each, and three passes: one forward, two backward.
    projections = 6 * (12 * layer + 38_633_472)
    # Each token's 12 heads of 64 meet 2048 keys, and the scores 2048 values, in each of the 12 layers.
    attention = 6 * 12 * 2 * (12 * 64) * 2048
    config = finalized("gpt_125m")
    flops, work = flops_per_token(config.model), iteration_work(config, 8)
    assert (flops.projections, flops.attention) == (projections, attention) == (741_408_768, 226_492_416)
    # A causal mask leaves half of the attention's square.
    assert (flops.total, flops.causal) == (967_901_184, projections + 113_246_208)
    assert (work.tokens, work.devices, work.precision) == (32 * 2048, 8, "bf16")
    assert (work.model_flops, work.attention_flops) == (65_536 * 967_901_184, 65_536 * 226_492_416)


def test_what_is_not_counted_is_not_guessed():
    config = finalized("gpt_125m")
    config.model.window_size = (128, 0)
    assert iteration_work(config, 1) is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_recipe_has_the_parameters_that_were_published(name):
    count = count_parameters(finalized(name).model)
    assert (count.total, count.active) == pytest.approx(PUBLISHED[name], rel=0.01)


def test_of_a_layers_experts_only_those_that_a_token_takes_are_active():
    count = count_parameters(finalized("qwen3_30b_a3b").model)
    assert count.total - count.active == 48 * (128 - 8) * (3 * 2048 * 768)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", RUN)
def test_the_counts_are_those_of_the_model_that_is_built_and_runs(what, monkeypatch):
    # megatron-core 0.16.1 defines the name only where Transformer Engine is, and the router asks for it everywhere.
    monkeypatch.setattr("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, raising=False)
    name, overrides = RUN[what]
    config = recipe(name, *overrides, "model.transformer_impl=local")
    adapt_to_cpu(config)
    finalize(config, 1)
    length = config.model.seq_length
    tokens, positions = torch.arange(length)[None] % config.model.vocab_size, torch.arange(length)[None]
    with megatron_on_cpu(), distributed(config, LaunchEnv()):
        model = build_chunk(config, None)
        with FlopCounterMode(display=False) as counter:
            model(tokens, positions, None, labels=tokens).sum().backward()
    assert count_parameters(config.model).total == sum(parameter.numel() for parameter in model.parameters())
    assert flops_per_token(config.model).total * length == counter.get_total_flops()
