"""Sees to it that being told to stop does not lose what stopping is to save.

Signals are held back while a capture is written, and one that would kill the process can be made to unwind it instead.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_HELD = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def signals_held() -> Iterator[None]:
    """Deliver SIGTERM and SIGINT after the block, to the handlers they have now.

    A handler that raises (Ctrl-C's own, or one that unwinds on SIGTERM) would otherwise raise in the middle of writing.
    A signal without a Python handler ends the process at once, as before, and only the main thread handles signals.
    """
    handlers = {number: signal.getsignal(number) for number in _HELD}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    arrived: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if number not in arrived:
            arrived.append(number)

    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in held:
        signal.signal(number, remember)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for caught in arrived:
            signal.raise_signal(caught)


class UnwindOnce:
    """A handler that raises SystemExit when its signal comes, so that `with` blocks unwind and write what they hold.

    Only the first time: a rank often gets a signal twice, from Slurm or `timeout` and from its launcher, and a second
    SystemExit, or death, would end the writing.
    """

    def __init__(self) -> None:
        self._came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal has come."""
        if not self._came:
            self._came = True
            raise SystemExit(128 + number)


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
    if handler is not None and threading.current_thread() is threading.main_thread() and signal.getsignal(number) is handler:
        signal.signal(number, signal.SIG_DFL)
