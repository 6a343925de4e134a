"""The container of every setting: what finalize() derives, and what it refuses."""

from operator import attrgetter

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


def test_an_empty_container_says_what_is_missing():
    with pytest.raises(ProfilingConfigError, match=r"model.num_layers=0 is too small.*start from a recipe"):
        finalize(ConfigContainer(), 1)


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
