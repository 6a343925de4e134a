"""The torch profiler's backend: a Kineto trace that holds exactly the window.

Driven by hand (prepare, start, stop) instead of by a schedule: a schedule counts from the process's start, which
shifts the window after a resume, and starts one iteration early.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from bridge_profiling.atomic import write_atomically
from bridge_profiling.capture.profiler import Profiler
from bridge_profiling.errors import CaptureError

#: Where a trace's end, with its name, is looked for.
_TAIL_BYTES = 1 << 14

#: Bytes packed at a time.
_PIECE_BYTES = 1 << 20

#: Kineto's traces shrink 13-fold at level 6 and 11-fold at level 1, which takes half the time (237 MB: 0.4 s, 0.84 s).
_GZIP_LEVEL = 1

#: Why nothing is captured where the training profiles itself, or two of our hooks want the same iterations.
_OVERTAKEN = "another profiler was started in this process, and torch allows one at a time; capture iterations without it"

#: CUDA calls to make, 10 ms apart, before a process may exit after CUPTI was told to tear itself down.
_TEARDOWN_CALLS = 20


class TorchProfiler(Profiler):
    """Records host and device activity with torch.profiler."""

    name = "torch"
    needs_warm_up = True

    _phase = "idle"
    _observer: Any = None
    _profile: Any = None
    _unwatch: Callable[[], None] = staticmethod(lambda: None)
    #: Ours that may be open, the outermost first; those that nobody holds any more have been left.
    _ranges: WeakKeyDictionary[Any, None]

    def warm_up(self) -> None:
        """Set up Kineto and CUPTI."""
        import torch

        if torch.autograd._profiler_enabled():
            raise CaptureError("another profiler is already recording in this process, and torch allows one at a time")
        activities = [torch.profiler.ProfilerActivity.CPU]
        # A process that has not touched its GPU by now trains on the CPU.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            # CUPTI left attached keeps the rest of the run 15-22 % slower on an H200. A user's own setting wins, and torch
            # itself switches this off where CUDA graphs cannot bear it.
            os.environ.setdefault("TEARDOWN_CUPTI", "1")
            if os.environ["TEARDOWN_CUPTI"] == "0":
                self.notes.append(
                    "TEARDOWN_CUPTI=0, which CUDA graphs need: CUPTI stays attached, and the rest of this run may be slower"
                )
        self._observer = self._chakra_observer() if self.config.pytorch_profiler_collect_chakra else None
        self._profile = torch.profiler.profile(
            activities=activities,
            record_shapes=self.config.wants_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
            profile_memory=self.config.pytorch_profiler_profile_memory,
            execution_trace_observer=self._observer,
        )
        self._profile.prepare_trace()
        self._phase, self._ranges = "armed", WeakKeyDictionary()
        self._watch_others()

    def _watch_others(self) -> None:
        """Give way to a profiler that the training starts itself: with two in one thread, ending both crashes the process."""
        import torch

        profilers: Any = torch.autograd.profiler.profile
        thread = threading.get_ident()
        try:
            prepare, start = profilers._prepare_trace, profilers._start_trace
        except AttributeError:
            return  # They are torch's own affair, and this capture does not need them.

        def gave_way_to(profiler: Any) -> bool:
            if self._phase == "idle" or profiler is self._profile.profiler or threading.get_ident() != thread:
                return False
            recording, self._phase = self._phase == "recording", "idle"
            if recording:
                self._stop_trace()
            return True

        def prepare_alone(profiler: Any) -> None:
            gave_way_to(profiler)
            prepare(profiler)

        def start_alone(profiler: Any) -> None:
            if gave_way_to(profiler):
                # What it has prepared, this one has prepared differently since.
                prepare(profiler)
            start(profiler)

        def unwatch() -> None:
            # Somebody may have replaced them since; they do nothing more then.
            if profilers._prepare_trace is prepare_alone and profilers._start_trace is start_alone:
                profilers._prepare_trace, profilers._start_trace = prepare, start

        profilers._prepare_trace, profilers._start_trace = prepare_alone, start_alone
        self._unwatch = unwatch

    def _chakra_observer(self) -> Any:
        from torch.profiler import ExecutionTraceObserver

        target = self.files.chakra_trace
        target.parent.mkdir(parents=True, exist_ok=True)
        # The observer writes as it goes, so the name is given at the end, as for every other file.
        self._chakra_temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        return ExecutionTraceObserver().register_callback(str(self._chakra_temporary))

    def start(self) -> None:
        """Start recording."""
        if self._phase != "armed":
            raise CaptureError(_OVERTAKEN)
        self._phase = "recording"
        self._profile.start_trace()
        self._profile.add_metadata_json("bridge_profiling", json.dumps(self.metadata))

    def iteration_range(self, iteration: int) -> AbstractContextManager | None:
        """`ProfilerStep#<global iteration>`, the name that every reader of Kineto traces looks for."""
        return self.phase_range(f"ProfilerStep#{iteration}")

    def phase_range(self, name: str) -> AbstractContextManager | None:
        """A user annotation in the trace; none in the trace of a profiler that this one has given way to."""
        from torch.profiler import record_function

        if self._phase != "recording":
            return None
        annotation = record_function(name)
        self._ranges[annotation] = None
        return annotation

    def _stop_trace(self) -> None:
        """Stop, with no range of ours left open.

        torch writes a range's end to where its beginning was recorded, if anything records then: to memory that went with the
        recording in which it began. That crashes the process, sooner or later (torch 2.13).
        """
        # A list of them at once: another thread may enter one meanwhile.
        for reference in reversed(self._ranges.keyrefs()):
            annotation = reference()
            if annotation is None:
                continue
            if annotation.record is not None:
                annotation.__exit__(None, None, None)
            # Whoever leaves it later finds it ended.
            annotation.run_callbacks_on_exit = False
        self._profile.stop_trace()

    def stop(self, interrupted: list[int]) -> Callable[[], None]:
        """Stop recording and export; compressing is left for later.

        The export holds the interpreter's lock even in a thread, and compressing does not: a trace of 237 MB is exported
        in 1.8 s, and compressed in 0.4 s that training need not wait for. torch's own `.json.gz` takes 16 s for both.
        """
        self._unwatch()
        if self._phase != "recording":
            raise CaptureError(_OVERTAKEN)
        # First: a second stop_trace after one that raised would crash the process.
        self._phase = "idle"
        self._stop_trace()
        target = self.files.torch_trace
        target.parent.mkdir(parents=True, exist_ok=True)
        raw = target.with_name(f".{target.name}.{os.getpid()}.json")
        try:
            self._profile.export_chrome_trace(str(raw))
            _check_whole(raw)
            self._publish_chakra()
        except BaseException:
            _remove(raw)
            raise

        self.unpacked = raw

        def compress() -> None:
            try:
                write_atomically(target, lambda temporary: _compress(raw, temporary, interrupted, target.name))
                self.artifacts.insert(0, target)
            finally:
                self.unpacked = None
                _remove(raw)

        return compress

    def _publish_chakra(self) -> None:
        if self._observer is not None:
            self._observer.unregister_callback()
            os.replace(self._chakra_temporary, self.files.chakra_trace)
            self.artifacts.append(self.files.chakra_trace)

    def release(self) -> None:
        """Give the recorded events' memory back, some ten bytes for each of the uncompressed trace."""
        self._profile = None

    def leave(self) -> None:
        """Let a pending CUPTI teardown finish.

        Kineto tears CUPTI down at the first CUDA call that comes after a thread of its own is ready for it. A process
        that exits without such a call never ends: it waits for that thread.
        """
        import torch

        if not torch.cuda.is_available() or os.environ.get("TEARDOWN_CUPTI") != "1":
            return
        for _ in range(_TEARDOWN_CALLS):
            torch.cuda.synchronize()
            time.sleep(0.01)

    def close(self) -> None:
        """Leave no Kineto session behind, not even a half-armed one: the interpreter crashes at exit with it."""
        self._unwatch()
        phase, self._phase = self._phase, "idle"
        if phase == "armed":
            self._profile.start_trace()
        if phase != "idle":
            self._stop_trace()
        if self._observer is not None:
            self._observer.unregister_callback()
            self._chakra_temporary.unlink(missing_ok=True)


def _check_whole(raw: Path) -> None:
    """Refuse an export that is missing or cut off: Kineto only logs a path that it cannot write, or a disk that is full.

    Raises:
        CaptureError: there is no file, or its end is not a trace's.
    """
    tail = b""
    if raw.is_file():
        with raw.open("rb") as file:
            file.seek(max(raw.stat().st_size - _TAIL_BYTES, 0))
            tail = file.read().rstrip()
    # A trace cut off behind an event also ends with a brace, but an indented one.
    if not tail.endswith(b"}") or not (b'"traceName"' in tail or tail.endswith(b"\n}")):
        raise CaptureError(f"torch could not write the whole trace to {raw.parent}; there is no room, or no permission")


def _remove(raw: Path) -> None:
    """Remove an export, and what Kineto leaves of a failed one: a file it keeps open, whose space must be given back first."""
    for path in (raw, raw.with_name(f"{raw.name}.tmp")):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
            path.unlink()


def _compress(raw: Path, target: Path, interrupted: list[int], name: str) -> None:
    """Gzip `raw` into `target`.

    Args:
        raw: the exported trace.
        target: the file to write.
        interrupted: iterations to rename, so that no reader takes them for whole ones.
        name: what the trace calls itself; Kineto wrote the name of `raw`.
    """
    renamed = {
        f'"ProfilerStep#{iteration}"'.encode(): f'"interrupted ProfilerStep#{iteration}"'.encode() for iteration in interrupted
    }
    renamed[raw.name.encode()] = name.encode()
    with raw.open("rb") as source, gzip.open(target, "wb", compresslevel=_GZIP_LEVEL) as packed:
        if not interrupted:
            # All but the end in large pieces, which are read and packed without the interpreter's lock.
            left = max(raw.stat().st_size - _TAIL_BYTES, 0)
            while left and (piece := source.read(min(left, _PIECE_BYTES))):
                packed.write(piece)
                left -= len(piece)
        for line in source:
            for old, new in renamed.items():
                line = line.replace(old, new)
            packed.write(line)
