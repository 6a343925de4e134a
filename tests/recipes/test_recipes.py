"""Recipes are the published models, with the parameters and FLOPs of a model that runs; what differs between releases."""

import gc

import pytest

from bridge_profiling.common.launch_env import LaunchEnv

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from recipes.catalog import RANKS  # noqa: E402
from recipes.config import TrainConfig  # noqa: E402
from recipes.counts import flops_per_token, iteration_work  # noqa: E402
from recipes.finalize import finalize  # noqa: E402
from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu  # noqa: E402
from recipes.megatron.loop_tools import manual_gc  # noqa: E402
from recipes.megatron.setup import build_chunk, distributed  # noqa: E402
from tests.recipes.builders import finalized, recipe  # noqa: E402

#: As published.
PARAMETERS = {"llama32_1b": 1_235_814_400, "llama3_8b": 8_030_261_248, "qwen3_30b_a3b": 30_532_122_624}

LLAMA = (
    "model.num_layers=2 model.hidden_size=64 model.num_attention_heads=4 model.num_query_groups=2 model.kv_channels=32"
    " model.ffn_hidden_size=96 model.vocab_size=128 model.seq_length=32 model.bf16=false"
)
EXPERTS = (
    "model.num_moe_experts=4 model.moe_router_topk=2 model.moe_ffn_hidden_size=24 model.moe_layer_freq=2"
    " model.moe_token_dispatcher_type=allgather model.moe_shared_expert_intermediate_size=40"
)
RUN = {
    "learned positions, biases, LayerNorm, tied": ("gpt_tiny", ""),
    "untied": ("gpt_tiny", "model.share_embeddings_and_output_weights=false"),
    "grouped queries, SwiGLU, RMSNorm, RoPE": ("llama32_1b", LLAMA),
    "norms of queries and keys": ("llama32_1b", f"{LLAMA} model.qk_layernorm=true model.normalization=LayerNorm"),
    "experts in every other layer, and shared ones": ("llama32_1b", f"{LLAMA} {EXPERTS}"),
}


@pytest.mark.parametrize("name", RANKS)
def test_every_recipe_fits_the_ranks_it_was_laid_out_for_and_multiples_of_them(name):
    finalized(name)
    finalized(name, ranks=4 * RANKS[name])


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_has_the_published_number_of_parameters_and_activation(name):
    """The whole model on one rank, with megatron-core's own layers, on a device without memory."""
    alone = "model.transformer_impl=local model.sequence_parallel=false"
    alone += " model.moe_grouped_gemm=false model.moe_token_dispatcher_type=allgather"
    sizes = " ".join(f"model.{size}_model_parallel_size=1" for size in ("tensor", "pipeline", "expert"))
    config = recipe(name, f"{alone} {sizes}")
    adapt_to_cpu(config)
    finalize(config, 1)
    config.model.perform_initialization = False
    with megatron_on_cpu(), distributed(config, LaunchEnv()), torch.device("meta"):
        model = build_chunk(config, None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (parameters, config.model.activation_func.__name__) == (PARAMETERS[name], "silu")


def test_flops_by_hand_for_gpt_125m():
    config = finalized("gpt_125m")
    flops, work = flops_per_token(config.model), iteration_work(config, 8)
    # Six FLOPs for each weight of 12 layers, 768·(4·768 + 2·3072), and of the output layer, 768·50304.
    projections = 741_408_768
    # Each token's 12 heads of 64 meet 2048 keys, and the scores 2048 values, in each of the 12 layers.
    assert (flops.projections, flops.attention) == (projections, 226_492_416)
    assert flops.total == 967_901_184
    assert (work.tokens, work.devices, work.precision) == (32 * 2048, 8, "bf16")
    assert (work.model_flops, work.attention_flops) == (65_536 * 967_901_184, 65_536 * 226_492_416)
    config.model.window_size = (128, 0)
    # Not counted, and not guessed.
    assert iteration_work(config, 8) is None


@pytest.mark.parametrize("what", RUN)
def test_the_counted_flops_are_those_of_the_model_that_runs(what):
    name, overrides = RUN[what]
    config = recipe(name, f"{overrides} model.transformer_impl=local")
    adapt_to_cpu(config)
    finalize(config, 1)
    length = config.model.seq_length
    tokens, positions = torch.arange(length)[None] % config.model.vocab_size, torch.arange(length)[None]
    with megatron_on_cpu(), distributed(config, LaunchEnv()):
        model = build_chunk(config, None)
        with FlopCounterMode(display=False) as counter:
            model(tokens, positions, None, labels=tokens).sum().backward()
    assert flops_per_token(config.model).total * length == counter.get_total_flops()


def test_garbage_is_collected_every_interval_and_at_no_other_time(monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append("now"))
    with manual_gc(TrainConfig(manual_gc=True, manual_gc_interval=3)) as collect:
        assert not gc.isenabled()
        for iteration in range(7):
            collect(iteration)
    assert gc.isenabled()
    assert len(collected) == 1 + 2
