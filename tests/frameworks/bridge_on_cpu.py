"""What an unmodified Megatron Bridge needs to train without a GPU: answers for CUDA packages, and for CUDA itself.

Bridge imports packages that need CUDA, or that a GPT training does not use, without asking whether they are installed. A
finder answers those imports, for Megatron alone and the same on every machine. megatron-core is loaded first and finds
none of them, so it builds its own layers. `recipes.megatron.cpu` then lets the device "cuda" mean the CPU, as in this
project's own trainings. Model, optimizer, data, checkpoints and communication (gloo) are real.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch

from recipes.megatron.cpu import megatron_on_cpu

#: Packages whose imports are answered, and why a GPT training on a CPU does without them.
_ANSWERED = {
    **dict.fromkeys(("transformer_engine", "transformer_engine_torch", "flashinfer", "modelopt"), "need CUDA"),
    **dict.fromkeys(("mamba_ssm", "causal_conv1d", "fla"), "layers of other models, compiled for CUDA"),
    **dict.fromkeys(("timm", "open_clip", "qwen_vl_utils", "megatron.energon"), "images"),
    **dict.fromkeys(("datasets", "peft", "diffusers"), "finetuning and conversion"),
    **dict.fromkeys(("nvidia_resiliency_ext", "mlflow", "comet_ml", "wandb"), "restarts and trackers, off here"),
}

#: torch builds for CPUs come without it; where it is installed, torch itself uses it.
_IF_MISSING = "triton"

#: What a package answers that is compared with a minimum version, Transformer Engine for one.
_VERSION = "2.20.2"

#: What of megatron-core looks for these packages when it is loaded.
_CORE_MODULES = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
)


class _Answered(types.ModuleType):
    """A module that has every name: a class where it looks like one, so that it can be inherited from, else a mock."""

    __path__: list[str] = []
    __version__ = _VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = type(name, (), {"__init__": lambda self, *_, **__: None})
        else:
            value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Says first that the packages are missing, and answers their imports from `answer` on, where Megatron asks."""

    def __init__(self) -> None:
        self.answer = False
        self._names = set(_ANSWERED)
        if importlib.machinery.PathFinder.find_spec(_IF_MISSING) is None:
            self._names.add(_IF_MISSING)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = next((name for name in self._names if fullname == name or fullname.startswith(f"{name}.")), None)
        if known is None or not (isinstance(sys.modules.get(known), _Answered) or _asked_by_megatron()):
            return None
        if not self.answer:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Answered(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def _asked_by_megatron() -> bool:
    """Whether the import statement stands in Megatron: transformers and accelerate look for some of these too."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("megatron.")


def import_bridge() -> None:
    """Load Megatron Bridge's `pretrain`, and what its GPT training takes."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    for name in _CORE_MODULES:
        importlib.import_module(name)
    finder.answer = True
    for name in ("megatron.bridge.training.pretrain", "megatron.bridge.training.gpt_step"):
        importlib.import_module(name)


@contextmanager
def bridge_on_cpu() -> Iterator[None]:
    """Let Bridge's `pretrain` run without CUDA inside, for the rest of this process. Bridge is loaded already."""
    _patch_torch()
    _patch_bridge()
    _patch_core()
    with megatron_on_cpu():
        yield


def _patch_torch() -> None:
    stream = MagicMock(name="stream")
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: stream
    torch.cuda.stream = lambda *_: nullcontext()
    torch.cuda.set_device = lambda *_: None
    # Checkpoints hold the state of the device's generator.
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = torch.get_rng_state, lambda state, *_: torch.set_rng_state(state)
    # Called with keywords (`non_blocking=True`), which the mode of recipes.megatron.cpu leaves alone.
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor


def _patch_bridge() -> None:
    from megatron.bridge.models import gpt_provider
    from megatron.bridge.training import eval as eval_module
    from megatron.bridge.training import initialize, setup, train
    from megatron.bridge.training.utils import train_utils
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    real = initialize.initialize_megatron

    def initialize_megatron(cfg: Any, **more: Any) -> Any:
        result = real(cfg, allow_no_cuda=True, **more)
        # Bridge seeds these generators only where it counts a GPU.
        model_parallel_cuda_manual_seed(cfg.rng.seed, inference_rng_tracker=True)
        return result

    setup.initialize_megatron = initialize_megatron
    # The default layers are Transformer Engine's, whatever `model.transformer_impl` says.
    gpt_provider.transformer_engine_layer_spec = gpt_provider.local_layer_spec
    # It runs `make` in megatron-core's folder; the wheel has the compiled helper, and no Makefile.
    initialize.compile_helpers = lambda: None
    setup.set_jit_fusion_options = lambda *_: None
    # modelopt's; None for a model that is not distilled.
    for module in (train, eval_module):
        module.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    train_utils.report_theoretical_memory = lambda *_, **__: None
    train_utils.report_memory = lambda *_, **__: {}


def _patch_core() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm, local_multi_tensor_scale

    # The norm behind the layers would be Transformer Engine's.
    transformer_block.LayerNormImpl = WrappedTorchNorm
    optimizer.Adam = torch.optim.AdamW
    optimizer.USING_PYTORCH_OPTIMIZER = True
    clip_grads.multi_tensor_applier = local_multi_tensor_applier
    clip_grads.l2_norm_impl = local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = local_multi_tensor_scale
