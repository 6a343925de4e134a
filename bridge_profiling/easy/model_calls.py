"""Tells when a model is called, for a script that knows nothing of it and may save the model."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from bridge_profiling.integrations.torch_phases import PhaseWatch

#: Where a module has the call that stands for its own, as `model.compile()` makes one. torch leaves it out of what it pickles.
_CALL = "_compiled_call_impl"


class ModelCalls:
    """Makes each call of a model a phase `forward`, from before its first hook to after its last.

    No hook of the model: `torch.save` and `pickle` of the whole model, and its copies, would take that along.

    Args:
        model: the model; it is not kept alive.
        phases: opens and closes the ranges.
    """

    def __init__(self, model: torch.nn.Module, phases: PhaseWatch) -> None:
        self._model = weakref.ref(model)
        self._phases = phases
        self._compiled = vars(model).get(_CALL)
        vars(model)[_CALL] = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the model itself."""
        model = self._model()
        assert model is not None
        call = self._compiled or model._call_impl
        if torch.compiler.is_compiling():
            return call(*arguments, **keywords)
        self._phases.begin("forward")
        try:
            return call(*arguments, **keywords)
        finally:
            self._phases.end("forward")

    def begun(self) -> None:
        """The model's call that runs now is a `forward` too."""
        model = self._model()
        assert model is not None

        def ended(*_: object) -> None:
            handle.remove()
            self._phases.end("forward")

        handle = model.register_forward_hook(ended)
        self._phases.begin("forward")

    def remove(self) -> None:
        """Leave the model as it was, unless somebody has replaced its call since."""
        model = self._model()
        if model is None or vars(model).get(_CALL) is not self:
            return
        if self._compiled is None:
            del vars(model)[_CALL]
        else:
            vars(model)[_CALL] = self._compiled

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A class of modules that pickles all it has gets None here: no call that stands for its own.
        return type(None), ()
