"""The file of a manifest, which stays true when the disk is full or files may not grow.

While the disk still has room, spare files are made for the manifests to come, and one that says that none could be written.
When a manifest cannot be written any more, it goes into a spare, which then takes its name: neither takes room.

Spares have no name where the file system can do that. Elsewhere (NFS, Lustre) a rank that is killed leaves hidden files behind,
which the rank removes when it starts again.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import stat
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bridge_profiling.atomic import write_text
from bridge_profiling.manifest import Durations, Manifest, write_manifest
from bridge_profiling.plain import plain
from bridge_profiling.processes import is_running, pid_space

#: Manifests that may follow the first: as the window opens, while its trace is compressed, and at its end.
_SPARES = 3

#: Room for what later manifests hold in addition: a thousand iterations, in JSON without indentation; else without them.
_MORE_BYTES = (1 << 15, 1 << 12)

#: Errors of file systems without files that have no name, such as NFS and Lustre.
_NO_UNNAMED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EISDIR, errno.ENOENT, errno.EINVAL})

#: After this time a spare counts as left behind although nobody knows whether its process, on another machine, still runs.
_LEFT_SECONDS = 86400

#: The end of a spare's name: where its process runs, and its pid.
_OWNER = re.compile(r"\.(?P<space>[0-9a-f]{12})-(?P<pid>\d{1,9})\.[0-9a-f]{32}\.tmp")


class ManifestFile:
    """Writes one manifest again and again. A context of disk space: `release` it after the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spares: list[_Spare] = []
        self._last_word: _Spare | None = None

    def create(self, manifest: Manifest) -> None:
        """Write the first one, and reserve room for others where that is possible. Raises OSError if it cannot be written."""
        write_manifest(self._path, manifest)
        reason = "the manifest could not be rewritten (a full disk, a quota, or a limit of file sizes): captures are not listed"
        last_word = _text(replace(manifest, status="failed", reason=reason))
        if sys.platform != "linux":
            return
        with suppress(OSError):
            spare = _Spare(self._path, len(last_word))
            spare.fill(last_word)
            self._last_word = spare
        for more_bytes in _MORE_BYTES:
            with suppress(OSError):
                while len(self._spares) < _SPARES:
                    self._spares.append(_Spare(self._path, len(last_word) + more_bytes))
        if any(spare.is_named for spare in self._spares):
            _remove_left(self._path.parents[1], self._path.name)

    def write(self, manifest: Manifest) -> None:
        """Write it, in a spare or shorter where it must be.

        Raises OSError if it cannot be written at all; then the file says so, if room was reserved.
        """
        try:
            write_manifest(self._path, manifest)
        except OSError:
            reserved = self._spares or self._last_word is not None
            if not reserved or not self._write_elsewhere(manifest):
                raise

    def _write_elsewhere(self, manifest: Manifest) -> bool:
        short = replace(manifest, durations_ns=Durations(), framework=None)
        for text in (_text(manifest), _text(short)):
            fitting = [spare for spare in self._spares if len(text) <= spare.room_bytes]
            # The last one is for the last manifest.
            if fitting and (manifest.final or len(self._spares) > 1):
                with suppress(OSError):
                    fitting[0].fill(text)
                    fitting[0].become(self._path)
                    self._spares.remove(fitting[0])
                    fitting[0].close()
                    return True
            with suppress(OSError):
                write_text(self._path, text.decode())
                return True
        if self._last_word is not None:
            with suppress(OSError):
                self._last_word.become(self._path)
            self._last_word.close()
            self._last_word = None
        return False

    def release(self) -> None:
        """Give the room back. Later manifests are written in full or not at all."""
        for spare in (*self._spares, *filter(None, [self._last_word])):
            spare.close()
        self._spares, self._last_word = [], None


class _Spare:
    """A file with its room on the disk; without a name, it is gone when the process ends."""

    def __init__(self, path: Path, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self._name = path.with_name(f".{path.name}.{_space()}-{os.getpid()}.{uuid.uuid4().hex}.tmp")
        try:
            self._file = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o664)
            self.is_named = False
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
            self._file = os.open(self._name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC, 0o664)
            self.is_named = True
        try:
            os.posix_fallocate(self._file, 0, room_bytes)
        except OSError:
            self.close()
            raise

    def become(self, path: Path) -> None:
        """Take this name."""
        if not self.is_named:
            # Only with a directory of its own does Python follow the link to the file without a name.
            os.link(f"/proc/self/fd/{self._file}", self._name, src_dir_fd=self._file)
            self.is_named = True
        os.replace(self._name, path)
        self.is_named = False

    def fill(self, text: bytes) -> None:
        """Write the content."""
        written = 0
        while written < len(text):
            written += os.pwrite(self._file, text[written:], written)
        os.ftruncate(self._file, len(text))

    def close(self) -> None:
        """Give the room back, unless the file has become another."""
        os.close(self._file)
        if self.is_named:
            self._name.unlink(missing_ok=True)


@functools.cache
def _remove_left(manifests: Path, name: str) -> None:
    """Remove what earlier processes of this rank left in any attempt's folder. Once: later there is nothing new."""
    with suppress(OSError):
        for path in manifests.glob(f"*/.{name}.*.tmp"):
            if (owner := _OWNER.fullmatch(path.name.removeprefix(f".{name}"))) is None:
                continue
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                continue
            known = owner["space"] == _space()
            if not is_running(int(owner["pid"])) if known else time.time() - found.st_mtime > _LEFT_SECONDS:
                path.unlink(missing_ok=True)


@functools.cache
def _space() -> str:
    """The machine and container in which a pid is unique."""
    return hashlib.sha256((pid_space() or "").encode()).hexdigest()[:12]


def _text(manifest: Manifest) -> bytes:
    return json.dumps(plain(manifest), separators=(",", ":")).encode() + b"\n"
