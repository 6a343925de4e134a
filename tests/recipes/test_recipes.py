"""The recipes: what they describe, how a command line finds them, and that the Llamas train with megatron-core's own layers."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from bridge_profiling import ProfilingConfigError

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

from launch import describe  # noqa: E402
from recipes.catalog import RANKS, RECIPES, get_recipe  # noqa: E402
from recipes.config import TrainConfig  # noqa: E402
from recipes.finalize import finalize  # noqa: E402
from recipes.megatron.loop_tools import manual_gc  # noqa: E402
from recipes.models import gpt_tiny  # noqa: E402

#: layers, hidden, heads, groups, head's width, feed-forward, vocabulary, tied, rotary base: as published.
ARCHITECTURES = {
    "llama32_1b": (16, 2048, 32, 8, 64, 8192, 128256, True, 500000),
    "llama3_8b": (32, 4096, 32, 8, 128, 14336, 128256, False, 500000),
    "qwen3_30b_a3b": (48, 2048, 32, 4, 128, 6144, 151936, False, 1000000),
}

CUT_DOWN = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.ffn_hidden_size=96",
    "model.vocab_size=128",
    "model.seq_length=64",
    "train.global_batch_size=8",
    "scheduler.lr_warmup_iters=1",
    "optimizer.lr=1e-3",
]
TRAINED = {
    "llama32_1b": ["--recipe=llama32_1b", *CUT_DOWN],
    "llama3_8b": [
        "--recipe=llama3_8b",
        *CUT_DOWN,
        "model.tensor_model_parallel_size=1",
        "model.sequence_parallel=false",
    ],
    "gpt": [],
    "gpt_with_manual_gc": ["train.manual_gc=true", "train.manual_gc_interval=2"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run_cases):
    return run_cases(tmp_path_factory.mktemp("recipes"), TRAINED)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("times", [1, 2, 4])
def test_every_recipe_fits_the_ranks_it_was_laid_out_for_and_multiples_of_them(name, times):
    finalize(get_recipe(name)(), times * RANKS[name])


def test_each_call_gives_a_configuration_of_its_own():
    first = gpt_tiny()
    first.train.train_iters = 3
    assert gpt_tiny().train.train_iters == 20


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_the_published_one(name):
    config = get_recipe(name)()
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


@pytest.mark.parametrize("name", ["llama32_1b", "llama3_8b"])
def test_a_llama_cut_down_trains_on_a_cpu(trained, name):
    losses = trained[0][name].values
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.2


def test_collecting_garbage_by_hand_changes_no_loss(trained):
    assert trained[0]["gpt_with_manual_gc"].train == trained[0]["gpt"].train


def test_the_log_says_whose_layers_were_trained(trained):
    assert trained[1].count("layers: megatron-core's own (local spec), which exclude: ") == len(TRAINED)


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
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "parameters   30,532,122,624 (30.53 billion), 3,353,032,704 active a token"
    assert "layout       16 ranks: tp=1 pp=2 cp=1 ep=8 dp=8" in said
    assert any(line.startswith("model FLOPs  ") and "GFLOP a token" in line for line in said)


def test_a_description_is_checked_as_the_job_would_be(capsys):
    assert describe.main(["--recipe", "llama3_8b", "--ranks", "3"]) == 2
    assert "error: a world of 3 cannot be split" in capsys.readouterr().err


def test_importing_the_loop_says_nothing_and_loads_no_nemo_run():
    code = "import sys, recipes.megatron.train; sys.exit('nemo_run' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
