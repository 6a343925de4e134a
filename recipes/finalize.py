"""Checks a configuration as a whole and derives the fields that follow from others."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from bridge_profiling.common.errors import ProfilingConfigError, require
from recipes import checks
from recipes.config import ConfigContainer, GPTModelConfig

#: Settings that megatron-core checks against the installed Transformer Engine.
_NEEDS_TRANSFORMER_ENGINE = ("apply_rope_fusion", "moe_permute_fusion", "fp8")


def finalize(config: ConfigContainer, world_size: int) -> None:
    """Check every section against the others and the job, and derive fields. May be called again.

    Args:
        config: derived fields are set in place.
        world_size: number of ranks of the job.

    Raises:
        ProfilingConfigError: the first setting found that cannot work. Some fields may have been derived already.
    """
    checks.check_numbers(config)
    checks.check_supported(config)
    layout = config.layout(world_size)
    checks.check_model_split(config.model)
    checks.check_batch(config, layout)
    checks.check_start(config.train)
    checks.check_checkpoint(config)
    checks.check_packages(config.monitor, config.checkpoint)
    checks.check_schedule(config)
    checks.check_tokenizer(config)
    checks.check_dataset(config.dataset)
    config.profiling.finalize(train_iters=config.train.train_iters, world_size=world_size)
    _derive_precision(config)
    _derive_distributed_optimizer(config)
    _check_compiled_layers(config)
    if config.model.virtual_pipeline_model_parallel_size:
        # Batched, megatron-core 0.16.1 mixes up the messages of interleaved stages: on two H200s such a model trained on
        # wrong activations without any error (its loss did not fall; sent one by one, it does).
        config.model.batch_p2p_comm = False
    _finalize_model(config.model)
    for section in ("optimizer", "ddp"):
        with _megatron_errors(section):
            getattr(config, section).__post_init__()
    if config.optimizer.min_lr is None:
        # megatron-core's parameter groups hold it, and its schedules other than `constant` calculate with it.
        config.optimizer.min_lr = 0.0
    if config.scheduler.lr_decay_iters is None:
        config.scheduler.lr_decay_iters = config.train.train_iters
    if config.tokenizer.vocab_size is None:
        config.tokenizer.vocab_size = config.model.vocab_size - 1


def _derive_precision(config: ConfigContainer) -> None:
    """Derive the dtypes of the weights, the pipeline's messages and the optimizer from `model.bf16` and `model.fp16`."""
    model, optimizer = config.model, config.optimizer
    require(not (model.bf16 and model.fp16), "model.bf16 and model.fp16 are both on", instead="Type model.fp16=false")
    dtype = torch.bfloat16 if model.bf16 else torch.float16 if model.fp16 else torch.float32
    for section, name, value in (
        (model, "params_dtype", dtype),
        (model, "pipeline_dtype", dtype),
        (optimizer, "params_dtype", dtype),
        (optimizer, "bf16", model.bf16),
        (optimizer, "fp16", model.fp16),
    ):
        given, setting = getattr(section, name), f"{'model' if section is model else 'optimizer'}.{name}"
        require(
            # The fields' defaults are among them.
            given in (value, None, False, torch.float32),
            f"{setting}={given} contradicts the model's precision, {dtype}",
            why="it follows from model.bf16 and model.fp16",
            instead=f"Leave {setting} out, and set model.bf16 or model.fp16",
        )
        setattr(section, name, value)


def _derive_distributed_optimizer(config: ConfigContainer) -> None:
    """Switch the distributed optimizer on in both sections if it is on in one, and refuse overlaps that need it."""
    optimizer, ddp = config.optimizer, config.ddp
    on = optimizer.use_distributed_optimizer or ddp.use_distributed_optimizer
    optimizer.use_distributed_optimizer = ddp.use_distributed_optimizer = on
    require(
        not ddp.overlap_param_gather or (on and ddp.overlap_grad_reduce),
        "ddp.overlap_param_gather is on without the settings it needs",
        why="parameters are gathered by the distributed optimizer, after gradients reduced with overlap",
        instead="Type ddp.use_distributed_optimizer=true ddp.overlap_grad_reduce=true as well",
    )
    optimizer.overlap_param_gather = ddp.overlap_param_gather


def _check_compiled_layers(config: ConfigContainer) -> None:
    require(
        not (config.model.torch_compile and config.ddp.overlap_param_gather),
        "model.torch_compile and ddp.overlap_param_gather are both on",
        why="hooks of the modules inside a layer wait for the gathers, and the layer is compiled as a whole",
        instead="Type ddp.overlap_param_gather=false",
    )
    require(
        not config.model.torch_compile or config.model.cuda_graph_impl == "none",
        "model.torch_compile and model.cuda_graph_impl are both on",
        why="each replaces the call of a layer",
        instead="Type model.cuda_graph_impl=none",
    )


@contextmanager
def _megatron_errors(section: str) -> Iterator[None]:
    """Turn megatron-core's errors about a section (ValueError, AssertionError, …) into a ProfilingConfigError."""
    try:
        with warnings.catch_warnings():
            # Printed whenever the scope of CUDA graphs keeps megatron-core's own default.
            warnings.filterwarnings("ignore", message="full scope is deprecated")
            yield
    except (ValueError, AssertionError, RuntimeError, ImportError) as error:
        raise ProfilingConfigError(
            f"megatron-core refuses the {section} section",
            why=" ".join(str(error).split()) or "it gives no reason",
            instead=f"Change the {section}.* settings it names",
        ) from error


def _finalize_model(model: GPTModelConfig) -> None:
    """Run megatron-core's checks. Those of the installed Transformer Engine are for the job's machines (`megatron.layers`)."""
    hidden = {}
    if importlib.util.find_spec("transformer_engine") is None:
        hidden = {name: getattr(model, name) for name in _NEEDS_TRANSFORMER_ENGINE}
    for name in hidden:
        setattr(model, name, None)
    with _megatron_errors("model"):
        TransformerConfig.__post_init__(model)
    for name, value in hidden.items():
        setattr(model, name, value)
