"""Signals: those that end a command, and those passed on to a process that a command waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Signals that end a command: Ctrl-C, a batch system's, and a closed terminal's.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: After the first of them, others change nothing for so long: removing workers and files takes less.
_CLEAN_UP_S = 10.0


class Interrupted(KeyboardInterrupt):
    """A signal of `ENDING` arrived."""


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Raise `Interrupted` where a signal of `ENDING` arrives, so that blocks on the way out clean up; yields those received.

    Ignored signals stay ignored (nohup, a shell's background job).
    """
    received: list[int] = []
    raised_at = -_CLEAN_UP_S

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if frame is not None and frame.f_code is raise_again.__code__:
            # The timer is faster than a busy machine: what is raised there is dropped as well.
            received.extend({number} - {signal.SIGALRM})
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        if number != signal.SIGALRM:
            received.append(number)
            if time.monotonic() - raised_at < _CLEAN_UP_S:
                return
        if received:
            raised_at = time.monotonic()
            raise Interrupted

    def raise_again(lost: Any) -> None:
        # Python drops an exception that is raised in a finalizer or a callback, which also every import has.
        if isinstance(lost.exc_value, Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        elif not received:
            report_lost(lost)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in (*numbers, signal.SIGALRM)}
    report_lost, sys.unraisablehook = sys.unraisablehook, raise_again
    try:
        yield received
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            # A second Ctrl-C while the interpreter ends would only print a traceback.
            signal.signal(number, signal.SIG_IGN if received else handler)
        sys.unraisablehook = report_lost


def wait_for(
    start: Callable[[], subprocess.Popen[bytes]], forwarded: Mapping[int, int | None], *, kill_after_s: float | None = None
) -> tuple[int, int | None]:
    """Start a child process and wait for it; returns its exit code, as Popen has it, and the last signal received here.

    `forwarded` has the signal to send to the child for each signal received here; None sends nothing. `kill_after_s` is the
    time that the child has to end after the first that is sent; None does not limit it.
    """
    received, early = list[int](), list[int]()
    child: subprocess.Popen[bytes] | None = None
    timers = list[threading.Timer]()

    def forward(number: int, frame: object) -> None:
        received.append(number)
        if child is None:
            early.append(number)
        else:
            send(child, number)

    def send(child: subprocess.Popen[bytes], number: int) -> None:
        if (sent := forwarded[number]) is None:
            return
        child.send_signal(sent)
        if kill_after_s is not None and not timers:
            timers.append(threading.Timer(kill_after_s, child.kill))
            timers[0].start()

    # The child inherits ignored signals (nohup), and they stay ignored here.
    numbers = [number for number in forwarded if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        child = start()
        for number in early:
            send(child, number)
        code = child.wait()
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code, received[-1] if received else None
