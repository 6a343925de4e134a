"""The file of a manifest, which stays true when the disk is full or files may not grow.

While the disk still has room, spare files are made, which say that the manifest could not be rewritten. When a manifest cannot
be written any more, it goes into a spare, which then takes its name: neither takes room.

Spares have no name where the file system can do that. Elsewhere (NFS, Lustre) a rank that is killed leaves hidden files behind,
which it removes when it starts again a day later.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bridge_profiling.common.plain import plain
from bridge_profiling.manifest import Durations, Manifest, write_manifest

#: Manifests that may follow the first: as the window opens, while its trace is compressed, and at its end.
_SPARES = 3

#: Room for what later manifests hold in addition: a thousand iterations, in JSON without indentation; else without them.
_MORE_BYTES = (1 << 15, 1 << 12)

#: Errors of file systems without files that have no name, such as NFS and Lustre.
_NO_UNNAMED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EISDIR, errno.ENOENT, errno.EINVAL})

#: The age at which a spare counts as left behind.
_LEFT_SECONDS = 86400


class ManifestFile:
    """Writes one manifest again and again. `release` gives its room on the disk back after the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: The one that stays as it is, and those that other manifests go into.
        self._fixed: _Spare | None = None
        self._spares: list[_Spare] = []

    def create(self, manifest: Manifest) -> None:
        """Write the first one, and reserve room for others where that is possible. Raises OSError if it cannot be written."""
        write_manifest(self._path, manifest)
        if sys.platform != "linux":
            return
        reason = "the manifest could not be rewritten (a full disk, a quota, or a limit of file sizes): captures are not listed"
        text = _text(replace(manifest, status="failed", reason=reason))
        for more_bytes in _MORE_BYTES:
            with suppress(OSError):
                self._fixed = self._fixed or _Spare(self._path, text, len(text) + more_bytes)
                while len(self._spares) < _SPARES:
                    self._spares.append(_Spare(self._path, text, len(text) + more_bytes))
        if self._fixed is not None and self._fixed.is_named:
            _remove_left(self._path.parents[1], self._path.name)

    def write(self, manifest: Manifest) -> None:
        """Write it, in a spare or shorter where it must be.

        Raises OSError if it cannot be written at all; then the file says so, if room was reserved.
        """
        try:
            write_manifest(self._path, manifest)
        except OSError:
            # One spare is for the last manifest.
            if len(self._spares) > (0 if manifest.final else 1):
                spare, short = self._spares.pop(), replace(manifest, durations_ns=Durations(), framework=None)
                if spare.fill(_text(manifest)) or spare.fill(_text(short)):
                    spare.become(self._path)
                    return
                spare.close()
            if self._fixed is not None:
                fixed, self._fixed = self._fixed, None
                fixed.become(self._path)
            raise

    def release(self) -> None:
        """Give the room back. Later manifests are written in full or not at all."""
        for spare in filter(None, (self._fixed, *self._spares)):
            spare.close()
        self._fixed, self._spares = None, []


class _Spare:
    """A file with a text, and room on the disk for a longer one; without a name, it is gone when the process ends."""

    def __init__(self, path: Path, text: bytes, room_bytes: int) -> None:
        self._room_bytes, self.is_named = room_bytes, False
        self._name = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            self._file = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o664)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
            self._file = os.open(self._name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC, 0o664)
            self.is_named = True
        try:
            os.posix_fallocate(self._file, 0, room_bytes)
            if not self.fill(text):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        except OSError:
            self.close()
            raise

    def fill(self, text: bytes) -> bool:
        """Replace the text; False if it does not fit or cannot be written."""
        if len(text) > self._room_bytes:
            return False
        self._length = written = 0
        try:
            while written < len(text):
                written += os.pwrite(self._file, text[written:], written)
        except OSError:
            return False
        self._length = written
        return True

    def become(self, path: Path) -> None:
        """Take this name."""
        try:
            os.ftruncate(self._file, self._length)
            if not self.is_named:
                # Only with a directory of its own does Python follow the link to the file without a name.
                os.link(f"/proc/self/fd/{self._file}", self._name, src_dir_fd=self._file)
                self.is_named = True
            os.replace(self._name, path)
            self.is_named = False
        finally:
            self.close()

    def close(self) -> None:
        """Give the room back, unless the file has become another."""
        os.close(self._file)
        if self.is_named:
            self._name.unlink(missing_ok=True)


@functools.cache
def _remove_left(manifests: Path, name: str) -> None:
    """Remove what earlier processes of this rank left in any attempt's folder. Once: later there is nothing new."""
    for path in manifests.glob(f"*/.{name}.*.tmp"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFT_SECONDS:
                path.unlink()


def _text(manifest: Manifest) -> bytes:
    return json.dumps(plain(manifest), separators=(",", ":")).encode() + b"\n"
