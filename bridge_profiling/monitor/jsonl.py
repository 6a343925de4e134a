"""Samples and alerts as JSON lines: each line stands by itself, and a crash loses the last one at most."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TextIO

from bridge_profiling.monitor.alerts import Alert
from bridge_profiling.monitor.readings import Sample, stamp

#: At this size the file becomes `<name>.1`, over an older one: a day of samples of eight GPUs, one a second.
MAX_BYTES = 512 << 20


class JsonLines:
    """Appends to a file; `-` is standard output.

    Args:
        path: the file; its directory is made.
        max_bytes: the size at which the file is moved to `<name>.1`, and a new one begun.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> None:
        self._path = None if os.fspath(path) == "-" else Path(path)
        self._max_bytes = max_bytes
        self._file: TextIO = sys.stdout if self._path is None else _appending(self._path)

    def write(self, sample: Sample) -> None:
        """Append a sample."""
        self._line(sample.as_json())

    def alert(self, alert: Alert, sample: Sample) -> None:
        """Append an alert that `sample` has led to."""
        self._line({"kind": "alert", **stamp(sample.unix_seconds), "host": sample.host, "rank": sample.rank, **alert.as_json()})

    def close(self) -> None:
        """Close the file."""
        if self._path is not None:
            self._file.close()

    def _line(self, record: dict) -> None:
        # One write a line, so that processes that append to the same file do not mix theirs.
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        if self._path is not None and self._file.tell() >= self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._file = _appending(self._path)


def _appending(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        # A process that was killed may have left half a line.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return open(path, "a", encoding="utf-8")
