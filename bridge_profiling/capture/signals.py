"""Signals: held back while a capture starts or is written, and turned into an exit that unwinds the training.

An exception that a handler raises belongs to the training, wherever it is raised.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from traceback import walk_tb
from typing import Any
from weakref import WeakSet

from bridge_profiling.common.errors import passed_a_handler

#: The signals that launchers, schedulers, terminals and time limits send, and SIGCHLD: PyTorch's data loaders handle it to
#: notice a dead worker.
_HELD = (
    signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


@contextmanager
def signals_held() -> Iterator[None]:
    """Deliver signals that arrive in the block after it, to the handlers that are installed now.

    A handler that raises (Ctrl-C's own, one that unwinds on SIGTERM, a data loader's that lost a worker) would otherwise
    raise in the middle of writing. A signal without a Python handler ends the process at once, as before. Only the main
    thread handles signals; in another one this does nothing.

    As in the kernel, a signal that arrives again before it is delivered is delivered once.
    """
    held = _handlers() if threading.current_thread() is threading.main_thread() else {}
    arrived: list[int] = []
    process = os.getpid()

    def remember(number: int, frame: object) -> None:
        if os.getpid() != process:
            # Another thread has forked this process, in which nothing delivers later.
            signal.signal(number, held[signal.Signals(number)])
            signal.raise_signal(number)
        elif number not in arrived:
            arrived.append(number)

    try:
        for number in held:
            signal.signal(number, remember)
        yield
    finally:
        _deliver(held, remember, arrived)


def _deliver(held: dict[signal.Signals, Any], remember: Callable[..., None], arrived: list[int]) -> None:
    """Restore the handlers, deliver every signal that has arrived, in order, and only then raise what a handler raised.

    Of several exceptions the last is raised, as Python does when a signal arrives while an exception unwinds; but an exit or
    Ctrl-C is not replaced by an error, which the training may catch and go on.
    """
    raised: BaseException | None = None
    left, done = iter(arrived), False
    while not done:
        try:
            # Each line here may run a handler that raises: that of a signal that arrives now, too. Then this goes on after it.
            for number, handler in held.items():
                if signal.getsignal(number) == remember:
                    signal.signal(number, handler)
            for caught in left:
                signal.raise_signal(caught)
            done = True
        except BaseException as error:
            if raised is None or isinstance(raised, Exception) or not isinstance(error, Exception):
                raised = error
    if raised is not None:
        raise raised


def raised_by_handler(error: BaseException) -> bool:
    """Whether a signal handler raised `error`: the code that it interrupted did not fail."""
    # The code of a function or method, or of an object's `__call__`. `_deliver` itself raises nothing.
    codes = [getattr(one, "__code__", None) for handler in _handlers().values() for one in (handler, handler.__call__)]
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return passed_a_handler(error) or any(frame.f_code in (*codes, _deliver.__code__) for frame in frames)


def _handlers() -> dict[signal.Signals, Any]:
    """The Python functions that handle signals now."""
    return {number: handler for number in _HELD if callable(handler := signal.getsignal(number))}


class unwind_on:
    """Raises SystemExit(128 + number) in the main thread when a signal arrives, so that `with` blocks write what they hold.

    Only the first one raises. A rank often receives a signal twice, from Slurm or `timeout` and from its launcher, and a
    second exit would end the writing. A child process that the training forks dies of the signal as it would without us.

    Entering does nothing outside the main thread, where Python can install no handler. Leaving restores the previous
    disposition, unless other code has replaced the handler since. Entering and leaving twice is harmless.

    Args:
        number: the signal.
        replace: replace a handler that is installed already, too. By default only the default action is replaced.
        reraise: deliver the signal again on leaving, so that the process ends as it would without us, only later.

    Attributes:
        received: whether the signal has arrived.
    """

    def __init__(self, number: int, *, replace: bool = False, reraise: bool = False) -> None:
        self.number, self.received = signal.Signals(number), False
        self._replace, self._reraise = replace, reraise
        self._previous: Any = None
        self._process = os.getpid()

    def __enter__(self) -> unwind_on:
        if self._previous is None and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(self.number)
            if handler is signal.SIG_DFL or (self._replace and handler is not None):
                self._previous, self._process = handler, os.getpid()
                signal.signal(self.number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(self.number) == self._handle:
                signal.signal(self.number, self._previous)
            # Not before: a signal that arrives meanwhile interrupts here, and leaving again must restore the disposition.
            self._previous = None
            if self.received and self._reraise and os.getpid() == self._process:
                signal.raise_signal(self.number)
        if self in _pending:
            _pending.remove(self)

    def _handle(self, number: int, frame: object) -> None:
        if os.getpid() != self._process:
            signal.signal(number, self._previous or signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.received:
            self.received = True
            _pending.append(self)
            for inbox in woken_on_exit:
                inbox.wake()
            raise SystemExit(128 + number)


#: Handlers that have raised an exit and are still installed.
_pending: list[unwind_on] = []

#: Inboxes whose `wake` is called when a handler raises an exit: the loop's next iteration calls `raise_pending_exit`.
woken_on_exit: WeakSet[Any] = WeakSet()


def exit_is_pending() -> bool:
    """Whether a handler has raised an exit and the process has not ended yet."""
    return bool(_pending)


def raise_pending_exit() -> None:
    """Raise an exit again that was lost, in the main thread.

    A handler raises wherever the main thread happens to be. In a destructor, or in the callback of a weak reference, Python
    drops the exception. `torch._dynamo` has such callbacks in the steps of a training with fused kernels: of 5,800 signals to
    one on an H200, one was dropped there.
    """
    if _pending and threading.current_thread() is threading.main_thread():
        raise SystemExit(128 + _pending[-1].number)


class SignalWatch:
    """Calls `arrived` in a thread of its own when a signal arrives that would end the process, which then dies of it.

    For a loop in another thread than the main one: Python installs handlers from the main thread only, and runs them there.
    faulthandler's is written in C, can be installed from any thread, and writes to a pipe here.

    Entering does nothing in the main thread, or where the signal has a handler. Entering and leaving twice is harmless.
    """

    def __init__(self, number: int, arrived: Callable[[], None]) -> None:
        self.number, self._arrived = signal.Signals(number), arrived
        self._received = False
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> SignalWatch:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main or self._pipe is not None or signal.getsignal(self.number) is not signal.SIG_DFL or _is_caught(self.number):
            return self
        # Without a descriptor, or at the limit of threads, the signal ends the process at once, as without us.
        with suppress(OSError, RuntimeError):
            reading, writing = os.pipe()
            try:
                os.set_blocking(writing, False)
                threading.Thread(target=self._watch, args=(reading,), name="bridge_profiling signals", daemon=True).start()
                faulthandler.register(self.number, file=writing, all_threads=False)
                self._pipe = reading, writing
                _watches.add(self)
            finally:
                if self._pipe is None:
                    os.close(writing)
        return self

    def __exit__(self, *_: object) -> None:
        # Taken first: another thread may close the hook, too.
        pipe = None if self._received else self._pipe
        if pipe is not None:
            self._pipe = None
            self.forget()
            os.close(pipe[1])

    def forget(self) -> None:
        """Restore the signal's disposition, unless other code has replaced it since."""
        _watches.discard(self)
        if signal.getsignal(self.number) is signal.SIG_DFL:
            faulthandler.unregister(self.number)

    def forked(self) -> None:
        """Leave the signal and the pipe to the parent, in a child process: its thread reads until nobody can write."""
        self.forget()
        self._received = False
        if self._pipe is not None:
            os.close(self._pipe[1])
            self._pipe = None

    def _watch(self, reading: int) -> None:
        try:
            received = bool(os.read(reading, 1))
        finally:
            os.close(reading)
        # The thread of an earlier pipe may notice its end only now, and must not take back what another one has received.
        if received:
            self._received = True
            try:
                self._arrived()
            finally:
                self.deliver()

    def deliver(self) -> None:
        """End the process by the signal, if it has arrived."""
        if self._received:
            self.forget()
            os.kill(os.getpid(), self.number)


def _is_caught(number: int) -> bool:
    """Whether code that is not written in Python handles a signal."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        caught = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


#: Those that have installed a handler. A forked child, such as a data loader's worker, has no thread that reads the pipe, and a
#: signal to it must not reach the parent's: it is blocked in the child until the handler is gone.
_watches: set[SignalWatch] = set()

#: The signals that were blocked before the fork of a thread.
_blocked = threading.local()


def _before_fork() -> None:
    numbers = [watch.number for watch in [*_watches]]
    _blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None


def _after_fork() -> None:
    before, _blocked.before = getattr(_blocked, "before", None), None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork_in_child() -> None:
    for watch in [*_watches]:
        watch.forked()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
