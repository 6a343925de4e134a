"""Lets an unmodified megatron-core train without a GPU. Has no effect where CUDA is available.

megatron-core names the device "cuda" in its code. While `megatron_on_cpu` is open, a TorchFunctionMode turns that name into
"cpu", three functions of torch.cuda return the CPU's answers, and optimizers are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch.overrides import TorchFunctionMode

from bridge_profiling.common.errors import require
from recipes.config import ConfigContainer

_CPU = torch.device("cpu")

#: Settings of the model that need CUDA, with their values without it.
_WITHOUT_CUDA: dict[str, object] = {
    "use_cpu_initialization": True,
    # Batched point-to-point messages end in torch.cuda.synchronize().
    "batch_p2p_comm": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
}


class CudaToCpu(TorchFunctionMode):
    """Lets `device="cuda"`, `Tensor.cuda()` and `Tensor.type()` mean the CPU. Costs some 5 ms in a step of `gpt_tiny`."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> object:
        """Handle one call of a torch function."""
        if kwargs:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs = {**kwargs, "device": _CPU}
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            # Gradient clipping and the optimizers accept tensors by this name, "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let megatron-core run on the CPU in the block. If CUDA is available, change nothing."""
    if torch.cuda.is_available():
        yield
        return
    originals = []
    try:
        for module, name, value in list(_replacements()):
            originals.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        with CudaToCpu():
            yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def _replacements() -> Iterator[tuple[ModuleType, str, object]]:
    """Functions of torch.cuda that megatron-core calls on every rank, and the base of its optimizers."""
    yield torch.cuda, "current_device", lambda: _CPU
    yield torch.cuda, "synchronize", lambda device=None: None
    # Since 0.19, before each reduction of gradients.
    yield torch.cuda, "current_stream", lambda device=None: torch.cpu.current_stream()
    if not HAVE_TE:
        return
    # If Transformer Engine can be imported, megatron-core's optimizers use its CUDA kernels, with or without a GPU.
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base
    from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm, local_multi_tensor_scale

    for module in (clip_grads, base):
        yield module, "multi_tensor_applier", local_multi_tensor_applier
        yield module, "multi_tensor_scale_impl", local_multi_tensor_scale
    yield clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm
    yield clip_grads, "multi_tensor_scale_tensor_impl", None
    for module in (optimizer, distrib_optimizer):
        if hasattr(module, "Adam"):
            yield module, "Adam", torch.optim.AdamW
    yield optimizer, "SGD", torch.optim.SGD
    yield optimizer, "USING_PYTORCH_OPTIMIZER", True
    yield distrib_optimizer, "USING_TE_OPTIMIZER", False


def adapt_to_cpu(config: ConfigContainer) -> list[str]:
    """Set CUDA-only settings to values that work without it.

    Returns:
        The settings changed, in the form of overrides, to show to the user.

    Raises:
        ProfilingConfigError: a setting that affects the training and has no equivalent on a CPU.
    """
    model = config.model
    for used, setting, value in (
        (model.recompute_granularity is not None, "model.recompute_granularity", "null"),
        # It works, but compiles for a minute, since CudaToCpu is compiled too.
        (model.torch_compile, "model.torch_compile", "false"),
        (model.cuda_graph_impl != "none", "model.cuda_graph_impl", "none"),
        (config.optimizer.optimizer_cpu_offload, "optimizer.optimizer_cpu_offload", "false"),
    ):
        require(not used, f"{setting} is set, and there is no GPU here", why="it needs CUDA", instead=f"Type {setting}={value}")
    settings = dict(_WITHOUT_CUDA)
    if model.tensor_model_parallel_size > 1:
        # Without CUDA's generators the ranks of a tensor-parallel group would drop the same units.
        settings |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    changed = {name: value for name, value in settings.items() if getattr(model, name) != value}
    for name, value in changed.items():
        setattr(model, name, value)
    return [f"model.{name}={str(value).lower()}" for name, value in changed.items()]
