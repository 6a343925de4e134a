"""The container of every setting: what finalize() derives, and what it refuses."""

import pytest

from bridge_profiling import ProfilingConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from recipes import checks  # noqa: E402
from recipes.config import ConfigContainer  # noqa: E402
from recipes.finalize import finalize  # noqa: E402
from tests.recipes.builders import finalized, tiny  # noqa: E402

PIPELINE = "model.pipeline_model_parallel_size=2"
VIRTUAL = f"{PIPELINE} model.virtual_pipeline_model_parallel_size=2"


def test_an_empty_container_says_what_is_missing():
    with pytest.raises(ProfilingConfigError, match=r"model.num_layers=0 is too small.*start from a recipe"):
        finalize(ConfigContainer(), 1)


def test_derived_sizes_follow_overrides():
    config = tiny("model.hidden_size=128")
    assert config.model.ffn_hidden_size is None
    finalize(config, 1)
    assert (config.model.ffn_hidden_size, config.model.kv_channels) == (512, 32)


@pytest.mark.parametrize(
    ("override", "dtype"),
    [("model.bf16=true", torch.bfloat16), ("model.fp16=true", torch.float16), ("model.bf16=false", torch.float32)],
)
def test_the_precision_of_everything_follows_the_models(override, dtype):
    config = finalized("gpt_tiny", override)
    assert {config.model.params_dtype, config.model.pipeline_dtype, config.optimizer.params_dtype} == {dtype}
    assert (config.optimizer.bf16, config.optimizer.fp16) == (config.model.bf16, config.model.fp16)


@pytest.mark.parametrize("section", ["ddp", "optimizer"])
def test_the_distributed_optimizer_is_on_in_both_sections_or_in_none(section):
    config = finalized("gpt_tiny", f"{section}.use_distributed_optimizer=true")
    assert (config.ddp.use_distributed_optimizer, config.optimizer.use_distributed_optimizer) == (True, True)


@pytest.mark.parametrize(
    ("ranks", "overrides", "message"),
    [
        (1, "train.train_iters=0", "train.train_iters=0 is too small"),
        (1, "train.eval_interval=0", "train.eval_interval=null"),
        (1, "train.exit_signal=SIGKILL", "SIGTERM"),
        (2, "train.global_batch_size=6", "times the data-parallel size 2, 4.*train.global_batch_size=8"),
        (1, "train.start_iteration=20", "leaves nothing to train.*iterations run from 0 to 19"),
        (1, "train.manual_gc_interval=5", "train.manual_gc=true"),
        (3, "model.tensor_model_parallel_size=2", "a world of 3 cannot be split"),
        (3, "model.tensor_model_parallel_size=3", "num_attention_heads=4 is not a multiple.*num_attention_heads=6"),
        (4, "model.pipeline_model_parallel_size=4", "model.num_layers=2 is not a multiple.*model.num_layers=4"),
        (2, VIRTUAL, "virtual_pipeline_model_parallel_size, 4.*model.num_layers=4"),
        (1, "model.virtual_pipeline_model_parallel_size=2", "without a pipeline"),
        (2, f"{VIRTUAL} model.num_layers=4 train.global_batch_size=6", "3 microbatches cannot.*train.global_batch_size=8"),
        (2, "model.context_parallel_size=2 model.seq_length=66", "context_parallel_size times 2, 4.*seq_length=68"),
        (2, "model.expert_model_parallel_size=2 model.num_moe_experts=3", "Type model.num_moe_experts=4"),
        (1, "model.sequence_parallel=true", "sequence parallelism without tensor parallelism"),
        (2, "model.tensor_model_parallel_size=2 model.tp_comm_overlap=true", "model.sequence_parallel=true as well"),
        (1, "model.cuda_graph_impl=transformer_engine", "model.cuda_graph_impl=local"),
        (1, "model.recompute_granularity=full", "megatron-core refuses the model section; .*recompute_method"),
        (1, "model.bf16=true model.fp16=true", "both on"),
        (1, "optimizer.bf16=true", "model.bf16=true"),
        (1, "model.params_dtype=bfloat16", "model.params_dtype=torch.bfloat16 contradicts.*model.bf16"),
        (1, "optimizer.lr=1e-3 optimizer.min_lr=1", "optimizer.min_lr=1.0 is not between 0"),
        (1, "tokenizer.vocab_size=128", "tokenizer.vocab_size=128 does not fit model.vocab_size=128"),
        (1, "ddp.overlap_param_gather=true", "ddp.overlap_grad_reduce=true as well"),
        (1, "dataset.blend=[]", "dataset.blend=null"),
        (1, "dataset.blend=[a] dataset.blend_weights=[1,2]", "has 2 entries and dataset.blend 1"),
        (1, "dataset.split=1,2,3,4", "up to three numbers"),
        (1, "checkpoint.load=/x train.start_iteration=1", "the checkpoint determines where to start"),
        (1, "checkpoint.save_interval=2", "Type checkpoint.save=DIRECTORY as well"),
        (1, "checkpoint.save=/x optimizer.optimizer=sgd", "Type optimizer.optimizer=adam"),
        (1, "monitor.port=70000", "monitor.port=70000 is not a port"),
        (1, "profiling.use_pytorch_profiler=true profiling.profile_step_end=21", "exceeds train.train_iters=20"),
        (1, "profiling.use_pytorch_profiler=true profiling.profile_ranks=[1]", "the job has 1 rank"),
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


@pytest.mark.parametrize(("virtual", "batched"), [("null", True), ("2", False)])
def test_interleaved_stages_send_their_messages_one_by_one(virtual, batched):
    """Batched, megatron-core 0.16.1 mixes them up on GPUs, and trains on wrong activations without a word."""
    overrides = f"model.num_layers=4 {PIPELINE} model.virtual_pipeline_model_parallel_size={virtual}"
    config = finalized("gpt_tiny", overrides, 2)
    assert config.model.batch_p2p_comm is batched
