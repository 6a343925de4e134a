"""What a rank's device changes: whose layers are trained and what that excludes, and the settings without CUDA."""

import os

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.launch_env import LaunchEnv

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")


from recipes.megatron import layers, setup  # noqa: E402
from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu  # noqa: E402
from tests.recipes.builders import finalized, recipe, tiny  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("importable", "device", "asked", "chosen"),
    [
        (True, GPU, "null", "transformer_engine"),
        (True, CPU, "null", "local"),
        (False, GPU, "null", "local"),
        (True, GPU, "local", "local"),
    ],
)
def test_transformer_engine_is_chosen_where_it_works(monkeypatch, importable, device, asked, chosen):
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
        (1, "model.num_moe_experts=4"),
        (2, "model.sequence_parallel=true model.tensor_model_parallel_size=2"),
        (2, "model.context_parallel_size=2"),
        (1, "model.fp8=hybrid model.bf16=true"),
        (1, "model.apply_rope_fusion=true model.position_embedding_type=rope"),
        (1, "model.attention_backend=flash"),
    ],
)
def test_what_needs_transformer_engine_is_refused_in_the_job_and_not_on_a_submit_host(monkeypatch, ranks, overrides):
    config = finalized("gpt_tiny", overrides, ranks)
    monkeypatch.setattr(layers, "HAVE_TE", False)
    with pytest.raises(ProfilingConfigError, match=f"{overrides.split()[0]} needs Transformer Engine's.*this machine has"):
        layers.choose_transformer_impl(config, GPU)


def test_the_tasks_of_a_slurm_step_meet_without_torchrun(monkeypatch):
    given = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **options: given.update(options))
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node1", "MASTER_PORT": "1234"}
    env = LaunchEnv.read(step | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    setup._init_process_group("gloo", tiny(), env)
    assert given.items() >= {"init_method": "tcp://node1:1234", "rank": 1, "world_size": 2}.items()


@pytest.mark.parametrize(("graphs", "teardown"), [("none", None), ("local", "0")])
def test_cupti_stays_up_where_cuda_graphs_are_captured(monkeypatch, graphs, teardown):
    monkeypatch.setattr(os, "environ", {})
    setup._set_cuda_environment(tiny(f"model.cuda_graph_impl={graphs}"))
    assert os.environ.get("TEARDOWN_CUPTI") == teardown


def test_compiling_takes_over_each_layer_but_what_sets_random_states_and_keeps_the_names_of_its_weights():
    block = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    names = list(block.state_dict())
    layers.compile_layers(block)
    assert all(layer._compiled_call_impl is not None for layer in block)
    assert list(block.state_dict()) == names
    # Torch sets them under a lock, and would take it again while it compiles.
    assert layers.random._set_cuda_rng_state._torchdynamo_disable


def test_torch_is_as_it_was_afterwards_also_after_an_error():
    before = torch.cuda.current_device, torch.cuda.synchronize
    with pytest.raises(RuntimeError, match="training failed"), megatron_on_cpu():
        raise RuntimeError("training failed")
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_cuda_only_settings_are_changed_and_named():
    config = recipe("gpt_125m", "model.tensor_model_parallel_size=2 model.hidden_dropout=0.1")
    fusions = "model.bias_activation_fusion=false model.bias_dropout_fusion=false"
    changed = f"model.use_cpu_initialization=true model.batch_p2p_comm=false {fusions} model.hidden_dropout=0.0"
    assert adapt_to_cpu(config) == changed.split()
    assert adapt_to_cpu(config) == []


@pytest.mark.parametrize("setting", ["model.recompute_granularity=selective", "optimizer.optimizer_cpu_offload=true"])
def test_what_has_no_form_without_cuda_is_refused(setting):
    with pytest.raises(ProfilingConfigError, match=f"{setting.partition('=')[0]} is set, and there is no GPU here"):
        adapt_to_cpu(tiny(setting))
