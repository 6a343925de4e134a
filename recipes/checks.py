"""What a ConfigContainer's sections must satisfy together, each refusal with the mend in it. Changes only derived fields."""

from __future__ import annotations

import re

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.overrides import format_override
from recipes.config import ConfigContainer, DatasetConfig, GPTModelConfig, TrainConfig

_AT_LEAST_ONE = {
    "model": (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
        "seq_length",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    ),
    "train": ("train_iters", "micro_batch_size", "global_batch_size", "eval_iters"),
    "logger": ("log_interval",),
    "dist": ("distributed_timeout_minutes",),
}


_SHARE = re.compile(r"\s*\d+(\.\d+)?\s*")


def check_sizes(config: ConfigContainer) -> None:
    """Refuse counts below one."""
    for section, names in _AT_LEAST_ONE.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            if value < 1:
                raise ProfilingConfigError(
                    f"{section}.{name}={value} is too small",
                    why="it counts something of which there must be at least one",
                    instead=f"Type {section}.{name}=1 or more, or start from a recipe",
                )
    if config.train.eval_interval is not None and config.train.eval_interval < 1:
        raise ProfilingConfigError(
            f"train.eval_interval={config.train.eval_interval} is too small",
            why="it counts the iterations between two evaluations",
            instead="Type train.eval_interval=null to switch evaluation off",
        )

    if config.train.manual_gc_interval < 0 or (config.train.manual_gc_interval and not config.train.manual_gc):
        raise ProfilingConfigError(
            f"train.manual_gc_interval={config.train.manual_gc_interval} with train.manual_gc="
            f"{str(config.train.manual_gc).lower()}",
            why="it counts the iterations between two collections, when Python leaves them to this loop",
            instead="Type train.manual_gc_interval=0, or 1 or more with train.manual_gc=true",
        )


#: Settings that this loop supports in part: the supported values, with the one to suggest first.
_SUPPORTED = {
    "model.transformer_impl": (None, "local", "transformer_engine"),
    "model.cpu_offloading": (False,),
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
    # Since 0.17.
    "model.use_mup": (False,),
    # Since 0.19.
    "model.tensor_parallel_num_weight_shards": (None,),
    "model.expert_tensor_parallel_num_weight_shards": (None,),
    "model.gtp_weight_remat_size": (1,),
    "model.expert_gtp_weight_remat_size": (1,),
    "ddp.use_megatron_fsdp": (False,),
    # Since 0.18.
    "ddp.num_buckets": (None,),
    "optimizer.optimizer": ("adam", "sgd"),
    # Since 0.17.
    "optimizer.optimizer_cuda_graph": (False,),
    # Since 0.18.
    "optimizer.use_layer_wise_distributed_optimizer": (False,),
}


def check_supported(config: ConfigContainer) -> None:
    """Refuse what megatron-core's configs can say but this loop cannot do."""
    for setting, supported in _SUPPORTED.items():
        section, name = setting.split(".")
        # An older or newer release may lack the field.
        value = getattr(getattr(config, section), name, supported[0])
        if value not in supported:
            raise _unsupported(format_override(setting, value), format_override(setting, supported[0]))
    # 0.18 renamed the field, and has the scope of a whole iteration as a value of model.cuda_graph_impl.
    for name in ("cuda_graph_scope", "cuda_graph_modules"):
        if "full_iteration" in str(getattr(config.model, name, None)):
            raise _unsupported(f"model.{name}=full_iteration", f"model.{name}=full")


def _unsupported(setting: str, instead: str) -> ProfilingConfigError:
    return ProfilingConfigError(
        f"{setting} is not supported",
        why="this loop has nothing that would carry it out: it trains GPT layers under megatron-core's DistributedDataParallel",
        instead=f"Type {instead}",
    )


def check_model_split(model: GPTModelConfig) -> None:
    """Refuse sizes that tensor or pipeline parallelism cannot divide."""
    tensor, pipeline = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    _check_multiple("model.num_attention_heads", model.num_attention_heads, tensor, "model.tensor_model_parallel_size")
    _check_multiple("model.vocab_size", model.vocab_size, tensor, "model.tensor_model_parallel_size")
    if model.kv_channels is None:
        _check_multiple("model.hidden_size", model.hidden_size, model.num_attention_heads, "model.num_attention_heads")
    _check_sequence_split(model)
    _check_experts(model)
    if model.virtual_pipeline_model_parallel_size is not None and pipeline == 1:
        raise ProfilingConfigError(
            f"model.virtual_pipeline_model_parallel_size={model.virtual_pipeline_model_parallel_size} without a pipeline",
            why="virtual stages are shares of a rank's pipeline stage, and model.pipeline_model_parallel_size is 1",
            instead="Type model.virtual_pipeline_model_parallel_size=null",
        )
    if _uneven_pipeline(model):
        return
    stages = pipeline * (model.virtual_pipeline_model_parallel_size or 1)
    virtual = " times model.virtual_pipeline_model_parallel_size" if stages != pipeline else ""
    _check_multiple("model.num_layers", model.num_layers, stages, f"model.pipeline_model_parallel_size{virtual}")


def _check_sequence_split(model: GPTModelConfig) -> None:
    if model.context_parallel_size > 1:
        # Each rank gets one share from the front and one from the back, since later tokens cost more attention.
        shares = 2 * model.context_parallel_size
        _check_multiple("model.seq_length", model.seq_length, shares, "model.context_parallel_size times 2")
    if model.tp_comm_overlap and not model.sequence_parallel:
        raise ProfilingConfigError(
            "model.tp_comm_overlap is on and model.sequence_parallel is off",
            why="what is overlapped are the gathers and scatters of sequence parallelism",
            instead="Type model.sequence_parallel=true as well",
        )
    if model.sequence_parallel:
        shares = model.context_parallel_size * model.tensor_model_parallel_size
        _check_multiple("model.seq_length", model.seq_length, shares, "model.tensor_model_parallel_size, with context parallel")


def _check_experts(model: GPTModelConfig) -> None:
    ranks = model.expert_model_parallel_size
    if model.num_moe_experts is not None:
        _check_multiple("model.num_moe_experts", model.num_moe_experts, ranks, "model.expert_model_parallel_size")
    elif ranks > 1:
        raise ProfilingConfigError(
            f"model.expert_model_parallel_size={ranks} without experts",
            why="model.num_moe_experts is null",
            instead="Type model.expert_model_parallel_size=1",
        )


def _uneven_pipeline(model: GPTModelConfig) -> bool:
    return bool(
        model.num_layers_in_first_pipeline_stage
        or model.num_layers_in_last_pipeline_stage
        or model.pipeline_model_parallel_layout
        or model.account_for_embedding_in_pipeline_split
        or model.account_for_loss_in_pipeline_split
    )


def _check_multiple(name: str, value: int, divisor: int, other: str) -> None:
    if value % divisor:
        above = (value // divisor + 1) * divisor
        raise ProfilingConfigError(
            f"{name}={value} is no multiple of {other}, {divisor}",
            why="each gets an equal share",
            instead=f"Type {name}={above}, or a smaller {other.split()[0]}",
        )


def check_batch(config: ConfigContainer, layout: ParallelLayout) -> None:
    """Refuse a global batch that does not divide into whole microbatches on every data-parallel rank."""
    train = config.train
    share = train.micro_batch_size * layout.dp
    if train.global_batch_size % share:
        above = (train.global_batch_size // share + 1) * share
        raise ProfilingConfigError(
            f"train.global_batch_size={train.global_batch_size} cannot be split into microbatches",
            why=f"it must be a multiple of train.micro_batch_size={train.micro_batch_size} times"
            f" the data-parallel size {layout.dp}, {share}",
            instead=f"Type train.global_batch_size={above}",
        )
    microbatches = train.global_batch_size // share
    if config.model.virtual_pipeline_model_parallel_size is not None and microbatches % layout.pp:
        raise ProfilingConfigError(
            f"{microbatches} microbatches cannot be interleaved over {layout.pp} pipeline stages",
            why="with virtual stages, megatron-core deals microbatches out in groups of the pipeline's size",
            instead=f"Type train.global_batch_size={share * layout.pp * (microbatches // layout.pp + 1)}",
        )


def check_iterations(train: TrainConfig) -> None:
    """Refuse a start outside the training."""
    if not 0 <= train.start_iteration < train.train_iters:
        raise ProfilingConfigError(
            f"train.start_iteration={train.start_iteration} leaves nothing to train",
            why=f"iterations run from 0 to {train.train_iters - 1} (train.train_iters={train.train_iters})",
            instead=f"Type train.start_iteration=0, or train.train_iters={max(train.start_iteration, 0) + 10}",
        )


def check_schedule(config: ConfigContainer) -> None:
    """Refuse a learning rate or a schedule that megatron-core's scheduler would assert on."""
    optimizer, scheduler = config.optimizer, config.scheduler
    if optimizer.lr is None or optimizer.lr <= 0:
        raise ProfilingConfigError(f"optimizer.lr={optimizer.lr} is no learning rate", instead="Type optimizer.lr=1e-3")
    if not 0 <= (optimizer.min_lr or 0.0) <= optimizer.lr:
        raise ProfilingConfigError(
            f"optimizer.min_lr={optimizer.min_lr} does not lie between 0 and optimizer.lr={optimizer.lr}",
            instead="Type optimizer.min_lr=0",
        )
    if not 0 <= scheduler.lr_warmup_init <= optimizer.lr:
        raise ProfilingConfigError(
            f"scheduler.lr_warmup_init={scheduler.lr_warmup_init} does not lie between 0 and optimizer.lr={optimizer.lr}",
            instead="Type scheduler.lr_warmup_init=0",
        )
    end = config.train.train_iters if scheduler.lr_decay_iters is None else scheduler.lr_decay_iters
    if not 0 <= scheduler.lr_warmup_iters < end:
        raise ProfilingConfigError(
            f"scheduler.lr_warmup_iters={scheduler.lr_warmup_iters} does not end before the decay does, at iteration {end}",
            instead="Type scheduler.lr_warmup_iters=0, or a larger scheduler.lr_decay_iters",
        )


def check_dataset(dataset: DatasetConfig) -> None:
    """Refuse weights without data sets, and loader settings that contradict each other. Looks at no file."""
    if dataset.blend is not None and not dataset.blend:
        raise ProfilingConfigError("dataset.blend=[] names no data set", instead="Type dataset.blend=null for mock data")
    if dataset.blend_weights is not None and len(dataset.blend_weights) != len(dataset.blend or ()):
        raise ProfilingConfigError(
            f"dataset.blend_weights has {len(dataset.blend_weights)} entries and dataset.blend {len(dataset.blend or ())}",
            why="each data set has one weight",
            instead="Type dataset.blend_weights=null to weigh them by their sizes",
        )
    if dataset.blend_weights is not None and (min(dataset.blend_weights) < 0 or sum(dataset.blend_weights) <= 0):
        raise ProfilingConfigError(
            f"dataset.blend_weights={dataset.blend_weights} are no shares", instead="Type numbers above 0, such as [0.7,0.3]"
        )
    shares = dataset.split.split(",")
    if not all(map(_SHARE.fullmatch, shares)) or len(shares) > 3 or not sum(map(float, shares)):
        raise ProfilingConfigError(
            f"dataset.split={dataset.split} gives no shares",
            why="it is up to three numbers: training, evaluation and test",
            instead="Type dataset.split=90,10,0",
        )
    if dataset.num_workers < 0:
        raise ProfilingConfigError(f"dataset.num_workers={dataset.num_workers}", instead="Type dataset.num_workers=0 or more")
    if dataset.prefetch_factor is not None and (dataset.num_workers == 0 or dataset.prefetch_factor < 1):
        raise ProfilingConfigError(
            f"dataset.prefetch_factor={dataset.prefetch_factor} with dataset.num_workers={dataset.num_workers}",
            why="it counts what each worker process loads ahead",
            instead="Type dataset.prefetch_factor=null, or 1 or more with dataset.num_workers=1 or more",
        )


def check_tokenizer(config: ConfigContainer) -> None:
    """Refuse more tokens than the embedding has rows."""
    tokens, rows = config.tokenizer.vocab_size, config.model.vocab_size
    if tokens is None:
        tokens = rows - 1
    if not 0 < tokens < rows:
        raise ProfilingConfigError(
            f"tokenizer.vocab_size={tokens} does not fit model.vocab_size={rows}",
            why="there must be at least one token, and a row more for the end of document",
            instead="Type tokenizer.vocab_size=null to take model.vocab_size - 1",
        )
