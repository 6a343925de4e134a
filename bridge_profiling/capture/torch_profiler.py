"""The torch profiler: a Kineto trace that holds exactly the window.

The trace is driven by hand (prepare, start, stop) instead of by torch's schedule, which counts from the start of the process
and so shifts the window after a resume, and which starts one iteration early.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from bridge_profiling.capture.profiler import Profiler
from bridge_profiling.capture.torch_recording import OBSERVERS, TorchRecording, observer_is_registered, watch_calls
from bridge_profiling.common.atomic import make_directory, private_directory, write_atomically
from bridge_profiling.common.errors import CaptureError
from bridge_profiling.common.plain import plain
from bridge_profiling.manifest import Status

#: Enough of a trace's end to hold its name.
_TAIL_BYTES = 1 << 14

#: Bytes compressed at a time.
_PIECE_BYTES = 1 << 20

#: Kineto's traces shrink 13-fold at level 6 and 11-fold at level 1, which takes half the time (237 MB: 0.4 s, 0.84 s).
_GZIP_LEVEL = 1

#: A range of a trace: name, thread, start and end in ns since 1970.
_TimedRange = tuple[str, int, int, int]

#: Where the times of Kineto's events begin, in ns since 1970: in a line before the events.
_BASE_TIME = re.compile(rb'"baseTimeNanoseconds": (\d+)')

#: Why a capture has no Chakra trace.
_OTHER_OBSERVER = (
    "the training registered an ExecutionTraceObserver of its own, and torch allows one at a time: no Chakra trace;"
    " unregister it before the window, or set pytorch_profiler_collect_chakra=False"
)

#: CUDA calls to make, 10 ms apart, before a process may exit with a pending CUPTI teardown.
_TEARDOWN_CALLS = 20


class TorchProfiler(Profiler):
    """Records host and device activity with torch.profiler."""

    name = "torch"

    _recording: TorchRecording | None = None
    _observer: Any = None
    _unwatch_observers: Callable[[], None] = staticmethod(lambda: None)
    #: Why there is no Chakra trace although one was asked for.
    _no_chakra: str | None = None
    _profile: Any = None
    #: Holds what is still being written, from the warm-up on.
    _private: ExitStack | None = None
    #: Ranges of a trace without operators, for which Kineto records no annotations: name, thread, start and end in Unix ns.
    _timed: list[_TimedRange]

    def warm_up(self) -> None:
        """Set up Kineto and CUPTI."""
        import torch

        device_only = self.config.pytorch_profiler_device_only
        activities = [] if device_only else [torch.profiler.ProfilerActivity.CPU]
        # A process that has not used its GPU by now trains on the CPU.
        has_device = torch.cuda.is_available() and torch.cuda.is_initialized()
        if device_only and not has_device:
            raise CaptureError("pytorch_profiler_device_only records a CUDA device, and this process uses none")
        if has_device:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            # With CUPTI left attached, the rest of the run is 15-22% slower on an H200. A user's own setting wins, and torch
            # itself switches this off where CUDA graphs do not support it.
            if os.environ.setdefault("TEARDOWN_CUPTI", "1") == "0":
                self.notes.append(
                    "TEARDOWN_CUPTI=0, which CUDA graphs need: CUPTI stays attached, and the rest of this run may be slower"
                )
        make_directory(self.files.torch_trace.parent)
        with ExitStack() as private:
            self._folder = private.enter_context(private_directory(self.files.torch_trace.parent))
            self._plain = private.enter_context(_plain_path(self._folder))
            self._private = private.pop_all()
        if self.config.pytorch_profiler_collect_chakra and observer_is_registered():
            self._no_chakra = _OTHER_OBSERVER
        elif self.config.pytorch_profiler_collect_chakra:
            # The observer writes during the window, so the file gets its name at the end, like every other file.
            self._observer = torch.profiler.ExecutionTraceObserver()
            self._observer.register_callback(str(self._plain / self.files.chakra_trace.name))
            self._unwatch_observers = watch_calls(OBSERVERS, lambda function: self._give_way())
        # Not its subclass `profile`, which has an observer of its own where ENABLE_PYTORCH_EXECUTION_TRACE is set.
        self._profile = torch.profiler._KinetoProfile(
            activities=activities,
            record_shapes=self.config.wants_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
            profile_memory=self.config.pytorch_profiler_profile_memory,
            execution_trace_observer=self._observer,
        )
        self._recording, self._timed = TorchRecording(self._profile), []
        self._recording.prepare()

    def start(self) -> None:
        """Start recording."""
        assert self._recording is not None
        self._recording.start()
        self._profile.add_metadata_json("bridge_profiling", json.dumps(plain(self.metadata)))

    def iteration_range(self, iteration: int) -> AbstractContextManager | None:
        """`ProfilerStep#<global iteration>`: every reader of Kineto traces looks for this name."""
        return self.phase_range(f"ProfilerStep#{iteration}")

    def phase_range(self, name: str) -> AbstractContextManager | None:
        """A user annotation in the trace; None once the recording is lost."""
        if self._recording is None or self._recording.state != "recording":
            return None
        return _timed(name, self._timed) if self.config.pytorch_profiler_device_only else self._recording.range(name)

    def stop(self, interrupted: list[int]) -> Callable[[], None]:
        """Stop recording and export; return the compression.

        The export holds the interpreter's lock even in a thread, and compressing does not: a trace of 237 MB takes 1.8 s to
        export, and 0.4 s to compress while training goes on. torch's own `.json.gz` takes 16 s for both.
        """
        assert self._recording is not None
        assert self._private is not None
        self._recording.stop()
        target = self.files.torch_trace
        raw = self._folder / target.with_suffix("").name
        self._profile.export_chrome_trace(str(self._plain / raw.name))
        _check_whole(raw)
        if self._observer is not None and self._no_chakra is None:
            self._unregister()
            os.replace(self._folder / self.files.chakra_trace.name, self.files.chakra_trace)
            self.artifacts.append(self.files.chakra_trace)
        self.unpacked = raw
        # `close` leaves the directory alone until the trace is compressed.
        private = self._private.pop_all()

        def compress() -> None:
            with private:
                try:
                    write = partial(
                        _compress, raw, name=str(self._plain / raw.name), interrupted=interrupted, ranges=self._timed
                    )
                    write_atomically(target, write)
                    self.artifacts.insert(0, target)
                finally:
                    self.unpacked = None
                    _free(raw)

        return compress

    def release(self) -> None:
        """Free the recorded events, about ten bytes of memory for each byte of the uncompressed trace."""
        self._profile = None
        if not self.is_unsettled:
            self._recording = None

    def leave(self) -> None:
        """Let a pending CUPTI teardown finish.

        Kineto tears CUPTI down at the first CUDA call after one of its own threads is ready for it. A process that exits
        without such a call waits for that thread forever.
        """
        import torch

        if not torch.cuda.is_available() or os.environ.get("TEARDOWN_CUPTI") != "1":
            return
        for _ in range(_TEARDOWN_CALLS):
            torch.cuda.synchronize()
            time.sleep(0.01)

    def close(self) -> None:
        """Leave no Kineto session behind, and no folder, also where the warm-up failed."""
        try:
            if self._recording is not None:
                self._recording.close()
            self._unregister()
        finally:
            if self._private is not None:
                for left in self._folder.glob("*") if self.unpacked is None else ():
                    _free(left)
                self._private.close()

    def finish(self, status: Status, reason: str | None) -> None:
        """As every profiler; a capture without the Chakra trace that was asked for is not complete."""
        if status == "complete" and self._no_chakra is not None:
            status, reason = "partial", self._no_chakra
        super().finish(status, reason)

    def _give_way(self) -> None:
        """End our observer before the training registers one of its own; torch crashes if a range began under another one."""
        if self._recording is None or self._observer is None or not self._observer.is_registered:
            return
        self._no_chakra = _OTHER_OBSERVER
        if self._recording.give_up(_OTHER_OBSERVER):
            self._unregister()
        else:
            # In another thread, theirs takes ours over.
            self.forked()

    def _unregister(self) -> None:
        self._unwatch_observers()
        if self._observer is not None:
            self._observer.unregister_callback()

    def forked(self) -> None:
        """Keep the observer from writing its end into the parent's file when it is destroyed."""
        if self._observer is not None:
            self._observer._registered = self._observer._execution_trace_running = False

    @property
    def is_unsettled(self) -> bool:
        """Whether its thread still has to remove a recording that was lost."""
        return self._recording is not None and self._recording.is_unsettled

    def clean_up(self) -> None:
        """Remove it, if this is that thread."""
        if self._recording is not None:
            self._recording.clean_up()


@contextmanager
def _plain_path(folder: Path) -> Iterator[Path]:
    """Another path of a folder, without characters that matter to anyone.

    Kineto takes what comes before `://` for a protocol, writes its path into the trace unescaped, and takes only UTF-8.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        plain = Path(f"/proc/self/fd/{descriptor}")
        yield plain if plain.exists() else folder
    finally:
        os.close(descriptor)


def _check_whole(raw: Path) -> None:
    """Refuse an export that is missing or cut off: Kineto only logs an error for a path that it cannot write or a full disk."""
    tail = b""
    if raw.is_file():
        with raw.open("rb") as file:
            file.seek(max(raw.stat().st_size - _TAIL_BYTES, 0))
            tail = file.read().rstrip()
    # A trace that is cut off after an event also ends with a brace, but with an indented one.
    if not tail.endswith(b"}") or not (b'"traceName"' in tail or tail.endswith(b"\n}")):
        raise CaptureError(f"torch could not write the whole trace to {raw.parent}: disk full or not writable")


def _free(raw: Path) -> None:
    """Free the space of an export that is about to be removed: Kineto keeps a failed one open."""
    with suppress(OSError):
        os.truncate(raw, 0)


@contextmanager
def _timed(name: str, ranges: list[_TimedRange]) -> Iterator[None]:
    """Add the block's times to `ranges`."""
    started = time.time_ns()
    try:
        yield
    finally:
        ranges.append((name, threading.get_native_id(), started, time.time_ns()))


def _annotations(ranges: Iterable[_TimedRange], base_ns: int, interrupted: list[int]) -> Iterator[bytes]:
    """The ranges as events of a trace whose times begin at `base_ns`."""
    for name, thread, started, ended in ranges:
        if name in (f"ProfilerStep#{iteration}" for iteration in interrupted):
            name = f"interrupted {name}"
        event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": os.getpid(), "tid": thread}
        event |= {"ts": (started - base_ns) / 1000, "dur": (ended - started) / 1000, "args": {}}
        yield json.dumps(event).encode() + b",\n"


def _compress(raw: Path, target: Path, name: str, interrupted: list[int], ranges: Sequence[_TimedRange] = ()) -> None:
    """Gzip `raw` into `target`, with its name in place of `name`, interrupted iterations renamed and `ranges` added."""
    renamed = {
        f'"ProfilerStep#{iteration}"'.encode(): f'"interrupted ProfilerStep#{iteration}"'.encode() for iteration in interrupted
    }
    renamed[os.fsencode(name)] = os.fsencode(target.name)
    with raw.open("rb") as source, gzip.open(target, "wb", compresslevel=_GZIP_LEVEL) as packed:
        base_ns = 0
        while ranges and (line := source.readline()):
            packed.write(line)
            if found := _BASE_TIME.search(line):
                base_ns = int(found[1])
            if line.lstrip().startswith(b'"traceEvents"'):
                packed.writelines(_annotations(ranges, base_ns, interrupted))
                break
        if not interrupted:
            # Everything but the end in large pieces, which are read and compressed without the interpreter's lock.
            left = max(raw.stat().st_size - _TAIL_BYTES - source.tell(), 0)
            while left and (piece := source.read(min(left, _PIECE_BYTES))):
                packed.write(piece)
                left -= len(piece)
        for line in source:
            for old, new in renamed.items():
                line = line.replace(old, new)
            packed.write(line)
