"""Sees to it that being told to stop does not lose what stopping is to save.

Signals are held back while a capture begins or is written, and one that would kill the process can be made to unwind it
instead. What a handler raises is the training's, wherever it is raised.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

#: What launchers, schedulers, terminals and time limits send; and SIGCHLD, where PyTorch's data loaders hear of a dead worker.
_HELD = (
    signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


@contextmanager
def signals_held() -> Iterator[None]:
    """Deliver after the block what arrives in it, to the handlers that these signals have now.

    A handler that raises (Ctrl-C's own, one that unwinds on SIGTERM, a data loader's that has lost a worker) would otherwise
    raise in the middle of writing.
    A signal without a Python handler ends the process at once, as before, and only the main thread handles signals.
    """
    held = _handlers() if threading.current_thread() is threading.main_thread() else {}
    arrived: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if number not in arrived:
            arrived.append(number)

    for number in held:
        signal.signal(number, remember)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for caught in arrived:
            signal.raise_signal(caught)


def raised_by_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised it, in the middle of whatever ran: it was not that which failed."""
    codes = {_code(handler) for handler in _handlers().values()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _handlers() -> dict[signal.Signals, Callable[[int, FrameType | None], Any]]:
    """The Python functions that handle signals now."""
    return {number: handler for number in _HELD if callable(handler := signal.getsignal(number))}


def _code(handler: object) -> CodeType | None:
    if not isinstance(handler, FunctionType | MethodType):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004 -- the function itself is wanted
    return getattr(handler, "__code__", None)


#: Exit codes that handlers of this process have raised, of those that are still installed.
told_to_exit: list[int] = []


class UnwindOnce:
    """A handler that raises SystemExit when its signal comes, so that `with` blocks unwind and write what they hold.

    Only the first time: a rank often gets a signal twice, from Slurm or `timeout` and from its launcher, and a second
    SystemExit, or death, would end the writing.
    """

    def __init__(self) -> None:
        self._code: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal has come."""
        if self._code is None:
            self._code = 128 + number
            told_to_exit.append(self._code)
            raise SystemExit(self._code)

    def removed(self) -> None:
        """The handler is installed no more: what it raised is of the past."""
        if self._code in told_to_exit:
            told_to_exit.remove(self._code)


def exit_after_all() -> None:
    """Raise again what a handler has raised, where the training goes on nevertheless.

    A handler raises wherever the main thread happens to be. In a destructor, or in the callback of a weak reference, Python
    drops what is raised, and nobody hears of it. `torch._dynamo` has such callbacks in the steps of a training with fused
    kernels: of 5,800 signals to one on an H200, one was dropped there.
    """
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(told_to_exit[-1])


def exit_on(number: signal.Signals) -> UnwindOnce | None:
    """Let a signal that would kill this process, and its capture with it, unwind it instead.

    Whoever handles the signal already goes on doing so. Only the main thread can change that.

    Returns:
        The handler, where it was installed; for `die_of`.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is not signal.SIG_DFL:
        return None
    handler = UnwindOnce()
    signal.signal(number, handler)
    return handler


def die_of(number: signal.Signals, handler: UnwindOnce | None) -> None:
    """Undo `exit_on`, unless somebody else has come to handle the signal since."""
    if handler is None:
        return
    handler.removed()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is handler:
        signal.signal(number, signal.SIG_DFL)
