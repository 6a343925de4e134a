"""The choice of layers: Transformer Engine's if this rank can use them, else megatron-core's own, which exclude some settings.

The choice depends on the job's machines, so nothing here runs on a submit host.
"""

from __future__ import annotations

from functools import cache

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from bridge_profiling.common.errors import require
from recipes.config import ConfigContainer, GPTModelConfig


def choose_transformer_impl(config: ConfigContainer, device: torch.device) -> None:
    """Set `model.transformer_impl` for this rank.

    Args:
        config: changed in that field only.
        device: this rank's; Transformer Engine works on GPUs only.

    Raises:
        ProfilingConfigError: Transformer Engine is requested, by name or by a setting that needs it, and not available.
    """
    model, available = config.model, HAVE_TE and device.type == "cuda"
    if model.transformer_impl is None:
        model.transformer_impl = "transformer_engine" if available else "local"
    if model.transformer_impl == "transformer_engine":
        require(
            available,
            "model.transformer_impl=transformer_engine is not available here",
            why="this machine has no GPU" if HAVE_TE else "transformer_engine cannot be imported",
            instead="Type model.transformer_impl=null to use the layers available, or run in a container that has it",
        )
        return
    owner = "model.transformer_impl=local asks for" if available else "this machine has"
    backend = model.attention_backend.name
    for used, setting, value, off in (
        (model.num_moe_experts is not None, "num_moe_experts", model.num_moe_experts, "null"),
        (model.sequence_parallel, "sequence_parallel", "true", "false"),
        (model.context_parallel_size > 1, "context_parallel_size", model.context_parallel_size, "1"),
        (model.fp8 is not None, "fp8", model.fp8, "null"),
        (model.apply_rope_fusion, "apply_rope_fusion", "true", "false"),
        (backend in ("flash", "fused"), "attention_backend", backend, "auto"),
    ):
        require(
            not used,
            f"model.{setting}={value} needs Transformer Engine's layers",
            why=f"megatron-core's own layers, which {owner}, do not support it",
            instead=f"Type model.{setting}={off}, or run where transformer_engine can be imported, on GPUs",
        )


def describe_layers(model: GPTModelConfig) -> str:
    """The line of the log that names the chosen layers and what they exclude."""
    if model.transformer_impl == "transformer_engine":
        return "layers: Transformer Engine's"
    # All supported releases of megatron-core need Transformer Engine's layers for these.
    excluded = "no sequence, context or expert parallelism, no mixture of experts, no fp8, no TP communication overlap"
    return f"layers: megatron-core's own (local spec), which exclude: {excluded}"


def layer_spec(model: GPTModelConfig, stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one model chunk, and the norm after them.

    Args:
        model: a finalized model section.
        stage: the virtual pipeline stage, or None without one.
    """
    local = model.transformer_impl == "local"
    spec = get_gpt_decoder_block_spec(
        model, use_transformer_engine=not local, normalization=model.normalization, vp_stage=stage
    )
    if local and model.normalization == "RMSNorm":
        # With Apex installed, this would be its fused LayerNorm, which does not support RMSNorm.
        spec.layer_norm = WrappedTorchNorm
    return spec


def compile_layers(layers: torch.nn.ModuleList) -> None:
    """Compile each layer with torch.compile, one by one: they are alike, so all share the code compiled for the first."""
    _exclude_random_states()
    for layer in layers:
        layer.compile()


@cache
def _exclude_random_states() -> None:
    """Exclude functions that set a GPU's random state from compilation.

    torch (2.11 to 2.13 at least) sets it under a lock of `torch.cuda`, and dynamo sets it again while compiling code that
    runs under the lock: the first forward pass never ends (pytorch/pytorch#182948).
    """
    random._set_cuda_rng_state = torch.compiler.disable(random._set_cuda_rng_state)
