"""Imports Megatron Bridge where not all of the packages are installed that it imports without asking.

Bridge 0.6 names some thirty packages that a GPT training never calls: other models' layers, image tools, experiment trackers,
quantization. Those that are missing are answered, for Megatron alone; those that are installed stay what they are.
megatron-core is loaded before, so that it finds them missing and takes its own ways around them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any
from unittest.mock import MagicMock

#: Not Transformer Engine: its layers are what is trained here.
_OPTIONAL = (
    "modelopt", "flashinfer", "mamba_ssm", "causal_conv1d", "fla", "timm", "open_clip", "qwen_vl_utils", "megatron.energon",
    "datasets", "peft", "diffusers", "nvidia_resiliency_ext", "mlflow", "comet_ml", "wandb", "multistorageclient",
)  # fmt: skip

#: The parts of megatron-core that look for these packages.
_CORE = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
)


class _Answered(types.ModuleType):
    """A module with every name: a class where it is written like one, so that it can be inherited from, else a mock."""

    __path__: list[str] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of the packages that are missing, where a module of Megatron asks."""

    def __init__(self, missing: set[str]) -> None:
        self._missing = missing

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = next((name for name in self._missing if fullname == name or fullname.startswith(f"{name}.")), None)
        if known is None or not (isinstance(sys.modules.get(known), _Answered) or _asked_by_megatron()):
            return None
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


def missing_packages() -> set[str]:
    """Those of the optional packages that cannot be imported here."""
    found = set()
    for name in _OPTIONAL:
        try:
            known = importlib.util.find_spec(name) is not None
        except (ModuleNotFoundError, ValueError):
            known = False
        found |= set() if known else {name}
    return found


def import_bridge() -> tuple[Any, Any]:
    """Megatron Bridge's `pretrain` and the forward step of its GPT training."""
    for name in _CORE:
        importlib.import_module(name)
    missing = missing_packages()
    sys.meta_path.append(_Finder(missing))
    pretrain = importlib.import_module("megatron.bridge.training.pretrain").pretrain
    forward_step = importlib.import_module("megatron.bridge.training.gpt_step").forward_step
    if "modelopt" in missing:
        for name in ("train", "eval"):
            module = importlib.import_module(f"megatron.bridge.training.{name}")
            # modelopt's own gives None for a model that is not distilled.
            module.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    # Rank 0 would run `make` in megatron-core's folder, and exit when it fails. The wheel has the helper, and no Makefile.
    initialize = importlib.import_module("megatron.bridge.training.initialize")
    initialize.compile_helpers = lambda: None
    return pretrain, forward_step
