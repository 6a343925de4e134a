"""Whose layers a rank trains: Transformer Engine's where it can, megatron-core's own elsewhere; and what that excludes.

Only the job's machines can answer this, so nothing here runs on a submit host; `finalize()` checks what needs no machine.
"""

from __future__ import annotations

from functools import cache

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from bridge_profiling.errors import ProfilingConfigError
from recipes.config import ConfigContainer, GPTModelConfig

#: What megatron-core does with Transformer Engine's layers only, in all supported releases.
_EXCLUDED = "no sequence, context or expert parallelism, no mixture of experts, no fp8, no TP communication overlap"


def choose_transformer_impl(config: ConfigContainer, device: torch.device) -> None:
    """Set `model.transformer_impl` to what this rank trains with.

    Args:
        config: changed in that field only.
        device: this rank's; Transformer Engine works on GPUs only.

    Raises:
        ProfilingConfigError: Transformer Engine is asked for, by name or by a setting that needs it, and is not here.
    """
    model, available = config.model, HAVE_TE and device.type == "cuda"
    if model.transformer_impl is None:
        model.transformer_impl = "transformer_engine" if available else "local"
    if model.transformer_impl == "transformer_engine":
        if not available:
            raise ProfilingConfigError(
                "model.transformer_impl=transformer_engine cannot be had here",
                why="this machine has no GPU" if HAVE_TE else "transformer_engine cannot be imported",
                instead="Type model.transformer_impl=null to take what there is, or run in a container that has it",
            )
        return
    for needed, setting, value in _needing_transformer_engine(model):
        if needed:
            raise ProfilingConfigError(
                f"{setting} needs Transformer Engine's layers",
                why="megatron-core's own cannot do it, and they are what "
                + ("model.transformer_impl=local asks for" if available else "this machine has"),
                instead=f"Type {setting.partition('=')[0]}={value}, or run where transformer_engine can be imported, on GPUs",
            )


def _needing_transformer_engine(model: GPTModelConfig) -> tuple[tuple[bool, str, str], ...]:
    """Whether each setting is on that needs Transformer Engine; its name and value; the value that switches it off."""
    backend = model.attention_backend.name
    return (
        (model.num_moe_experts is not None, f"model.num_moe_experts={model.num_moe_experts}", "null"),
        (model.sequence_parallel, "model.sequence_parallel=true", "false"),
        (model.context_parallel_size > 1, f"model.context_parallel_size={model.context_parallel_size}", "1"),
        (model.fp8 is not None, f"model.fp8={model.fp8}", "null"),
        (model.tp_comm_overlap, "model.tp_comm_overlap=true", "false"),
        (model.apply_rope_fusion, "model.apply_rope_fusion=true", "false"),
        (backend in ("flash", "fused"), f"model.attention_backend={backend}", "auto"),
    )


def describe_layers(model: GPTModelConfig) -> str:
    """The line of the log that says which layers were chosen, and what that excludes."""
    if model.transformer_impl == "transformer_engine":
        return "layers: Transformer Engine's"
    return f"layers: megatron-core's own (local spec), which exclude: {_EXCLUDED}"


def layer_spec(model: GPTModelConfig, stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one model chunk, and the norm behind them.

    Args:
        model: a finalized model section.
        stage: the virtual pipeline stage, or None without one.
    """
    local = model.transformer_impl == "local"
    spec = get_gpt_decoder_block_spec(
        model, use_transformer_engine=not local, normalization=model.normalization, vp_stage=stage
    )
    if local and model.normalization == "RMSNorm":
        # Where Apex is installed this would be its fused LayerNorm, which cannot do RMSNorm.
        spec.layer_norm = WrappedTorchNorm
    return spec


def compile_layers(layers: torch.nn.ModuleList) -> None:
    """Let torch.compile take over each layer, one by one: they are alike, so what is compiled for one serves all."""
    _leave_random_states_out()
    for layer in layers:
        layer.compile()


@cache
def _leave_random_states_out() -> None:
    """Have dynamo compile nothing of what sets a GPU's random state.

    torch (2.11 to 2.13 at least) sets it under a lock of `torch.cuda`, and dynamo, when it compiles what runs under that lock,
    sets it again: the first forward pass never ends (pytorch/pytorch#182948).
    """
    random._set_cuda_rng_state = torch.compiler.disable(random._set_cuda_rng_state)
