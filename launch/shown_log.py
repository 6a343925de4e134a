"""Filters two lines that torch's profiler prints about itself from the log that `launch/experiment.py` shows.

libkineto of torch 2.13 to 2.15 announces each start and stop on stderr, `USDT:<time> … profiler_start`, at a severity above
errors: the only KINETO_LOG_LEVEL that silences it (6) silences its errors too. A CUDA build on a machine without a driver adds
`ERROR: … gpuGetDeviceCount failed with code 35`. The log's file keeps every line.

libkineto writes such a line and its end in two calls. A reader that follows the file may read between them, and then the end
comes later, alone or after another rank's line: an empty line of a rank is left out as well.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_PROFILERS_OWN = re.compile(
    r"(?:\[\w+\]:)?"
    r"(?:USDT|ERROR):\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ "
    r"(?:SyncActivityProfilerHandler\.cpp:\d+\] profiler_(?:start|stop)"
    r"|DeviceProperties\.cpp:\d+\] gpuGetDeviceCount failed with code 35(?!\d))"
)
#: A line, or a piece of one, that says nothing: the task's and the rank's prefix.
_NOTHING = re.compile(r"(?:\S+ )?(?:\[\w+\]:)?\n?")


class _Shown:
    """A stream without those lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # NeMo-Run writes a line of the log, or a piece of one, at a time.
        rest = _PROFILERS_OWN.sub("", text)
        if not ((rest != text or "]:" in text) and _NOTHING.fullmatch(rest)):
            self._stream.write(rest)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def without_the_profilers_own_lines() -> Iterator[None]:
    """Filter those lines from stdout, where NeMo-Run prints a job's log from a thread."""
    shown: Any = _Shown(sys.stdout)
    with contextlib.redirect_stdout(shown):
        yield
