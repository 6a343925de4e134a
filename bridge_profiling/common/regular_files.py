"""Opens regular files only: a pipe or a device could block, or never end. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from bridge_profiling.common.errors import TraceError


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file. A pipe or a device is refused without waiting for it.

    Raises:
        TraceError: it is not a regular file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise TraceError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """A regular file's content.

    Raises:
        TraceError: it is not a regular file, or holds more than `max_bytes`.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise TraceError(f"{path} is refused: it holds more than {max_bytes} bytes")
    return content


def modified_ns(path: Path) -> int:
    """When a file was last modified, in nanoseconds since 1970; 0 where that is unknown, as of a dangling symlink."""
    found = _stat(path)
    return found.st_mtime_ns if found is not None else 0


def size_bytes(path: Path) -> int:
    """A file's size; 0 where that is unknown."""
    found = _stat(path)
    return found.st_size if found is not None else 0


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
