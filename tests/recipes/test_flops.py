"""Model FLOPs by arithmetic: by hand, as published formulas have them, and as torch counts those of a model that runs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

import torch  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from bridge_profiling.overrides import apply_overrides  # noqa: E402
from recipes.catalog import RANKS, get_recipe  # noqa: E402
from recipes.counts import (  # noqa: E402
    count_parameters,
    flops_per_token,
    iteration_work,
)
from recipes.finalize import finalize  # noqa: E402
from tests.recipes.small_models import LLAMA  # noqa: E402


def finalized(recipe, *overrides, ranks=None):
    config = get_recipe(recipe)()
    apply_overrides(config, overrides)
    finalize(config, ranks or RANKS[recipe])
    return config


def test_by_hand_for_gpt_125m():
    # A layer's weights: queries, keys, values and projection 768·(3·768 + 768), MLP 2·768·3072.
    layer = 2_359_296 + 4_718_592
    # Twelve of them and the output layer, 768·50304. Two FLOPs for each, and three passes: one forward, two backward.
    projections = 6 * (12 * layer + 38_633_472)
    # Each token's 12 heads of 64 meet 2048 keys, and the scores 2048 values, in each of the 12 layers.
    attention = 6 * 12 * 2 * (12 * 64) * 2048
    assert (projections, attention) == (741_408_768, 226_492_416)
    flops = flops_per_token(finalized("gpt_125m").model)
    assert (flops.projections, flops.attention) == (projections, attention)
    assert flops.total == 967_901_184
    work = iteration_work(finalized("gpt_125m"), 1)
    assert (work.tokens, work.devices, work.precision) == (32 * 2048, 1, "bf16")
    assert work.model_flops == 65_536 * 967_901_184  # 63.4 TFLOP an iteration
    assert work.attention_flops == 65_536 * 226_492_416


@pytest.mark.parametrize("recipe", ["gpt_125m", "llama32_1b", "llama3_8b", "qwen3_30b_a3b"])
def test_they_are_those_of_palms_formula(recipe):
    # Chowdhery et al. 2022, appendix B: 6N + 12·L·H·Q·T a token, for N parameters met, L layers of H heads of Q channels.
    # N there leaves no norm and bias out, which are in no matrix product, and an untied embedding is looked up, not multiplied.
    model = finalized(recipe).model
    met = count_parameters(model).active
    met -= 0 if model.share_embeddings_and_output_weights else model.vocab_size * model.hidden_size
    met -= model.seq_length * model.hidden_size if model.position_embedding_type == "learned_absolute" else 0
    palm = 6 * met + 12 * model.num_layers * model.num_attention_heads * model.kv_channels * model.seq_length
    assert flops_per_token(model).total == pytest.approx(palm, rel=2e-3)


def test_they_are_those_of_megatrons_formula():
    # Narayanan et al. 2021, section 5.1, without its recomputation (72 where that has 96), for B sequences of s tokens.
    model = finalized("gpt_125m").model
    layers, hidden, length, vocabulary = model.num_layers, model.hidden_size, model.seq_length, model.vocab_size
    megatron = 72 * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocabulary / (12 * layers * hidden))
    assert length * flops_per_token(model).total == pytest.approx(megatron)


def test_half_of_the_attentions_square_is_what_a_causal_mask_leaves():
    flops = flops_per_token(finalized("llama3_8b").model)
    # 32 layers, 32 heads of 128, 8192 positions; of 57.9 GFLOP a token.
    assert flops.total - flops.causal == 6 * 32 * 32 * 128 * 8192
    assert flops.causal / flops.total == pytest.approx(0.889, abs=1e-3)


def test_of_a_layers_experts_those_that_a_token_takes_count():
    model = finalized("qwen3_30b_a3b").model
    fewer = finalized("qwen3_30b_a3b", "model.moe_router_topk=4").model
    assert flops_per_token(model).total - flops_per_token(fewer).total == 6 * 48 * 4 * (3 * 2048 * 768)
    router = 6 * 48 * 2048
    more = finalized("qwen3_30b_a3b", "model.num_moe_experts=136").model
    assert flops_per_token(more).total - flops_per_token(model).total == 8 * router


def test_how_a_training_is_split_over_ranks_changes_nothing():
    split = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]
    assert iteration_work(finalized("gpt_125m", *split, ranks=8), 8) == iteration_work(finalized("gpt_125m"), 8)


def test_what_is_not_counted_is_not_guessed():
    config = finalized("gpt_125m")
    config.model.window_size = (128, 0)
    assert iteration_work(config, 1) is None


EXPERTS = [
    *LLAMA,
    "model.kv_channels=32",
    "model.num_moe_experts=4",
    "model.moe_router_topk=2",
    "model.moe_ffn_hidden_size=24",
    "model.moe_token_dispatcher_type=allgather",
    "model.moe_layer_freq=2",
]
RUN = {
    "learned positions, biases, tied": ("gpt_tiny", []),
    "untied": ("gpt_tiny", ["model.share_embeddings_and_output_weights=false"]),
    "grouped queries, SwiGLU": ("llama32_1b", LLAMA),
    "experts in every other layer": ("llama32_1b", EXPERTS),
    "shared experts": ("llama32_1b", [*EXPERTS, "model.moe_shared_expert_intermediate_size=40"]),
}


@pytest.mark.parametrize("what", RUN)
def test_torch_counts_as_many_in_a_model_that_runs(what, monkeypatch):
    from bridge_profiling.launch_env import LaunchEnv
    from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu
    from recipes.megatron.setup import build_chunk, distributed

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    # megatron-core 0.16.1 defines the name only where Transformer Engine is, and the router asks for it everywhere.
    monkeypatch.setattr("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, raising=False)
    recipe, overrides = RUN[what]
    config = get_recipe(recipe)()
    apply_overrides(config, overrides)
    adapt_to_cpu(config)
    config.model.transformer_impl = "local"
    finalize(config, 1)
    length = config.model.seq_length
    tokens, positions = torch.arange(length)[None] % config.model.vocab_size, torch.arange(length)[None]
    with megatron_on_cpu(), distributed(config, LaunchEnv()):
        model = build_chunk(config, None)
        with FlopCounterMode(display=False) as counter:
            model(tokens, positions, None, labels=tokens).sum().backward()
    assert counter.get_total_flops() == length * flops_per_token(config.model).total
