"""What an unmodified megatron-core needs to train without a GPU. Nothing here takes effect where CUDA is available.

megatron-core names the device "cuda" in its code. While the context manager is open, a TorchFunctionMode turns that name
into "cpu", three functions of torch.cuda answer for the CPU, and optimizers are torch's own. What the mode rewrote is
counted: a count that changes with a new megatron-core shows that its code did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch.overrides import TorchFunctionMode

from bridge_profiling.errors import ProfilingConfigError

if TYPE_CHECKING:
    from recipes.config import ConfigContainer

_CPU = torch.device("cpu")

#: Settings of the model that need CUDA, and what they become without it.
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
    """Lets `device="cuda"`, `Tensor.cuda()` and `Tensor.type()` mean the CPU. Costs some 5 ms in a step of `gpt_tiny`.

    Attributes:
        rewrites: how often each function was answered for the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rewrites: Counter[str] = Counter()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> object:
        """Answer one call of a torch function."""
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                self.rewrites[func.__name__] += 1
                kwargs = {**kwargs, "device": _CPU}
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            self.rewrites["cuda"] += 1
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            # Gradient clipping and the optimizers accept tensors by this name, "torch.cuda.FloatTensor".
            self.rewrites["type"] += 1
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args)


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


@contextmanager
def megatron_on_cpu() -> Iterator[CudaToCpu | None]:
    """Let megatron-core run on the CPU inside; where CUDA is available nothing is changed and None is given."""
    if torch.cuda.is_available():
        yield None
        return
    originals = []
    try:
        for module, name, value in [*_cuda_functions(), *_optimizer_functions()]:
            originals.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        with CudaToCpu() as mode:
            yield mode
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def _cuda_functions() -> Iterator[tuple[ModuleType, str, object]]:
    """Functions of torch.cuda that megatron-core calls on every rank, and their CPU counterparts."""
    yield torch.cuda, "current_device", lambda: _CPU
    yield torch.cuda, "synchronize", lambda device=None: None
    # Since 0.19, before each reduction of gradients.
    yield torch.cuda, "current_stream", lambda device=None: torch.cpu.current_stream()


def _optimizer_functions() -> Iterator[tuple[ModuleType, str, object]]:
    """What megatron-core's optimizers are built on where Transformer Engine cannot be imported.

    Where it can, they are built on its CUDA kernels, whether there is a GPU or not.
    """
    if not HAVE_TE:
        return
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base
    from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm, local_multi_tensor_scale

    for module in (clip_grads, base):
        yield module, "multi_tensor_applier", local_multi_tensor_applier
        yield module, "multi_tensor_scale_impl", local_multi_tensor_scale
    yield clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm
    if hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):
        # Since 0.17.
        yield clip_grads, "multi_tensor_scale_tensor_impl", None
    for module in (optimizer, distrib_optimizer):
        if hasattr(module, "Adam"):
            yield module, "Adam", torch.optim.AdamW
    yield optimizer, "SGD", torch.optim.SGD
    yield optimizer, "USING_PYTORCH_OPTIMIZER", True
    yield distrib_optimizer, "USING_TE_OPTIMIZER", False


def adapt_to_cpu(config: ConfigContainer) -> list[str]:
    """Set CUDA-only settings to what works without it.

    Returns:
        The settings changed, in the form of overrides, to be told to the user.

    Raises:
        ProfilingConfigError: a setting that would change what is trained, and has no form that works on a CPU.
    """
    model = config.model
    for asked, setting, value in (
        (model.recompute_granularity is not None, "model.recompute_granularity", "null"),
        # It works, but compiles for a minute: the counts that CudaToCpu keeps are part of what is compiled.
        (model.torch_compile, "model.torch_compile", "false"),
        (model.cuda_graph_impl != "none", "model.cuda_graph_impl", "none"),
        (config.optimizer.optimizer_cpu_offload, "optimizer.optimizer_cpu_offload", "false"),
    ):
        if asked:
            raise ProfilingConfigError(
                f"{setting} is set, and there is no GPU here", why="it is made for CUDA", instead=f"Type {setting}={value}"
            )
    settings = dict(_WITHOUT_CUDA)
    if model.tensor_model_parallel_size > 1:
        # Without CUDA's generators the ranks of a tensor-parallel group would drop the same units.
        settings |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    changed = {name: value for name, value in settings.items() if getattr(model, name) != value}
    for name, value in changed.items():
        setattr(model, name, value)
    return [f"model.{name}={str(value).lower()}" for name, value in changed.items()]
