"""Filters two lines that torch's profiler prints about itself from the log that `launch/experiment.py` shows.

libkineto of torch 2.13 to 2.15 announces each start and stop on stderr, `USDT:<time> … profiler_start`, at a severity above
errors: the only KINETO_LOG_LEVEL that silences it (6) silences its errors too. A CUDA build on a machine without a driver adds
`ERROR: … gpuGetDeviceCount failed with code 35`. The log's file keeps every line.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

#: The whole line, after the task's and the rank's prefix: a line that holds more is shown.
_PROFILERS_OWN = re.compile(
    r"(?:\S+ )?(?:\[\w+\]:)?"
    r"(?:USDT|ERROR):\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ "
    r"(?:SyncActivityProfilerHandler\.cpp:\d+\] profiler_(?:start|stop)"
    r"|DeviceProperties\.cpp:\d+\] gpuGetDeviceCount failed with code 35)\n"
)


class _Shown:
    """A stream without those lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # NeMo-Run writes a line of the log at a time.
        return len(text) if _PROFILERS_OWN.fullmatch(text) else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def without_the_profilers_own_lines() -> Iterator[None]:
    """Filter those lines from stdout, where NeMo-Run prints a job's log from a thread."""
    shown: Any = _Shown(sys.stdout)
    with contextlib.redirect_stdout(shown):
        yield
