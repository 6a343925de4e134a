"""Parameters are counted without a model, and the count is that of the model megatron-core builds."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

from bridge_profiling.overrides import apply_overrides  # noqa: E402
from recipes.catalog import RANKS, RECIPES, get_recipe  # noqa: E402
from recipes.counts import count_parameters  # noqa: E402
from recipes.finalize import finalize  # noqa: E402
from tests.recipes.small_models import LLAMA, SMALL  # noqa: E402

#: What the publishers of each model say: total, and active a token.
PUBLISHED = {
    "gpt_125m": (125e6, 125e6),
    "llama32_1b": (1.236e9, 1.236e9),
    "llama3_8b": (8.03e9, 8.03e9),
    "qwen3_30b_a3b": (30.53e9, 3.35e9),
}

QWEN = [
    *SMALL,
    "model.num_query_groups=2",
    "model.kv_channels=32",
    "model.num_moe_experts=4",
    "model.moe_router_topk=2",
    "model.moe_ffn_hidden_size=24",
    "model.expert_model_parallel_size=1",
    "model.pipeline_model_parallel_size=1",
    # Without Transformer Engine and CUDA such a model can be built, though not trained.
    "model.moe_grouped_gemm=false",
    "model.moe_permute_fusion=false",
    "model.moe_token_dispatcher_type=allgather",
]
BUILT = {
    "learned positions, biases, LayerNorm, tied": ("gpt_tiny", []),
    "untied": ("gpt_tiny", ["model.share_embeddings_and_output_weights=false"]),
    "grouped queries, SwiGLU, RMSNorm, RoPE, tied": ("llama32_1b", LLAMA),
    "the same, untied": (
        "llama3_8b",
        [*LLAMA, "model.tensor_model_parallel_size=1", "model.sequence_parallel=false", "ddp.overlap_param_gather=false"],
    ),
    "biases of queries, keys and values alone": ("llama32_1b", [*LLAMA, "model.add_qkv_bias=true"]),
    "norms of queries and keys": ("llama32_1b", [*LLAMA, "model.qk_layernorm=true", "model.normalization=LayerNorm"]),
    "experts": ("qwen3_30b_a3b", QWEN),
    "experts in every other layer, and shared ones": (
        "qwen3_30b_a3b",
        [*QWEN, "model.moe_layer_freq=2", "model.moe_shared_expert_intermediate_size=40"],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_recipe_has_the_parameters_that_were_published(name):
    config = RECIPES[name]()
    finalize(config, RANKS[name])
    count = count_parameters(config.model)
    assert (count.total, count.active) == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("what", BUILT)
def test_the_count_is_that_of_the_model_that_is_built(what, monkeypatch):
    from bridge_profiling.launch_env import LaunchEnv
    from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu
    from recipes.megatron.setup import build_chunk, distributed

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    recipe, overrides = BUILT[what]
    config = get_recipe(recipe)()
    apply_overrides(config, overrides)
    adapt_to_cpu(config)
    config.model.transformer_impl = "local"
    finalize(config, 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with megatron_on_cpu(), distributed(config, LaunchEnv()):
        model = build_chunk(config, None)
    assert count_parameters(config.model).total == sum(parameter.numel() for parameter in model.parameters())


def test_of_a_layers_experts_only_those_that_a_token_takes_are_active():
    config = get_recipe("qwen3_30b_a3b")()
    finalize(config, 16)
    count = count_parameters(config.model)
    expert = 3 * 2048 * 768
    assert count.total - count.active == 48 * (128 - 8) * expert
