"""Checks of a configuration's sections against each other. Each refusal says what to type instead; nothing is changed."""

from __future__ import annotations

import importlib.util
import re
from operator import attrgetter

from bridge_profiling.common.errors import require
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.overrides import format_override
from recipes.config import CheckpointConfig, ConfigContainer, DatasetConfig, GPTModelConfig, MonitorConfig, TrainConfig

#: Sizes and counts, integers of at least 1.
_REQUIRED = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.vocab_size",
    "model.seq_length",
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.context_parallel_size",
    "model.expert_model_parallel_size",
    "train.train_iters",
    "train.micro_batch_size",
    "train.global_batch_size",
    "train.eval_iters",
    "logger.log_interval",
    "dist.distributed_timeout_minutes",
)

#: Optional intervals and limits; null leaves them unset.
_OPTIONAL = (
    "train.eval_interval",
    "train.exit_duration_in_mins",
    "checkpoint.save_interval",
    "monitor.interval",
)

#: Settings that this loop supports in part: the supported values, the one to suggest first.
_SUPPORTED = {
    "model.transformer_impl": (None, "local", "transformer_engine"),
    "model.cpu_offloading": (False,),
    "model.tp_comm_overlap": (False,),
    "model.fp8_param": (False,),
    "model.fp4": (None,),
    "model.multi_latent_attention": (False,),
    "model.mtp_num_layers": (None,),
    "model.hybrid_context_parallel": (False,),
    "model.heterogeneous_block_specs": (False,),
    "model.init_model_with_meta_device": (False,),
    "model.qk_clip": (False,),
    "model.log_max_attention_logit": (False,),
    "model.use_te_rng_tracker": (False,),
    "model.enable_cuda_graph": (False,),
    "model.external_cuda_graph": (False,),
    "model.cuda_graph_impl": ("local", "none"),
    "model.use_mup": (False,),
    # Since 0.19.
    "model.tensor_parallel_num_weight_shards": (None,),
    "model.expert_tensor_parallel_num_weight_shards": (None,),
    "model.gtp_weight_remat_size": (1,),
    "model.expert_gtp_weight_remat_size": (1,),
    "ddp.use_megatron_fsdp": (False,),
    "ddp.num_buckets": (None,),
    "optimizer.optimizer": ("adam", "sgd"),
    "optimizer.optimizer_cuda_graph": (False,),
    "optimizer.use_layer_wise_distributed_optimizer": (False,),
}

_SHARE = re.compile(r"\s*\d+(\.\d+)?\s*")


def check_counts(config: ConfigContainer) -> None:
    """Refuse sizes, counts and intervals of 0 or less."""
    for setting in (*_REQUIRED, *_OPTIONAL):
        value = attrgetter(setting)(config)
        require(
            value is None or value > 0,
            f"{setting}={value} is too small",
            why="it must be greater than 0",
            instead=f"Type {setting}={'null' if setting in _OPTIONAL else '1 or more, or start from a recipe'}",
        )


def check_supported(config: ConfigContainer) -> None:
    """Refuse settings of megatron-core's classes that this loop does not carry out."""
    for setting, supported in _SUPPORTED.items():
        section, name = setting.split(".")
        # A release may lack the field.
        value = getattr(getattr(config, section), name, supported[0])
        _require_supported(value in supported, format_override(setting, value), format_override(setting, supported[0]))
    # It selects a graph of the whole iteration by either field, or by a value of model.cuda_graph_impl.
    for name in ("cuda_graph_scope", "cuda_graph_modules"):
        whole = "full_iteration" in str(getattr(config.model, name, None))
        _require_supported(not whole, f"model.{name}=full_iteration", f"model.{name}=full")


def _require_supported(supported: bool, setting: str, instead: str) -> None:
    require(
        supported,
        f"{setting} is not supported",
        why="this loop only trains GPT layers under megatron-core's DistributedDataParallel",
        instead=f"Type {instead}",
    )


def check_model_split(model: GPTModelConfig) -> None:
    """Refuse sizes that tensor, context, expert or pipeline parallelism cannot divide."""
    tensor, context, experts = model.tensor_model_parallel_size, model.context_parallel_size, model.expert_model_parallel_size
    _require_multiple(model, "num_attention_heads", tensor, "model.tensor_model_parallel_size")
    _require_multiple(model, "vocab_size", tensor, "model.tensor_model_parallel_size")
    if model.kv_channels is None:
        _require_multiple(model, "hidden_size", model.num_attention_heads, "model.num_attention_heads")
    if context > 1:
        # Each rank gets one share from the front and one from the back, since later tokens cost more attention.
        _require_multiple(model, "seq_length", 2 * context, "model.context_parallel_size times 2")
    if model.sequence_parallel:
        _require_multiple(model, "seq_length", context * tensor, "model.tensor_model_parallel_size, with context parallel")
    if model.num_moe_experts is not None:
        _require_multiple(model, "num_moe_experts", experts, "model.expert_model_parallel_size")
    require(
        model.num_moe_experts is not None or experts == 1,
        f"model.expert_model_parallel_size={experts} without experts",
        why="model.num_moe_experts is null",
        instead="Type model.expert_model_parallel_size=1",
    )
    _check_pipeline(model)


def _check_pipeline(model: GPTModelConfig) -> None:
    pipeline, virtual = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size
    require(
        virtual is None or pipeline > 1,
        f"model.virtual_pipeline_model_parallel_size={virtual} without a pipeline",
        why="virtual stages are shares of a rank's pipeline stage, and model.pipeline_model_parallel_size is 1",
        instead="Type model.virtual_pipeline_model_parallel_size=null",
    )
    uneven = (
        model.num_layers_in_first_pipeline_stage,
        model.num_layers_in_last_pipeline_stage,
        model.pipeline_model_parallel_layout,
        model.account_for_embedding_in_pipeline_split,
        model.account_for_loss_in_pipeline_split,
    )
    if not any(uneven):
        stages = "model.pipeline_model_parallel_size"
        stages += " times model.virtual_pipeline_model_parallel_size" if (virtual or 1) > 1 else ""
        _require_multiple(model, "num_layers", pipeline * (virtual or 1), stages)


def _require_multiple(model: GPTModelConfig, name: str, divisor: int, other: str) -> None:
    value = getattr(model, name)
    require(
        value % divisor == 0,
        f"model.{name}={value} is not a multiple of {other}, {divisor}",
        why="each rank or head gets an equal share",
        instead=f"Type model.{name}={(value // divisor + 1) * divisor}, or a smaller {other.split()[0]}",
    )


def check_batch(config: ConfigContainer, layout: ParallelLayout) -> None:
    """Refuse a global batch that does not divide into whole microbatches on every data-parallel rank."""
    batch, share = config.train.global_batch_size, config.train.micro_batch_size * layout.dp
    microbatches = batch // share
    require(
        batch % share == 0,
        f"train.global_batch_size={batch} cannot be split into microbatches",
        why=f"it must be a multiple of train.micro_batch_size={config.train.micro_batch_size} times"
        f" the data-parallel size {layout.dp}, {share}",
        instead=f"Type train.global_batch_size={(microbatches + 1) * share}",
    )
    require(
        config.model.virtual_pipeline_model_parallel_size is None or microbatches % layout.pp == 0,
        f"{microbatches} microbatches cannot be interleaved over {layout.pp} pipeline stages",
        why="with virtual stages, megatron-core schedules microbatches in groups of the pipeline's size",
        instead=f"Type train.global_batch_size={share * layout.pp * (microbatches // layout.pp + 1)}",
    )


def check_train(train: TrainConfig) -> None:
    """Refuse a start outside the training, and an interval of garbage collections that Python does not leave to the loop."""
    require(
        0 <= train.start_iteration < train.train_iters,
        f"train.start_iteration={train.start_iteration} leaves nothing to train",
        why=f"iterations run from 0 to {train.train_iters - 1} (train.train_iters={train.train_iters})",
        instead=f"Type train.start_iteration=0, or train.train_iters={max(train.start_iteration, 0) + 10}",
    )
    require(
        train.manual_gc_interval == 0 or (train.manual_gc_interval > 0 and train.manual_gc),
        f"train.manual_gc_interval={train.manual_gc_interval} with {format_override('train.manual_gc', train.manual_gc)}",
        why="it is the number of iterations between two collections, when Python leaves them to this loop",
        instead="Type train.manual_gc_interval=0, or 1 or more with train.manual_gc=true",
    )


def check_schedule(config: ConfigContainer) -> None:
    """Refuse a learning rate or a schedule that megatron-core's scheduler would assert on."""
    optimizer, scheduler = config.optimizer, config.scheduler
    require(optimizer.lr and optimizer.lr > 0, f"optimizer.lr={optimizer.lr} is not above 0", instead="Type optimizer.lr=1e-3")
    for name, value in (("optimizer.min_lr", optimizer.min_lr), ("scheduler.lr_warmup_init", scheduler.lr_warmup_init)):
        require(
            0 <= (value or 0.0) <= optimizer.lr,
            f"{name}={value} is not between 0 and optimizer.lr={optimizer.lr}",
            instead=f"Type {name}=0",
        )
    end = config.train.train_iters if scheduler.lr_decay_iters is None else scheduler.lr_decay_iters
    require(
        0 <= scheduler.lr_warmup_iters < end,
        f"scheduler.lr_warmup_iters={scheduler.lr_warmup_iters} does not end before the decay does, at iteration {end}",
        instead="Type scheduler.lr_warmup_iters=0, or a larger scheduler.lr_decay_iters",
    )


def check_dataset(dataset: DatasetConfig) -> None:
    """Refuse weights without data sets, and loader settings that contradict each other. Reads no file."""
    blend, weights = dataset.blend, dataset.blend_weights
    require(blend is None or blend, "dataset.blend=[] names no data set", instead="Type dataset.blend=null for mock data")
    require(
        weights is None or len(weights) == len(blend or ()),
        f"dataset.blend_weights has {len(weights or ())} entries and dataset.blend {len(blend or ())}",
        why="each data set has one weight",
        instead="Type dataset.blend_weights=null to weigh them by their sizes",
    )
    require(
        weights is None or (min(weights, default=0) >= 0 and sum(weights) > 0),
        f"dataset.blend_weights={weights} are not shares",
        instead="Type numbers above 0, such as [0.7,0.3]",
    )
    shares = dataset.split.split(",")
    require(
        all(map(_SHARE.fullmatch, shares)) and len(shares) <= 3 and sum(map(float, shares)) > 0,
        f"dataset.split={dataset.split} gives no shares",
        why="it is up to three numbers: training, evaluation and test",
        instead="Type dataset.split=90,10,0",
    )
    workers, ahead = dataset.num_workers, dataset.prefetch_factor
    require(workers >= 0, f"dataset.num_workers={workers} is negative", instead="Type dataset.num_workers=0 or more")
    require(
        ahead is None or (workers > 0 and ahead >= 1),
        f"dataset.prefetch_factor={ahead} with dataset.num_workers={workers}",
        why="it is the number of microbatches that each worker process loads ahead",
        instead="Type dataset.prefetch_factor=null, or 1 or more with dataset.num_workers=1 or more",
    )


def check_tokenizer(config: ConfigContainer) -> None:
    """Refuse more tokens than the embedding has rows."""
    rows = config.model.vocab_size
    tokens = rows - 1 if config.tokenizer.vocab_size is None else config.tokenizer.vocab_size
    require(
        0 < tokens < rows,
        f"tokenizer.vocab_size={tokens} does not fit model.vocab_size={rows}",
        why="there must be at least one token, and one more row for the end of document",
        instead="Type tokenizer.vocab_size=null to take model.vocab_size - 1",
    )


def check_checkpoint(config: ConfigContainer) -> None:
    """Refuse checkpoint settings that contradict each other, or that would fail only when one is written."""
    checkpoint, start = config.checkpoint, config.train.start_iteration
    require(
        checkpoint.save_interval is None or checkpoint.save is not None,
        f"checkpoint.save_interval={checkpoint.save_interval} without checkpoint.save",
        why="no checkpoint is written",
        instead="Type checkpoint.save=DIRECTORY as well",
    )
    require(
        checkpoint.load is None or start == 0,
        f"train.start_iteration={start} with checkpoint.load={checkpoint.load}",
        why="the checkpoint determines where to start",
        instead="Type train.start_iteration=0, or checkpoint.load=null to start there with new weights",
    )
    require(
        not _uses_checkpoints(checkpoint) or config.optimizer.optimizer == "adam",
        f"checkpoints with optimizer.optimizer={config.optimizer.optimizer}",
        why="megatron-core can restore the state of adam only",
        instead="Type optimizer.optimizer=adam, or checkpoint.save=null checkpoint.load=null",
    )


def _uses_checkpoints(checkpoint: CheckpointConfig) -> bool:
    return checkpoint.save is not None or checkpoint.load is not None


def check_port_and_packages(monitor: MonitorConfig, checkpoint: CheckpointConfig) -> None:
    """Refuse a port that does not exist, and settings that need a package which is not installed."""
    require(
        monitor.port is None or 0 < monitor.port < 65536,
        f"monitor.port={monitor.port} is not a port",
        instead="Type monitor.port=9400, or monitor.port=null to serve nothing",
    )
    for setting, used, package in (
        ("monitor.port", monitor.port is not None, "prometheus_client"),
        # Without it, megatron-core's checkpoint writers wait forever.
        ("checkpoint.save or checkpoint.load", _uses_checkpoints(checkpoint), "psutil"),
    ):
        require(
            not used or importlib.util.find_spec(package),
            f"{setting} needs {package}, which is not installed",
            instead=f"Install it: pip install {package}",
        )
