"""Checks a configuration as a whole and derives the fields that follow from others."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from bridge_profiling.errors import ProfilingConfigError
from recipes import checks, run_checks
from recipes.config import ConfigContainer, GPTModelConfig


def finalize(config: ConfigContainer, world_size: int) -> None:
    """Check every section against the others and the job, and derive fields. May be called again.

    Args:
        config: derived fields are set in place.
        world_size: number of ranks of the job.

    Raises:
        ProfilingConfigError: the first setting found that cannot work. Some fields may have been derived already.
    """
    checks.check_sizes(config)
    checks.check_supported(config)
    layout = config.layout(world_size)
    checks.check_model_split(config.model)
    checks.check_batch(config, layout)
    checks.check_iterations(config.train)
    run_checks.check_exits(config.train)
    run_checks.check_monitor(config.monitor)
    run_checks.check_checkpoint(config)
    checks.check_schedule(config)
    checks.check_tokenizer(config)
    checks.check_dataset(config.dataset)
    config.profiling.finalize(train_iters=config.train.train_iters, world_size=world_size)
    derive_precision(config)
    derive_distributed_optimizer(config)
    derive_pipeline_messages(config.model)
    with megatron_errors("model"), without_checks_of_a_local_transformer_engine(config.model):
        TransformerConfig.__post_init__(config.model)
    with megatron_errors("optimizer"):
        config.optimizer.__post_init__()
    with megatron_errors("ddp"):
        config.ddp.__post_init__()
    if config.optimizer.min_lr is None:
        # megatron-core's parameter groups hold it, and its schedules other than `constant` calculate with it.
        config.optimizer.min_lr = 0.0
    if config.scheduler.lr_decay_iters is None:
        config.scheduler.lr_decay_iters = config.train.train_iters
    if config.tokenizer.vocab_size is None:
        config.tokenizer.vocab_size = config.model.vocab_size - 1


@contextmanager
def megatron_errors(section: str) -> Iterator[None]:
    """Turn megatron-core's refusals of a section (ValueError, AssertionError, …) into a ProfilingConfigError."""
    try:
        with warnings.catch_warnings():
            # Said whenever the scope of CUDA graphs keeps megatron-core's own default.
            warnings.filterwarnings("ignore", message="full scope is deprecated")
            yield
    except (ValueError, AssertionError, RuntimeError, ImportError) as error:
        raise ProfilingConfigError(
            f"megatron-core refuses the {section} section",
            why=" ".join(str(error).split()) or "it gives no reason",
            instead=f"Change the {section}.* settings it names",
        ) from error


#: Settings that megatron-core compares with the Transformer Engine installed here, and what makes it skip that.
_COMPARED_WITH_TRANSFORMER_ENGINE = {"apply_rope_fusion": False, "moe_permute_fusion": False, "fp8": None}


@contextmanager
def without_checks_of_a_local_transformer_engine(model: GPTModelConfig) -> Iterator[None]:
    """Where Transformer Engine is missing, hide the settings that megatron-core would refuse for want of it.

    A submit host may well be without; whether the job's machines can do it is checked there, by `recipes.megatron.layers`.
    """
    hidden = {}
    if importlib.util.find_spec("transformer_engine") is None:
        hidden = {name: getattr(model, name) for name in _COMPARED_WITH_TRANSFORMER_ENGINE}
        for name, value in _COMPARED_WITH_TRANSFORMER_ENGINE.items():
            setattr(model, name, value)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(model, name, value)


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


def derive_pipeline_messages(model: GPTModelConfig) -> None:
    """Send the messages of interleaved stages one by one.

    Batched, megatron-core 0.16.1 mixes them up between two stages: on two H200s a model with virtual stages then trains on
    wrong activations without a word (its loss stays where it began, and falls with this).
    """
    if model.virtual_pipeline_model_parallel_size:
        model.batch_p2p_comm = False


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
    if ddp.overlap_param_gather and config.model.torch_compile:
        raise ProfilingConfigError(
            "model.torch_compile and ddp.overlap_param_gather are both on",
            why="the gathers are waited for in hooks of the modules inside a layer, which is compiled as a whole",
            instead="Type ddp.overlap_param_gather=false",
        )
    if config.model.torch_compile and config.model.cuda_graph_impl != "none":
        raise ProfilingConfigError(
            "model.torch_compile and model.cuda_graph_impl are both on",
            why="each takes over the call of a layer",
            instead="Type model.cuda_graph_impl=none",
        )
    optimizer.overlap_param_gather = ddp.overlap_param_gather
