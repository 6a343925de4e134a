"""Files that appear whole: written under another name, then renamed or linked to their own.

Others may write to the same directory. So the first name can't be guessed, no link is followed there, and a file or directory
made here is never writable by everyone, whatever the umask says.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from bridge_profiling.common.plain import plain

#: Errors of file systems that have no hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})

#: Permissions before the umask: of a file, and of a directory.
_FILE_MODE, _DIRECTORY_MODE = 0o664, 0o775


def write_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Call `write` with a path in a private directory next to `path`, then rename that file to `path`.

    Creates missing parent directories. If `write` raises, the directory is removed and `path` is untouched.
    """
    make_directory(path.parent)
    with private_directory(path.parent) as private:
        temporary = private / path.name
        write(temporary)
        mode = temporary.stat().st_mode
        if mode & stat.S_IWOTH:
            temporary.chmod(stat.S_IMODE(mode) & ~stat.S_IWOTH)
        os.replace(temporary, path)
    return path


def write_json(path: Path, content: object) -> Path:
    """Write a mapping or a dataclass as indented JSON; readers never see half of it. Values may be of any type (`plain`)."""
    return write_text(path, json.dumps(plain(content), indent=1) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write a text; readers never see half of it."""
    make_directory(path.parent)
    temporary = _create(path, text)
    try:
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def create_exclusively(path: Path, text: str) -> bool:
    """Create a file unless one exists, whole or not at all, also on a shared file system.

    Returns whether this call created it. On file systems without hard links (mounted object stores) it may be empty for a
    moment.
    """
    temporary = _create(path, text)
    with suppress(FileExistsError):
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write_new(path, text)
        finally:
            temporary.unlink(missing_ok=True)
        return True
    return False


def make_directory(folder: Path) -> None:
    """Create a directory and its parents.

    Raises PermissionError where the path leads through a link in a directory of others: it could lead anywhere.
    """
    for place in reversed(list(takewhile(lambda one: not one.exists(), (folder, *folder.parents)))):
        with suppress(FileExistsError):
            os.mkdir(place, _DIRECTORY_MODE)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    for place in (folder, *folder.parents):
        if place.is_symlink() and (owner := place.lstat().st_uid) not in trusted_users(place.parent):
            raise PermissionError(errno.EPERM, f"it is a link that user {owner} made", str(place))


@contextmanager
def private_directory(parent: Path) -> Iterator[Path]:
    """A directory that only this user can enter, for files that are still being written; removed at the end of the block.

    A child process that is forked meanwhile leaves it to its parent.
    """
    private, process = Path(tempfile.mkdtemp(prefix=".writing-", dir=parent)), os.getpid()
    try:
        yield private
    finally:
        if os.getpid() == process:
            shutil.rmtree(private, ignore_errors=True)


def trusted_users(directory: Path) -> set[int]:
    """The users whose files in a directory are taken seriously: this process's, the directory's owner and root."""
    users = {os.geteuid(), 0}
    with suppress(FileNotFoundError):
        users.add(directory.stat().st_uid)
    return users


def read_trusted(path: Path, max_bytes: int, users: set[int]) -> bytes:
    """A file's content; OSError, with the reason, unless it is a regular file that only these users can have written.

    Opens no pipe and follows no link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path.name} is not a regular file")
        if found.st_size > max_bytes:
            raise OSError(f"{path.name} has {found.st_size} bytes, more than {max_bytes}")
        if found.st_uid not in users:
            raise OSError(f"{path.name} belongs to user {found.st_uid}, who is neither this job's nor the directory's owner")
        if found.st_mode & stat.S_IWOTH:
            raise OSError(f"{path.name} can be written by every user of the machine")
        return file.read(max_bytes)


def _create(path: Path, text: str) -> Path:
    """A new file with this text, next to `path` and under a name that nobody knows, which is not too long if `path` is not."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        _write_new(temporary, text)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _write_new(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
