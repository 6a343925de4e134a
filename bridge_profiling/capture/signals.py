"""Holds signals back while a capture is written, so that being told to stop does not lose what stopping is to save."""

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
