"""Ranges around the phases of a training step that nobody wrote ranges into, by hooks in torch: forward, backward, optimizer, …

Changes no number a training computes and raises nothing into it. What a phase is here:

- `forward`: a call of the watched model, from before its first hook to after its last.
- `backward`: a call of `torch.autograd.backward`, which `loss.backward()` is. It returns when the gradients are launched, so
  collectives that overlap it are inside. `torch.autograd.grad` is not watched: it serves more than training.
- `optimizer`: `optimizer.step()`, with the collectives an optimizer does itself.
- `data-loading`: waiting for the next batch of a torch DataLoader, or of what `timed_batches` is given.
- `checkpoint`: `torch.save`, and `torch.distributed.checkpoint`'s `save` and `async_save`.

A copy to the device is one call of some tensor's `to` among many, which no hook can tell from the others: a range must name it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

Batch = TypeVar("Batch")

#: Functions that write a checkpoint: module, name. A module that is not imported when a watch begins is not watched.
_SAVES = (("torch", "save"), ("torch.distributed.checkpoint", "save"), ("torch.distributed.checkpoint", "async_save"))


class _ModelHook:
    """A module's hook, which stays behind when the module is copied or saved whole (`torch.save(model)`, a moving average)."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def __call__(self, *_: object) -> None:
        self._tell("forward")

    def __reduce__(self) -> tuple[Any, ...]:
        # In its place goes what takes any arguments, gives None, and needs nothing of ours where the file is loaded.
        return getattr, (nullcontext(), "__exit__")


class PhaseWatch:
    """Opens a range when a phase begins and closes it when it ends, on the thread that made the watch.

    A phase inside one of the same name (a backward inside a backward, as activation checkpointing does it) is part of that one.

    Args:
        range_of: gives the range of a name, or a nullcontext where there is none to open; `ProfilingHook.range` does.
    """

    def __init__(self, range_of: Callable[[str], AbstractContextManager]) -> None:
        self._range_of = range_of
        self._thread = threading.get_ident()
        self._open: list[tuple[str, AbstractContextManager]] = []
        self._depth: dict[str, int] = {}
        self._undo: list[Callable[[], None]] = []

    # -- what to watch -----------------------------------------------------------------------------------------------

    def everything(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Every phase that can be found: `forward` only with a model, `optimizer` of every optimizer when none is given."""
        if model is not None:
            self.model(model)
        self.optimizer(optimizer)
        self.backward()
        self.data_loaders()
        self.checkpoints()

    def model(self, model: torch.nn.Module) -> None:
        """`forward`: calls of this module, hooks included; wrap it first (DDP, FSDP, torch.compile)."""
        if getattr(model, "_compiled_call_impl", None) is not None:
            # Compiled in place by `model.compile()`: hooks on it would be compiled too, a call around it is not.
            self.function(model, "_compiled_call_impl", "forward")
            return
        before = model.register_forward_pre_hook(_ModelHook(self.begin), prepend=True)
        after = model.register_forward_hook(_ModelHook(self.end), always_call=True)
        self._undo += [before.remove, after.remove]

    def optimizer(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """`optimizer`: steps of this optimizer, or of every optimizer of the process."""
        from torch.optim import optimizer as optimizers

        before_of, after_of = optimizers.register_optimizer_step_pre_hook, optimizers.register_optimizer_step_post_hook
        if optimizer is not None:
            before_of, after_of = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._undo += [
            before_of(lambda *_: self.begin("optimizer")).remove,
            after_of(lambda *_: self.end("optimizer")).remove,
        ]

    def backward(self) -> None:
        """`backward`: every backward pass of this thread."""
        self.function(torch.autograd, "backward", "backward")

    def data_loaders(self) -> None:
        """`data-loading`: the next batch of every torch DataLoader."""
        self.function(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", "data-loading")

    def checkpoints(self) -> None:
        """`checkpoint`: torch's functions that save."""
        for module, name in _SAVES:
            if hasattr(sys.modules.get(module), name):
                self.function(sys.modules[module], name, "checkpoint")

    def function(self, owner: Any, name: str, phase: str) -> None:
        """Calls of `owner.name`, whether owner is a module, a class or an object, are `phase`."""
        original = getattr(owner, name)
        own = name in vars(owner)

        @functools.wraps(original)
        def ranged(*arguments: Any, **keywords: Any) -> Any:
            self.begin(phase)
            try:
                return original(*arguments, **keywords)
            finally:
                self.end(phase)

        def undo() -> None:
            if vars(owner).get(name) is ranged:
                setattr(owner, name, original) if own else delattr(owner, name)

        setattr(owner, name, ranged)
        self._undo.append(undo)

    # -- begin and end -----------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """A phase begins. Inside what torch.compile traces nothing happens, so that it leaves nothing in the graph."""
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
        """The phase has ended, and with it what was left open inside."""
        if torch.compiler.is_compiling() or name not in self._depth or threading.get_ident() != self._thread:
            return
        self._depth[name] -= 1
        if not self._depth[name]:
            while self._close_last() != name:
                pass

    def end_open(self) -> None:
        """The iteration is over: a phase that an exception left open (an optimizer's step) ends here."""
        while self._open:
            self._close_last()

    def detach(self) -> None:
        """Watch nothing any more, and leave torch as it was."""
        self.end_open()
        # What someone has wrapped again cannot be taken out; it opens no ranges any more.
        self._range_of = nullcontext
        while self._undo:
            self._undo.pop()()

    def _close_last(self) -> str:
        name, one = self._open.pop()
        del self._depth[name]
        one.__exit__(None, None, None)
        return name


def watch_phases(
    range_of: Callable[[str], AbstractContextManager],
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PhaseWatch:
    """Watch every phase that can be found.

    Args:
        range_of: gives the range of a name.
        model: its calls are `forward`; without it there is no such range.
        optimizer: its steps are `optimizer`; without it every optimizer's are.

    Returns:
        The watch: call its `end_open` when an iteration ends, and its `detach` when the training does.
    """
    watch = PhaseWatch(range_of)
    watch.everything(model, optimizer)
    return watch


def timed_batches(range_of: Callable[[str], AbstractContextManager], batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same batches, each fetched inside the range `data-loading`; for a source that is no torch DataLoader."""
    source = iter(batches)
    while True:
        with range_of("data-loading"):
            try:
                batch = next(source)
            except StopIteration:
                return
        yield batch
