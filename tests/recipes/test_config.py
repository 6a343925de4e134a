"""The container of every setting: what finalize() derives and refuses, and what the device of a rank changes."""

from operator import attrgetter

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.common.launch_env import LaunchEnv

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from recipes import checks  # noqa: E402
from recipes.megatron import layers, setup  # noqa: E402
from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu  # noqa: E402
from tests.recipes.builders import finalized, recipe, tiny  # noqa: E402

PIPELINE = "model.pipeline_model_parallel_size=2"
VIRTUAL = f"{PIPELINE} model.virtual_pipeline_model_parallel_size=2"


def precision(kind: str, dtype: object) -> tuple[int, str, dict[str, object]]:
    names = ("model.params_dtype", "model.pipeline_dtype", "optimizer.params_dtype")
    return 1, f"model.{kind}=true", dict.fromkeys(names, dtype) | {f"optimizer.{kind}": True}


@pytest.mark.parametrize(
    ("ranks", "overrides", "derived"),
    [
        (1, "model.hidden_size=128", {"model.ffn_hidden_size": 512, "model.kv_channels": 32}),
        precision("bf16", torch.bfloat16),
        precision("fp16", torch.float16),
        (1, "ddp.use_distributed_optimizer=true", {"optimizer.use_distributed_optimizer": True}),
        (1, "optimizer.use_distributed_optimizer=true", {"ddp.use_distributed_optimizer": True}),
        (2, f"model.num_layers=4 {PIPELINE}", {"model.batch_p2p_comm": True}),
        # Batched, megatron-core 0.16.1 mixes messages up on GPUs, and trains on wrong activations without a word.
        (2, f"model.num_layers=4 {VIRTUAL}", {"model.batch_p2p_comm": False}),
    ],
)
def test_settings_are_derived_from_others(ranks, overrides, derived):
    config = finalized("gpt_tiny", overrides, ranks)
    assert {name: attrgetter(name)(config) for name in derived} == derived


@pytest.mark.parametrize(
    ("ranks", "overrides", "message"),
    [
        (1, "train.train_iters=0", "train.train_iters=0 is too small"),
        (1, "train.exit_signal=SIGKILL", "SIGTERM"),
        (2, "train.global_batch_size=6", "times the data-parallel size 2, 4.*train.global_batch_size=8"),
        (1, "train.start_iteration=20", "leaves nothing to train.*iterations run from 0 to 19"),
        (3, "model.tensor_model_parallel_size=2", "a world of 3 cannot be split"),
        (3, "model.tensor_model_parallel_size=3", "vocab_size=128 is not a multiple.*Type model.vocab_size=129"),
        (8, "model.tensor_model_parallel_size=8", "refuses the model section; num_attention_heads .4. must be a multiple"),
        (4, "model.pipeline_model_parallel_size=4", "model.num_layers=2 is not a multiple.*model.num_layers=4"),
        (2, VIRTUAL, "times virtual stages, 4.*model.num_layers=4"),
        (2, f"{VIRTUAL} model.num_layers=4 train.global_batch_size=6", "3 microbatches cannot.*train.global_batch_size=8"),
        (2, "model.context_parallel_size=2 model.seq_length=66", "context_parallel_size times 2, 4.*seq_length=68"),
        (2, "model.expert_model_parallel_size=2 model.num_moe_experts=3", "Type model.num_moe_experts=4"),
        (1, "model.sequence_parallel=true", "sequence parallelism without tensor parallelism"),
        (1, "model.tp_comm_overlap=true", "Type model.tp_comm_overlap=false"),
        (1, "model.cuda_graph_impl=transformer_engine", "model.cuda_graph_impl=local"),
        (1, "model.recompute_granularity=full", "megatron-core refuses the model section; .*recompute_method"),
        (1, "model.bf16=true model.fp16=true", "both on"),
        (1, "model.params_dtype=bfloat16", "model.params_dtype=torch.bfloat16 contradicts.*model.bf16"),
        (1, "optimizer.lr=1e-3 optimizer.min_lr=1", "optimizer.min_lr=1.0 is not between 0"),
        (1, "tokenizer.vocab_size=128", "tokenizer.vocab_size=128 does not fit model.vocab_size=128"),
        (1, "ddp.overlap_param_gather=true", "ddp.overlap_grad_reduce=true as well"),
        (1, "dataset.blend=[a] dataset.blend_weights=[1,2]", "does not give each of 1 data sets a share"),
        (1, "dataset.split=1,2,3,4", "up to three numbers"),
        (1, "checkpoint.load=/x train.start_iteration=1", "the checkpoint determines where to start"),
        (1, "checkpoint.save_interval=2", "Type checkpoint.save=DIRECTORY as well"),
        (1, "checkpoint.save=/x optimizer.optimizer=sgd", "Type optimizer.optimizer=adam"),
        (1, "profiling.use_pytorch_profiler=true profiling.profile_step_end=21", "exceeds train.train_iters=20"),
    ],
)
def test_what_does_not_fit_together_is_refused(ranks, overrides, message):
    with pytest.raises(ProfilingConfigError, match=message):
        finalized("gpt_tiny", overrides, ranks)


@pytest.mark.parametrize("setting", ["model.use_mup=true", "ddp.num_buckets=4", "optimizer.optimizer_cuda_graph=true"])
def test_what_a_release_of_megatron_core_adds_and_the_loop_cannot_do_is_refused(setting):
    section, name = setting.partition("=")[0].split(".")
    if not hasattr(getattr(tiny(), section), name):
        pytest.skip(f"this megatron-core has no {section}.{name}")
    with pytest.raises(ProfilingConfigError, match=f"{setting} is not supported"):
        checks.check_supported(tiny(setting))


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
    setup._init_process_group(tiny(), env)
    assert given.items() >= {"init_method": "tcp://node1:1234", "rank": 1, "world_size": 2}.items()


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
