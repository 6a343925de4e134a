"""Whose layers a rank trains, what that excludes, and that a submit host needs none of it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from bridge_profiling import ProfilingConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from recipes.finalize import finalize  # noqa: E402
from recipes.megatron import layers, setup  # noqa: E402
from tests.recipes.builders import recipe, tiny  # noqa: E402

#: Transformer Engine's, from 2.7 on.
MODES = SimpleNamespace(NONE="none", FP8="fp8")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

TENSOR_PARALLEL = ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]


@pytest.mark.parametrize(
    ("importable", "device", "asked", "chosen"),
    [
        (True, GPU, "null", "transformer_engine"),
        (True, CPU, "null", "local"),
        (False, GPU, "null", "local"),
        (True, GPU, "local", "local"),
    ],
)
def test_transformer_engine_is_chosen_where_it_works_unless_the_other_is_asked_for(
    monkeypatch, importable, device, asked, chosen
):
    monkeypatch.setattr(layers, "HAVE_TE", importable)
    config = tiny(f"model.transformer_impl={asked}")
    layers.choose_transformer_impl(config, device)
    assert config.model.transformer_impl == chosen
    own = "megatron-core's own (local spec), which exclude: no sequence, context"
    assert (own if chosen == "local" else "Transformer Engine's") in layers.describe_layers(config.model)


@pytest.mark.parametrize(("importable", "why"), [(False, "cannot be imported"), (True, "this machine has no GPU")])
def test_forcing_what_is_not_there_is_refused(monkeypatch, importable, why):
    monkeypatch.setattr(layers, "HAVE_TE", importable)
    with pytest.raises(ProfilingConfigError, match=f"{why}.*model.transformer_impl=null"):
        layers.choose_transformer_impl(tiny("model.transformer_impl=transformer_engine"), CPU)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ["model.num_moe_experts=4"]),
        (2, ["model.sequence_parallel=true", "model.tensor_model_parallel_size=2"]),
        (2, ["model.context_parallel_size=2"]),
        (1, ["model.fp8=hybrid", "model.bf16=true"]),
        (1, ["model.apply_rope_fusion=true", "model.position_embedding_type=rope"]),
        (1, ["model.attention_backend=flash"]),
    ],
)
def test_what_needs_transformer_engine_is_refused_in_the_job_and_not_on_a_submit_host(monkeypatch, ranks, overrides):
    config = tiny(*overrides)
    finalize(config, ranks)
    monkeypatch.setattr(layers, "HAVE_TE", False)
    with pytest.raises(ProfilingConfigError, match=f"{overrides[0]} needs Transformer Engine's layers.*this machine has"):
        layers.choose_transformer_impl(config, GPU)


def test_checking_without_transformer_engine_changes_no_setting():
    config = recipe("qwen3_30b_a3b", "model.fp8=hybrid", "model.apply_rope_fusion=true")
    finalize(config, 16)
    assert (config.model.fp8, config.model.apply_rope_fusion, config.model.moe_permute_fusion) == ("hybrid", True, True)


def test_a_layout_reaches_megatron_cores_process_groups(monkeypatch):
    given = {}
    monkeypatch.setattr(setup.parallel_state, "initialize_model_parallel", lambda **sizes: given.update(sizes))
    config = recipe("qwen3_30b_a3b", "model.context_parallel_size=2", "model.expert_tensor_parallel_size=1")
    finalize(config, 32)
    setup._initialize_model_parallel(config)
    sizes = ("pipeline_model_parallel", "context_parallel", "expert_model_parallel", "expert_tensor_parallel")
    assert [given[f"{name}_size"] for name in sizes] == [2, 2, 8, 1]


@pytest.mark.parametrize(
    ("modes", "overrides", "quantization"),
    [
        (None, ["model.fp8=hybrid"], {"use_fp8": True}),
        (MODES, [], {"quantization_modes": ["none"]}),
        (MODES, ["model.fp8=hybrid", "model.first_last_layers_bf16=true"], {"quantization_modes": ["fp8", "none"]}),
    ],
)
def test_tp_communication_overlap_gets_its_buffers(monkeypatch, modes, overrides, quantization):
    """Transformer Engine before 2.7 gets a flag for fp8; later ones get the modes."""
    given = {}
    base = SimpleNamespace(initialize_ub=lambda **arguments: given.update(arguments), destroy_ub=given.clear)
    if modes is not None:
        base.UserBufferQuantizationMode = modes
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)
    config = tiny("model.bf16=true", *TENSOR_PARALLEL, "model.tp_comm_overlap=true", *overrides)
    finalize(config, 2)
    with setup._userbuffers(config):
        assert given == {"shape": [2 * 64, 64], "tp_size": 2, "bootstrap_backend": "nccl", **quantization}
    assert given == {}


@pytest.mark.parametrize(
    ("overrides", "engines", "capturable"),
    [
        ([], False, False),
        (["model.cuda_graph_impl=local"], True, True),
        (["model.cuda_graph_impl=local", "model.transformer_impl=local"], False, True),
    ],
)
def test_cuda_graphs_get_a_tracker_of_random_states_that_the_layers_accept(monkeypatch, overrides, engines, capturable):
    given = {}
    monkeypatch.setattr(setup, "model_parallel_cuda_manual_seed", lambda seed, **arguments: given.update(arguments))
    monkeypatch.setattr(setup.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(layers, "HAVE_TE", True)
    config = tiny(*overrides)
    layers.choose_transformer_impl(config, GPU)
    setup._seed(config)
    assert (given["te_rng_tracker"], given["use_cudagraphable_rng"]) == (engines, capturable)


@pytest.mark.parametrize(("graphs", "teardown"), [("none", None), ("local", "0")])
def test_cupti_stays_up_where_cuda_graphs_are_captured(monkeypatch, graphs, teardown):
    for name in ("TEARDOWN_CUPTI", "CUDA_DEVICE_MAX_CONNECTIONS"):
        # Set before it is deleted, so that what the function sets is taken back too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    setup._set_cuda_environment(tiny(f"model.cuda_graph_impl={graphs}"))
    assert os.environ.get("TEARDOWN_CUPTI") == teardown


def test_compiling_takes_over_each_layer_and_keeps_the_names_of_its_weights():
    block = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    names = list(block.state_dict())
    layers.compile_layers(block)
    assert all(layer._compiled_call_impl is not None for layer in block)
    assert list(block.state_dict()) == names
