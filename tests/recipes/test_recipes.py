"""Every recipe fits its ranks, is the published architecture, and can be described without being built."""

from __future__ import annotations

import gc
import re

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.doctor.request import Request, apply_arguments

pytest.importorskip("megatron.core")

from launch import describe
from recipes.catalog import RANKS, RECIPES, get_recipe
from recipes.config import TrainConfig
from recipes.finalize import finalize
from recipes.megatron.loop_tools import manual_gc
from tests.recipes.builders import recipe, tiny

#: layers, hidden, heads, groups, head's width, feed-forward, vocabulary, tied, rotary base: as published.
ARCHITECTURES = {
    "llama32_1b": (16, 2048, 32, 8, 64, 8192, 128256, True, 500000),
    "llama3_8b": (32, 4096, 32, 8, 128, 14336, 128256, False, 500000),
    "qwen3_30b_a3b": (48, 2048, 32, 4, 128, 6144, 151936, False, 1000000),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("times", [1, 4])
def test_every_recipe_fits_the_ranks_it_was_laid_out_for_and_multiples_of_them(name, times):
    finalize(recipe(name), times * RANKS[name])


def test_each_call_gives_a_configuration_of_its_own():
    tiny("train.train_iters=3")
    assert tiny().train.train_iters == 20


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_the_published_one(name):
    config = recipe(name)
    finalize(config, RANKS[name])
    model = config.model
    assert ARCHITECTURES[name] == (
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.num_query_groups,
        model.kv_channels,
        model.ffn_hidden_size,
        model.vocab_size,
        model.share_embeddings_and_output_weights,
        model.rotary_base,
    )
    assert (model.normalization, model.activation_func.__name__, model.gated_linear_unit) == ("RMSNorm", "silu", True)
    assert not model.add_bias_linear


def test_garbage_is_collected_every_interval_and_at_no_other_time(monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append("now"))
    with manual_gc(TrainConfig(manual_gc=True, manual_gc_interval=3)) as collect:
        assert not gc.isenabled()
        for iteration in range(7):
            collect(iteration)
    assert gc.isenabled()
    assert len(collected) == 1 + 2


def test_a_wrong_name_gets_the_nearest():
    with pytest.raises(ProfilingConfigError, match=r"'gpt_tny'; the recipes are gpt_tiny, gpt_125m, .*\. Type gpt_tiny"):
        get_recipe("gpt_tny")


def test_a_recipe_is_described_without_being_built(capsys):
    assert describe.main(["--recipe", "qwen3_30b_a3b"]) == 0
    said = capsys.readouterr().out
    for line in (
        r"parameters   30,532,122,624 \(30\.53 billion\), 3,353,032,704 active a token",
        r"layout       16 ranks: tp=1 pp=2 cp=1 ep=8 dp=8",
        r"model FLOPs  .*GFLOP a token.*",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE)


def test_a_description_is_checked_as_the_job_would_be(capsys):
    assert describe.main(["--recipe", "llama3_8b", "--ranks", "3"]) == 2
    assert "error: a world of 3 cannot be split" in capsys.readouterr().err


def test_a_description_prints_the_settings_as_doctors_arguments(capsys):
    assert describe.main(["--recipe", "llama3_8b", "--settings", "train.global_batch_size=64"]) == 0
    request = Request()
    apply_arguments(request, capsys.readouterr().out.split())
    known = request.settings
    assert (known["model.num_layers"], known["model.tensor_model_parallel_size"]) == (32, 2)
    assert (known["model.position_embedding_type"], known["model.gated_linear_unit"]) == ("rope", True)
    assert (known["train.train_iters"], known["train.global_batch_size"]) == (50, 64)
    assert "model.num_moe_experts" not in known
