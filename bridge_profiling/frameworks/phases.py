"""Ranges around the phases of a training step, opened by hooks in torch: forward, backward, optimizer and others.

The hooks change no number of a training and raise nothing into it. The phases:

- `forward`: a call of the watched model, including its own hooks.
- `backward`: a call of `torch.autograd.backward`, which `loss.backward()` makes. It returns when the kernels are launched, so
  overlapping collectives are inside. `torch.autograd.grad` is not watched, because it serves more than training.
- `optimizer`: `optimizer.step()`, including the collectives of the optimizer itself.
- `data-loading`: waiting for the next batch of a torch DataLoader.
- `checkpoint`: `torch.save`, and `save` and `async_save` of `torch.distributed.checkpoint`.

Copies to the device need a range in the code: no hook distinguishes them from other calls of `Tensor.to`.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

#: Returns the range for a name, or a nullcontext where no range is open.
RangeOf = Callable[[str], AbstractContextManager]

#: Functions that write a checkpoint: module, name. A module that is imported after the watch begins is not watched.
_SAVES = (("torch", "save"), ("torch.distributed.checkpoint", "save"), ("torch.distributed.checkpoint", "async_save"))

#: A module's replacement for its own call, as `model.compile()` installs one. torch leaves it out of pickles.
_CALL = "_compiled_call_impl"


class PhaseWatch:
    """Opens a range when a phase begins and closes it when the phase ends, on the thread that created the watch.

    A phase inside a phase of the same name is part of the outer one: reentrant activation checkpointing runs a backward inside
    a backward.

    Args:
        range_of: returns the range for a name; `ProfilingHook.range` does.

    Attributes:
        fetches: called with the iterator of a torch DataLoader before it fetches a batch.
        undo: called by `detach`; changes made for this watch register their undo here.
    """

    def __init__(self, range_of: RangeOf) -> None:
        self.undo = ExitStack()
        self.fetches: Callable[[Any], None] = lambda loader: None
        self._range_of = range_of
        self._thread = threading.get_ident()
        self._open: list[tuple[str, AbstractContextManager]] = []
        self._depth: dict[str, int] = {}

    # -- watching ----------------------------------------------------------------------------------------------------

    def everything(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Watch every phase: `forward` only with a model, `optimizer` of every optimizer unless one is given."""
        if model is not None:
            self.model(model)
        self.optimizer(optimizer)
        self.backward()
        self.data_loaders()
        self.checkpoints()

    def model(self, model: torch.nn.Module) -> None:
        """Watch calls of this module as `forward`; wrap it first (DDP, FSDP, torch.compile).

        By hooks, because replicas of `torch.nn.DataParallel` share everything else in the model's `__dict__`: a replaced call
        would run the original on every device.
        """
        if getattr(model, _CALL, None) is not None:
            # After `model.compile()`, torch would compile hooks too, but not a function around the compiled call.
            self.function(model, _CALL, "forward")
            return
        self.undo.callback(model.register_forward_pre_hook(_ModelHook(self.begin), prepend=True).remove)
        self.undo.callback(model.register_forward_hook(_ModelHook(self.end), always_call=True).remove)

    def calls_of(self, model: torch.nn.Module) -> ForwardCalls:
        """Watch calls of a module that the script itself calls, and may compile, save or copy, as `forward`."""
        calls = ForwardCalls(model, self)
        self.undo.callback(calls.remove)
        return calls

    def optimizer(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Watch steps of this optimizer, or of every optimizer of the process, as `optimizer`."""
        from torch.optim import optimizer as optimizers

        before, after = optimizers.register_optimizer_step_pre_hook, optimizers.register_optimizer_step_post_hook
        if optimizer is not None:
            before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self.undo.callback(before(lambda *_: self.begin("optimizer")).remove)
        self.undo.callback(after(lambda *_: self.end("optimizer")).remove)

    def backward(self) -> None:
        """Watch every backward pass of this thread as `backward`."""
        self.function(torch.autograd, "backward", "backward")

    def data_loaders(self) -> None:
        """Watch fetching from every torch DataLoader as `data-loading`."""

        def fetching(loader: Any) -> AbstractContextManager:
            self.fetches(loader)
            return self.phase("data-loading")

        self.run_inside(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", fetching)

    def checkpoints(self) -> None:
        """Watch torch's functions that save as `checkpoint`."""
        for module, name in _SAVES:
            if hasattr(sys.modules.get(module), name):
                self.function(sys.modules[module], name, "checkpoint")

    def function(self, owner: Any, name: str, phase: str) -> None:
        """Watch calls of `owner.name` as `phase`; `owner` is a module, a class or an object."""
        self.run_inside(owner, name, lambda *_, **__: self.phase(phase))

    def run_inside(
        self, owner: Any, name: str, context_of: Callable[..., AbstractContextManager], *, optional: bool = False
    ) -> None:
        """Run calls of `owner.name` in the context that `context_of` returns for their arguments.

        Without such a name it raises AttributeError; `optional` is for names that not every release has.
        """
        if optional and not hasattr(owner, name):
            return
        original = getattr(owner, name)

        @functools.wraps(original)
        def inside(*arguments: Any, **keywords: Any) -> Any:
            with context_of(*arguments, **keywords):
                return original(*arguments, **keywords)

        self.replace(owner, name, inside)

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace `owner.name` until `detach`, which restores it unless other code has replaced it since."""
        original, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, replacement)

        def undo() -> None:
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original) if own else delattr(owner, name)

        self.undo.callback(undo)

    # -- begin and end -----------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Begin a phase. Does nothing while torch.compile traces, so graphs contain nothing of it."""
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if name in self._depth:
            self._depth[name] += 1
            return
        one = self._range_of(name)
        if type(one) is not nullcontext:
            one.__enter__()
            self._open.append((name, one))
            self._depth[name] = 1

    def end(self, name: str) -> None:
        """End a phase, and any phase left open inside it."""
        if torch.compiler.is_compiling() or name not in self._depth or threading.get_ident() != self._thread:
            return
        self._depth[name] -= 1
        if not self._depth[name]:
            while self._close_last() != name:
                pass

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context manager around a phase."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def end_open(self) -> None:
        """End all phases, at the end of an iteration: an exception in an optimizer's step leaves its phase open."""
        while self._open:
            self._close_last()

    def detach(self) -> None:
        """Stop watching, and restore torch."""
        self.end_open()
        # A function that other code has wrapped since cannot be restored; it opens no ranges from now on.
        self._range_of = nullcontext
        self.undo.close()

    def _close_last(self) -> str:
        name, one = self._open.pop()
        del self._depth[name]
        one.__exit__(None, None, None)
        return name


def watch_phases(
    range_of: RangeOf, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> PhaseWatch:
    """Watch every phase that can be found.

    Args:
        range_of: returns the range for a name.
        model: calls of it are `forward`; None watches no `forward`.
        optimizer: steps of it are `optimizer`; None watches every optimizer.

    Returns:
        The watch: call its `end_open` at the end of each iteration, and its `detach` at the end of the training.
    """
    watch = PhaseWatch(range_of)
    watch.everything(model, optimizer)
    return watch


class _ModelHook:
    """A module's hook that copies and pickles of the module leave behind (`torch.save(model)`, a moving average)."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def __call__(self, *_: object) -> None:
        self._report("forward")

    def __reduce__(self) -> tuple[Any, ...]:
        # The replacement accepts any arguments, returns None, and loads without this package.
        return getattr, (nullcontext(), "__exit__")


class ForwardCalls:
    """Makes calls of a model `forward`, including its own hooks.

    Not as a hook of the model, which `model.compile()` would compile, and which `torch.save` and `pickle` of the whole model
    and its copies would contain. Keeps the model no longer alive than the training does.
    """

    def __init__(self, model: torch.nn.Module, phases: PhaseWatch) -> None:
        self._model = weakref.ref(model)
        self._phases = phases
        self._compiled = vars(model).get(_CALL)
        vars(model)[_CALL] = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the model."""
        model = self._model()
        assert model is not None
        call = self._compiled or model._call_impl
        if torch.compiler.is_compiling():
            return call(*arguments, **keywords)
        with self._phases.phase("forward"):
            return call(*arguments, **keywords)

    def running(self) -> None:
        """Make the call of the model that runs now a `forward` too."""
        model = self._model()
        assert model is not None

        def ended(*_: object) -> None:
            handle.remove()
            self._phases.end("forward")

        handle = model.register_forward_hook(ended)
        self._phases.begin("forward")

    def remove(self) -> None:
        """Restore the model, unless other code has replaced its call since."""
        model = self._model()
        if model is not None and vars(model).get(_CALL) is self:
            vars(model).pop(_CALL)
            if self._compiled is not None:
                vars(model)[_CALL] = self._compiled

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Classes of modules that pickle all attributes store None: no replacement of the call.
        return type(None), ()
