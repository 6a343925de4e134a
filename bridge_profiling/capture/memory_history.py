"""The history of CUDA's memory: what was allocated, by which Python code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bridge_profiling.capture.profiler import Profiler
from bridge_profiling.capture.torch_recording import MEMORY_HISTORY, watch_calls
from bridge_profiling.common.atomic import write_atomically
from bridge_profiling.common.errors import CaptureError, one_line, say

#: Events that the memory history keeps, as in the examples of torch's own viewer: a run of any length stays bounded.
MAX_ENTRIES = 100_000

_OTHER_HISTORY = "the training records a memory history of its own, which ours would end; switch one of them off"


class MemoryHistory(Profiler):
    """Records CUDA's allocations from before the model is built to the end of the window.

    It writes a snapshot there, and one at each out-of-memory error before that.
    """

    name = "memory"

    _recording = False
    _unwatch: Callable[[], None] = staticmethod(lambda: None)
    _ooms = 0

    def open(self) -> None:
        """Switch the history on, with Python stacks only: C++ stacks take a hundred times as long to write."""
        import torch

        if not torch.cuda.is_available():
            raise CaptureError("memory history records CUDA allocations, and this process sees no CUDA device")
        if getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)():
            raise CaptureError(_OTHER_HISTORY)
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
        self._recording = True
        self._unwatch = watch_calls(MEMORY_HISTORY, lambda function: self._give_way())
        # Called where the allocation fails, before anything unwinds, so the snapshot shows what filled the memory.
        torch._C._cuda_attach_out_of_memory_observer(self._on_oom)  # type: ignore[attr-defined,unused-ignore]

    def _give_way(self) -> None:
        """Leave the history to the training, which switches it itself."""
        self._recording = False
        self._unwatch()
        with self.guarded("go on"):
            raise CaptureError(_OTHER_HISTORY)

    def _on_oom(self, device: int, requested: int, device_total: int, device_free: int) -> None:
        if not self._recording:
            return
        self._ooms += 1
        try:
            self._write(self.files.oom_snapshot(self._ooms))
        except Exception as error:
            # The allocator calls this while it handles its own error; a second one would hide the first.
            say(f"bridge_profiling: no snapshot of the out-of-memory error: {one_line(error)}")

    def stop(self, interrupted: list[int]) -> None:
        """Write the snapshot at the end of the window."""
        self._write(self.files.memory_snapshot)

    def _write(self, path: Path) -> None:
        import torch

        self.artifacts.append(write_atomically(path, lambda temporary: torch.cuda.memory._dump_snapshot(str(temporary))))

    def close(self) -> None:
        """Switch the history off, so that the rest of the run does not pay for it."""
        import torch

        self._unwatch()
        if self._recording:
            self._recording = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def forked(self) -> None:
        """As of every profiler."""
        self._unwatch()
