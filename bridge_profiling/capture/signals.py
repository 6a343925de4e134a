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


def exit_on(number: signal.Signals) -> bool:
    """Let a signal that would kill this process, and its capture with it, raise SystemExit; a second one kills it still.

    Whoever handles the signal already goes on doing so. Only the main thread can change that.

    Returns:
        Whether it unwinds the process from now on.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is not signal.SIG_DFL:
        return False
    signal.signal(number, _exit)
    return True


def die_of(number: signal.Signals) -> None:
    """Undo `exit_on`, unless somebody else has come to handle the signal since."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is _exit:
        signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)
