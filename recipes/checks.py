"""Checks of a configuration's sections against each other. Each refusal says what to type instead; nothing is changed.

megatron-core's own checks, of the model section above all, are not repeated: `recipes.finalize` runs them.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from operator import attrgetter

from bridge_profiling.common.errors import require
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.overrides import format_override
from recipes.config import CheckpointConfig, ConfigContainer, DatasetConfig, GPTModelConfig, MonitorConfig, TrainConfig

#: Sizes without a default that a model could be built with.
_SIZES = ("model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.vocab_size", "model.seq_length")

#: Sections whose numbers count something.
_COUNTING = ("train", "scheduler", "dataset", "checkpoint", "logger", "dist", "monitor")

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


def check_numbers(config: ConfigContainer) -> None:
    """Refuse negative numbers, and 0 unless it is the default."""
    defaults: dict[str, object] = dict.fromkeys(_SIZES, 1)
    for section in _COUNTING:
        defaults |= {f"{section}.{field.name}": field.default for field in fields(getattr(config, section))}
    for setting, default in defaults.items():
        value = attrgetter(setting)(config)
        least = 0 if default == 0 or setting.endswith("seed") else 1
        require(
            type(value) not in (int, float) or value > 0 or value == least,
            f"{setting}={value} is too small",
            why=f"it must {'not be negative' if least == 0 else 'be greater than 0'}",
            instead=f"Type {setting}={'null' if default is None else f'{least} or more'}",
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
    """Refuse sizes that cannot be divided, where megatron-core would find out in the job only."""
    tensor, context, experts = model.tensor_model_parallel_size, model.context_parallel_size, model.expert_model_parallel_size
    uneven = (
        model.num_layers_in_first_pipeline_stage,
        model.num_layers_in_last_pipeline_stage,
        model.pipeline_model_parallel_layout,
        model.account_for_embedding_in_pipeline_split,
        model.account_for_loss_in_pipeline_split,
    )
    stages = model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    for name, divisor, other in (
        ("num_layers", 1 if any(uneven) else stages, "model.pipeline_model_parallel_size times virtual stages"),
        ("hidden_size", 1 if model.kv_channels else model.num_attention_heads, "model.num_attention_heads"),
        ("vocab_size", tensor, "model.tensor_model_parallel_size"),
        # Each rank gets one share from the front and one from the back, since later tokens cost more attention.
        ("seq_length", 1 if context == 1 else 2 * context, "model.context_parallel_size times 2"),
        (
            "seq_length",
            context * tensor if model.sequence_parallel else 1,
            "model.tensor_model_parallel_size, with context parallel",
        ),
        ("num_moe_experts", experts, "model.expert_model_parallel_size"),
    ):
        value = getattr(model, name) or 0
        require(
            value % divisor == 0,
            f"model.{name}={value} is not a multiple of {other}, {divisor}",
            why="each rank or head gets an equal share",
            instead=f"Type model.{name}={(value // divisor + 1) * divisor}, or a smaller {other.split()[0]}",
        )
    require(
        model.virtual_pipeline_model_parallel_size is None or model.pipeline_model_parallel_size > 1,
        f"model.virtual_pipeline_model_parallel_size={model.virtual_pipeline_model_parallel_size} without a pipeline",
        why="virtual stages are shares of a rank's pipeline stage, and model.pipeline_model_parallel_size is 1",
        instead="Type model.virtual_pipeline_model_parallel_size=null",
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


def check_start(train: TrainConfig) -> None:
    """Refuse a start after the training's end."""
    require(
        train.start_iteration < train.train_iters,
        f"train.start_iteration={train.start_iteration} leaves nothing to train",
        why=f"iterations run from 0 to {train.train_iters - 1} (train.train_iters={train.train_iters})",
        instead=f"Type train.start_iteration=0, or train.train_iters={train.start_iteration + 10}",
    )


def check_schedule(config: ConfigContainer) -> None:
    """Refuse a learning rate or a schedule that megatron-core's scheduler would assert on, without a message, in the job."""
    optimizer, warmup = config.optimizer, config.scheduler.lr_warmup_iters
    require(optimizer.lr and optimizer.lr > 0, f"optimizer.lr={optimizer.lr} is not above 0", instead="Type optimizer.lr=1e-3")
    require(
        0 <= (optimizer.min_lr or 0.0) <= optimizer.lr,
        f"optimizer.min_lr={optimizer.min_lr} is not between 0 and optimizer.lr={optimizer.lr}",
        instead="Type optimizer.min_lr=0",
    )
    end = config.scheduler.lr_decay_iters or config.train.train_iters
    require(
        warmup < end,
        f"scheduler.lr_warmup_iters={warmup} does not end before the decay does, at iteration {end}",
        instead="Type scheduler.lr_warmup_iters=0, or a larger scheduler.lr_decay_iters",
    )


def check_dataset(dataset: DatasetConfig) -> None:
    """Refuse weights without data sets, and loader settings that contradict each other. Reads no file."""
    blend, weights, shares = dataset.blend, dataset.blend_weights, dataset.split.split(",")
    require(blend is None or blend, "dataset.blend=[] names no data set", instead="Type dataset.blend=null for mock data")
    require(
        weights is None or (len(weights) == len(blend or ()) and min(weights) >= 0 and sum(weights) > 0),
        f"{format_override('dataset.blend_weights', weights)} does not give each of {len(blend or ())} data sets a share",
        instead="Type dataset.blend_weights=null to weigh them by their sizes",
    )
    require(
        all(map(_SHARE.fullmatch, shares)) and len(shares) <= 3 and sum(map(float, shares)) > 0,
        f"dataset.split={dataset.split} gives no shares",
        why="it is up to three numbers: training, evaluation and test",
        instead="Type dataset.split=90,10,0",
    )
    require(
        dataset.prefetch_factor is None or dataset.num_workers > 0,
        f"dataset.prefetch_factor={dataset.prefetch_factor} with dataset.num_workers=0",
        why="it is the number of microbatches that each worker process loads ahead",
        instead="Type dataset.prefetch_factor=null, or dataset.num_workers=1 or more",
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


def check_packages(monitor: MonitorConfig, checkpoint: CheckpointConfig) -> None:
    """Refuse settings that need a package which is not installed."""
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
