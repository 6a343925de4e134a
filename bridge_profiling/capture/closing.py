"""The end of a hook: it is closed once, by whichever comes first of the loop's end, a signal and the interpreter's exit."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable

from bridge_profiling.capture.loop import Inbox
from bridge_profiling.capture.signals import SignalWatch, signals_held, unwind_on
from bridge_profiling.common.errors import one_line
from bridge_profiling.common.plain import shown

#: How long another thread waits for the end of an iteration, so that the loop's thread writes the capture: launchers end a
#: process 30 s after its SIGTERM.
_ITERATION_SECONDS = 20.0


class Closing:
    """Closes a hook.

    Only the loop's thread can end torch's recording. Another thread asks it to close the hook, and waits.

    Args:
        inbox: the loop's.
        needs_loop: whether a recording is open.
        finish: writes everything, with signals held; its argument is why.
        owns_process: see `ProfilingHook`.

    Attributes:
        is_open: whether the hook has yet to be closed.
    """

    def __init__(
        self,
        inbox: Inbox,
        needs_loop: Callable[[], bool],
        finish: Callable[[str], None],
        *,
        owns_process: bool,
    ) -> None:
        self._inbox, self._needs_loop, self._finish = inbox, needs_loop, finish
        self._sigterm = unwind_on(signal.SIGTERM, reraise=not owns_process)
        self._watch = SignalWatch(signal.SIGTERM, lambda: self._ask("the process received SIGTERM"))
        self._loop = threading.current_thread()
        self._begun, self._done = threading.Event(), threading.Event()
        self.is_open = False

    def open(self) -> None:
        """Begin: from here on an interpreter that exits closes the hook. It crashes when it exits with a live Kineto trace."""
        atexit.register(self._at_exit)
        self._loop, self._inbox.closing = threading.current_thread(), ""
        self._begun.clear()
        self._done.clear()
        self.is_open = True

    def handle_sigterm(self) -> None:
        """Have SIGTERM close the hook; called by the loop's thread before a profiler starts."""
        self._sigterm.__enter__()
        self._watch.__enter__()
        self._loop = threading.current_thread()

    def restore_sigterm(self) -> None:
        """Restore SIGTERM's disposition while nothing records, unless it has arrived; `close` restores it in any case."""
        if self.is_open and not self._sigterm.received:
            self._sigterm.__exit__()
            self._watch.__exit__()

    def close_if_asked(self) -> None:
        """Close the hook in the loop's thread if another one has asked."""
        if self._inbox.closing and self.is_open and threading.current_thread() is self._loop:
            self.close(self._inbox.closing)

    def close(self, ended_by: str | BaseException | None) -> None:
        """Close the hook, unless it is closed; `ended_by` is why, or the exception that leaves the hook."""
        self._begun.set()
        try:
            self._finish_once(ended_by)
        except BaseException:
            # An exit that a signal raised before `_finish_once` could hold signals back. Otherwise there is nothing left to do.
            self._finish_once(ended_by)
            raise
        finally:
            self._sigterm.__exit__()
            self._watch.__exit__()
            self._done.set()
            # Not before: a process that exits meanwhile waits in there.
            atexit.unregister(self._at_exit)
            self._watch.deliver()

    def _finish_once(self, ended_by: str | BaseException | None) -> None:
        # All of it: a handler that raises anywhere in here, for example as the listener stops, would cost the capture.
        with signals_held():
            if self.is_open:
                self.is_open, self._inbox.closing = False, ""
                self._finish(ended_by if isinstance(ended_by, str) else _ending(ended_by))

    def _ask(self, why: str) -> None:
        """Have the loop's thread close the hook after its iteration, and wait for it."""
        self._inbox.closing = why
        self._inbox.wake()
        if self._begun.wait(_ITERATION_SECONDS):
            self._done.wait()

    def _at_exit(self) -> None:
        why = "the process exited without leaving the hook"
        # Not `is_alive`: in Python 3.12 it is False once a signal has interrupted a `join`.
        runs = self._loop.ident in sys._current_frames()
        if runs and self._loop is not threading.current_thread():
            if self._begun.is_set():
                self._done.wait()  # the loop's thread closes it
            elif self._needs_loop():
                self._ask(why)
        self.close(why)

    def forked(self) -> None:
        """Leave everything to the parent, in a child process that the training has forked."""
        atexit.unregister(self._at_exit)
        self.is_open = False
        self._sigterm.__exit__()


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "training ended"
    if isinstance(error, SystemExit):
        return f"the process exited (code {shown(error.code)})"
    if isinstance(error, KeyboardInterrupt):
        return "training was interrupted from the keyboard"
    return f"training raised {one_line(error)}"
