"""What a ConfigContainer's sections must satisfy together, each refusal with the mend in it. Changes only derived fields."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from bridge_profiling.capture.ranks import ParallelLayout
from bridge_profiling.errors import ProfilingConfigError

if TYPE_CHECKING:
    from recipes.config import ConfigContainer, GPTModelConfig, TrainConfig

_AT_LEAST_ONE = {
    "model": (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
        "seq_length",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    ),
    "train": ("train_iters", "micro_batch_size", "global_batch_size", "eval_iters"),
    "logger": ("log_interval",),
    "dist": ("distributed_timeout_minutes",),
}


@contextmanager
def megatron_errors(section: str) -> Iterator[None]:
    """Turn megatron-core's refusals of a section (ValueError, AssertionError, …) into a ProfilingConfigError."""
    try:
        with warnings.catch_warnings():
            # Said whenever cuda_graph_scope keeps megatron-core's own default.
            warnings.filterwarnings("ignore", message="full scope is deprecated")
            yield
    except (ValueError, AssertionError, RuntimeError, ImportError) as error:
        raise ProfilingConfigError(
            f"megatron-core refuses the {section} section",
            why=" ".join(str(error).split()) or "it gives no reason",
            instead=f"Change the {section}.* settings it names",
        ) from error


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


def check_supported(config: ConfigContainer) -> None:
    """Refuse what megatron-core's configs can say but this loop cannot do."""
    model = config.model
    refusals = (
        (model.transformer_impl != "local", f"model.transformer_impl={model.transformer_impl}", "local"),
        (model.context_parallel_size != 1, f"model.context_parallel_size={model.context_parallel_size}", "1"),
        (model.sequence_parallel, "model.sequence_parallel=true", "false"),
        # megatron-core 0.16's own router and activation offloading stop with a NameError and an AssertionError there.
        (model.num_moe_experts is not None, f"model.num_moe_experts={model.num_moe_experts}", "null"),
        (model.expert_model_parallel_size != 1, f"model.expert_model_parallel_size={model.expert_model_parallel_size}", "1"),
        (model.cpu_offloading, "model.cpu_offloading=true", "false"),
        (model.fp8 is not None, f"model.fp8={model.fp8}", "null"),
        (model.fp4 is not None, f"model.fp4={model.fp4}", "null"),
        (model.multi_latent_attention, "model.multi_latent_attention=true", "false"),
        (model.mtp_num_layers is not None, f"model.mtp_num_layers={model.mtp_num_layers}", "null"),
        (model.cuda_graph_impl != "none", f"model.cuda_graph_impl={model.cuda_graph_impl}", "none"),
        (model.attention_backend.name in ("flash", "fused"), f"model.attention_backend={model.attention_backend.name}", "auto"),
        (config.ddp.use_megatron_fsdp, "ddp.use_megatron_fsdp=true", "false"),
        (config.optimizer.optimizer not in ("adam", "sgd"), f"optimizer.optimizer={config.optimizer.optimizer}", "adam"),
    )
    for refused, setting, value in refusals:
        if refused:
            raise ProfilingConfigError(
                f"{setting} is not supported",
                why="this loop trains with megatron-core's own layers (no Transformer Engine) and its DistributedDataParallel",
                instead=f"Type {setting.partition('=')[0]}={value}",
            )


def check_model_split(model: GPTModelConfig) -> None:
    """Refuse sizes that tensor or pipeline parallelism cannot divide."""
    tensor, pipeline = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    for name, value, divisor, other in (
        ("num_attention_heads", model.num_attention_heads, tensor, "model.tensor_model_parallel_size"),
        ("vocab_size", model.vocab_size, tensor, "model.tensor_model_parallel_size"),
        ("hidden_size", model.hidden_size, model.num_attention_heads, "model.num_attention_heads"),
    ):
        _check_multiple(f"model.{name}", value, divisor, other)
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


def derive_precision(config: ConfigContainer) -> None:
    """Make the dtypes of the weights, the pipeline's messages and the optimizer follow `model.bf16` and `model.fp16`."""
    model, optimizer = config.model, config.optimizer
    if model.bf16 and model.fp16:
        raise ProfilingConfigError("model.bf16 and model.fp16 are both on", instead="Type model.fp16=false")
    dtype = torch.bfloat16 if model.bf16 else torch.float16 if model.fp16 else torch.float32
    for name in ("bf16", "fp16"):
        if getattr(optimizer, name) and not getattr(model, name):
            raise ProfilingConfigError(
                f"optimizer.{name} is on and model.{name} is off",
                why="the optimizer's precision follows the model's",
                instead=f"Type model.{name}=true",
            )
    for name, given in (
        ("model.params_dtype", model.params_dtype),
        ("model.pipeline_dtype", model.pipeline_dtype),
        ("optimizer.params_dtype", optimizer.params_dtype),
    ):
        # float32 is also what the field holds when nobody has set it.
        if given not in (None, torch.float32, dtype):
            raise ProfilingConfigError(
                f"{name}={given} contradicts the model's precision, {dtype}",
                why="it follows from model.bf16 and model.fp16",
                instead=f"Leave {name} out, and set model.bf16 or model.fp16",
            )
    model.params_dtype = model.pipeline_dtype = optimizer.params_dtype = dtype
    optimizer.bf16, optimizer.fp16 = model.bf16, model.fp16


def derive_distributed_optimizer(config: ConfigContainer) -> None:
    """Switch the distributed optimizer on in both sections when it is on in one, and refuse overlaps that need it."""
    optimizer, ddp = config.optimizer, config.ddp
    on = optimizer.use_distributed_optimizer or ddp.use_distributed_optimizer
    optimizer.use_distributed_optimizer = ddp.use_distributed_optimizer = on
    if ddp.overlap_param_gather and not (on and ddp.overlap_grad_reduce):
        raise ProfilingConfigError(
            "ddp.overlap_param_gather is on without the settings it needs",
            why="parameters are gathered by the distributed optimizer, after gradients reduced with overlap",
            instead="Type ddp.use_distributed_optimizer=true ddp.overlap_grad_reduce=true as well",
        )
    optimizer.overlap_param_gather = ddp.overlap_param_gather
