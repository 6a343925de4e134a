"""The recording that torch makes for a window, next to profilers and threads of the training's own.

torch has one Kineto per process, and one profiler state per thread. A recording crashes the process if it ends in another
thread than it began in, or is exported after another profiler has replaced it. So it is given up instead, with a reason, and
what is left of it in its thread is removed when that thread comes back.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from bridge_profiling.common.errors import CaptureError

#: The reason when the training profiles itself, or when two of our hooks capture the same iterations.
_OVERTAKEN = "another profiler was started in this process, and torch allows one at a time; capture iterations without it"

_ALREADY = "another profiler is already recording in this process, and torch allows one at a time"

#: torch's functions that begin and end a profiler, by the modules that hold them under their own names.
_MODULES = ("torch.autograd", "torch.autograd.profiler", "torch.autograd.profiler_legacy")
_PREPARES, _DISABLES = "_prepare_profiler", "_disable_profiler"
_PROFILERS = _MODULES, (_PREPARES, "_enable_profiler", "_enable_profiler_legacy", _DISABLES)

#: torch's functions that register an ExecutionTraceObserver, and that switch a memory history, and the modules that hold them.
OBSERVERS = ("torch.profiler.profiler", "torch._C._profiler"), ("_add_execution_trace_observer",)
MEMORY_HISTORY = ("torch._C",), ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")

#: Our recordings. A forked child process inherits them, and ends them before another one begins.
_recordings: WeakSet[TorchRecording] = WeakSet()

#: The profilers of our recordings: what is left of one that was lost keeps no later window from recording.
_own_profilers: WeakSet[Any] = WeakSet()


class TorchRecording:
    """One recording: `prepare`, `start` and `stop` in one thread. Its state is `idle`, `armed`, `recording` or `lost`.

    Args:
        profile: the `torch.profiler._KinetoProfile` that records.
    """

    def __init__(self, profile: Any) -> None:
        self._profile = profile
        self.state, self._reason = "idle", _OVERTAKEN
        # The object, not its number: that of a thread that has ended goes to the next one.
        self._thread = threading.current_thread()
        #: Threads whose own profilers have replaced this recording in Kineto, and have not ended.
        self._others: set[threading.Thread] = set()
        #: The thread in which this recording itself calls torch.
        self._calling: threading.Thread | None = None
        self._unwatch: Callable[[], None] = lambda: None
        self._process = os.getpid()
        #: Our ranges that may be open, the outermost first. The loop has left those that are garbage-collected.
        self._ranges: WeakKeyDictionary[Any, None] = WeakKeyDictionary()

    def prepare(self) -> None:
        """Set up Kineto; CaptureError if another profiler records, in any thread."""
        import torch

        _prepare_for_forks()
        for one in _recordings:
            if one._process != self._process:
                one._begins(_PREPARES)
        if torch.autograd._profiler_enabled() or _records_elsewhere():
            raise CaptureError(_ALREADY)
        _recordings.add(self)
        self._unwatch = watch_calls(_PROFILERS, self._begins, self._ended)
        with self._own_call():
            self._profile.prepare_trace()
        _own_profilers.add(self._profile.profiler)
        self.state = "armed"

    def start(self) -> None:
        """Start recording; CaptureError in another thread than `prepare`."""
        self._check_thread("started")
        if self.state != "armed":
            raise CaptureError(self._reason)
        self.state = "recording"
        with self._own_call():
            self._profile.start_trace()

    def range(self, name: str) -> Any:
        """A range in the recording; None if it is lost, since another profiler's trace must not hold our ranges."""
        from torch.profiler import record_function

        if self.state != "recording":
            return None
        annotation = record_function(name)
        self._ranges[annotation] = None
        return annotation

    def stop(self) -> None:
        """Stop recording; CaptureError if there is nothing to export."""
        import torch

        self._check_thread("ended")
        if self.state != "recording":
            raise CaptureError(self._reason)
        if not torch.autograd._profiler_enabled():
            self.state = "idle"
            raise CaptureError("other code of this process has ended the recording")
        self.state = "idle"
        self._end()
        results = self._profile.profiler.kineto_results
        if results is None or not results.trace_start_ns():
            raise CaptureError("torch returned an empty recording: other code of this process has ended it")

    def close(self) -> None:
        """Leave nothing in Kineto, not even an armed recording: the interpreter crashes when it exits with one."""
        own = threading.current_thread() is self._thread
        if self.state == "armed" and own:
            with self._own_call():
                self._profile.start_trace()
        if self.state in ("armed", "recording"):
            if own:
                self._end()
            else:
                self._replace()
        self.state = "lost" if self.state == "lost" or (self.state == "recording" and not own) else "idle"
        self.clean_up()

    @property
    def is_unsettled(self) -> bool:
        """Whether something is left in its thread, which that thread has to remove."""
        return self.state == "lost"

    def clean_up(self) -> None:
        """Remove what is left, if this is its thread and no other profiler's recording would end with it."""
        import torch

        if self.state == "lost" and self._thread.is_alive():
            if threading.current_thread() is not self._thread or any(one.is_alive() for one in self._others):
                return
            if torch.autograd._profiler_enabled():
                self._end()
        self.state = "idle"
        self._unwatch()

    def give_up(self, reason: str) -> bool:
        """End a recording for something of the training's own; False in another thread than its own, where it goes on."""
        if self.state != "recording":
            return True
        if threading.current_thread() is not self._thread:
            return False
        self.state, self._reason = "idle", reason
        with suppress(Exception):
            self._end()
        return True

    @property
    def traces_calls(self) -> bool:
        """Whether it records Python's calls, with a profile function of this thread."""
        return bool(self._profile.with_stack)

    # -- private -------------------------------------------------------------------------------------------------------

    def _check_thread(self, action: str) -> None:
        thread = threading.current_thread()
        if thread is not self._thread:
            raise CaptureError(
                f"torch records one thread: the window was opened in {self._thread.name} and {action} in {thread.name};"
                " call the hook from one thread"
            )

    def _end(self) -> None:
        """End our open ranges, and stop.

        While any profiler records, torch writes a range's end to the place where its beginning was recorded. That memory is
        freed with the recording in which the range began, so the write crashes the process sooner or later (torch 2.13).
        """
        import torch

        # A copy of the list: another thread may enter a range meanwhile.
        for reference in reversed(self._ranges.keyrefs()):
            annotation = reference()
            if annotation is None:
                continue
            if annotation.record is not None:
                annotation.__exit__(None, None, None)
            # Leaving it again later does nothing.
            annotation.run_callbacks_on_exit = False
        try:
            with self._own_call():
                self._profile.stop_trace()
        finally:
            # A second stop crashes the process, and so does an exit without any.
            if torch.autograd._profiler_enabled():
                with suppress(Exception), self._own_call():
                    torch.autograd._disable_profiler()

    def _replace(self) -> None:
        """End a recording in Kineto from a thread that cannot stop it, with a short one of its own."""
        import torch

        if self._others or torch.autograd._profiler_enabled():
            return
        short = torch.profiler._KinetoProfile(activities=[torch.profiler.ProfilerActivity.CPU])
        with self._own_call():
            short.prepare_trace()
            short.start_trace()
            short.stop_trace()

    @contextmanager
    def _own_call(self) -> Iterator[None]:
        self._calling = threading.current_thread()
        try:
            yield
        finally:
            self._calling = None

    def _begins(self, function: str) -> None:
        """Another profiler begins: in our thread, end ours, since ending both crashes; in another one, Kineto drops ours."""
        thread = threading.current_thread()
        if thread is self._calling or self.state == "idle" or function == _DISABLES:
            return
        if thread is not self._thread:
            if function == _PREPARES:
                self._others.add(thread)
                self.state = "idle" if self.state == "armed" else "lost"
        elif self.state == "armed":
            self.state = "idle"
        else:
            # Whatever goes wrong there, the training's own call goes on.
            self.give_up(_OVERTAKEN)

    def _ended(self, function: str) -> None:
        if function == _DISABLES and threading.current_thread() is not self._calling:
            self._others.discard(threading.current_thread())


@cache
def _prepare_for_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """Record nothing in a child process that the training has forked, and let it end.

    Kineto has one recording thread for the rest of the process once it was used. A child has no such thread, and would wait for
    it in the destructor of Kineto's static objects when it ends with `exit`. So it leaves `exit` before the destructors of what
    its parent had loaded, after Python's own end and with its streams flushed, as a child of multiprocessing does.
    """
    import torch

    if any(one.state in ("armed", "recording") for one in _recordings):
        with suppress(Exception):
            torch._C._autograd._clear_callbacks()  # type: ignore[attr-defined,unused-ignore]
        if any(one.traces_calls for one in _recordings):
            sys.setprofile(None)
    with suppress(Exception):  # other C libraries than glibc lack `on_exit`
        libc = ctypes.CDLL(None)
        # Called in reverse: fflush(NULL), then _exit(status, NULL).
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)


def _records_elsewhere() -> bool:
    """Whether a profiler of the training's own records in any thread: starting ours would end it in Kineto."""
    import torch

    # torch's own flag is per thread, and leaves out an armed one. Objects refer to their class, and the collector finds them in
    # 50 ms among 300,000 objects.
    profilers = torch.autograd.profiler.profile
    return any(
        isinstance(one, profilers) and one.entered and one.kineto_results is None and one not in _own_profilers
        for one in gc.get_referrers(profilers)
    )


def watch_calls(
    functions: tuple[Iterable[str], Iterable[str]],
    before: Callable[[str], object],
    after: Callable[[str], object] = lambda function: None,
) -> Callable[[], None]:
    """Call `before` and `after` around torch's functions of these modules and names, with the name; returns what undoes it."""
    modules, names = functions
    replaced: list[tuple[Any, str, Any, Any]] = []
    for module in filter(None, map(sys.modules.get, modules)):
        for name in names:
            original = getattr(module, name, None)
            if original is not None:
                watched = _watched(original, name, before, after)
                setattr(module, name, watched)
                replaced.append((module, name, watched, original))

    def unwatch() -> None:
        # Other code may have replaced them since; ours then only pass calls on.
        for module, name, watched, original in replaced:
            if getattr(module, name, None) is watched:
                setattr(module, name, original)
        replaced.clear()

    return unwatch


def _watched(original: Any, name: str, before: Callable[[str], object], after: Callable[[str], object]) -> Any:
    @wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        before(name)
        try:
            return original(*arguments, **keywords)
        finally:
            after(name)

    return call


def observer_is_registered() -> bool:
    """Whether the training has an ExecutionTraceObserver of its own: torch has one per process, and a second crashes it."""
    import torch

    # torch answers only to the object itself; objects refer to their class.
    observers = torch.profiler.ExecutionTraceObserver
    return any(isinstance(one, observers) and one._registered for one in gc.get_referrers(observers))
