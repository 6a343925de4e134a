"""Files that appear whole: written under a temporary name, then renamed or linked to their own."""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

#: Errors of file systems that have no hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def write_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Call `write` with a temporary path in the same directory, then rename that file to `path`.

    Creates missing parent directories. If `write` raises, the temporary file is removed and `path` is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_json(path: Path, content: Mapping[str, object]) -> Path:
    """Write `content` as indented JSON; readers never see half of it."""
    text = json.dumps(content, indent=1) + "\n"
    return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def create_exclusively(path: Path, text: str) -> bool:
    """Create a file unless one exists, whole or not at all, also on a shared file system.

    Returns whether this call created it. On file systems without hard links (mounted object stores) it may be empty for a
    moment.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    with suppress(FileExistsError):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        finally:
            temporary.unlink(missing_ok=True)
        return True
    return False
