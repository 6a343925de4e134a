"""The seal of a cache entry: the file and the engine that made it, and checksums of its own files.

Checksums guard against damage and mix-ups. A signature with a secret of the user guards against entries that came with the
captures of somebody else: nobody has read these captures to make them. ISA-L's CRC does 23 GB/s where SHA-256 does 1.7. For a
trace of 2 MB, which takes 230 ms to read, both checks take 0.14 ms, and the CRC of all of it 0.1 ms.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from isal import isal_zlib

from bridge_profiling.atomic import write_atomically
from bridge_profiling.errors import TraceError
from bridge_profiling.regular_files import open_regular, read_regular, size_bytes

#: The seal's file.
SEAL = "seal.json"

#: The file of the secret in the user's cache, and its bytes.
_SECRET, _SECRET_BYTES = "secret", 32

#: Bytes at each end of a capture that are compared whenever its entry is used. A packed file ends with a checksum of all of it.
_END_BYTES = 1 << 16

#: A seal names ten files.
_MAX_SEAL_BYTES = 1 << 20

_PIECE_BYTES = 1 << 22


class Origin(msgspec.Struct, frozen=True):
    """A capture file at the time when it was read.

    Equal sizes, times of modification and ends are not enough: a file can be rewritten and get its old time back. The time of
    its last change (`ctime_ns`) cannot be set, so the whole content is compared where that differs.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    ends: int  # CRC of both ends
    journal_bytes: int  # of SQLite's journals next to it: changes to a report that are not in the file yet
    content: int | None = None  # CRC of everything

    @classmethod
    def of(cls, path: Path) -> Origin:
        """A file without its content's checksum. Raises OSError or TraceError if it cannot be read."""
        absolute = str(path.absolute())
        try:
            absolute.encode()
        except UnicodeEncodeError:
            raise TraceError(f"{path} has a path that is not UTF-8, which no report can name: rename or link it") from None
        with open_regular(path) as file:
            stat = os.fstat(file.fileno())
            head = file.read(_END_BYTES)
            file.seek(max(stat.st_size - _END_BYTES, 0))
            ends = isal_zlib.crc32(file.read(_END_BYTES), isal_zlib.crc32(head))
        journals = sum(size_bytes(path.with_name(f"{path.name}-{kind}")) for kind in ("wal", "journal"))
        return cls(absolute, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, ends, journals)

    def with_content(self) -> Origin:
        """The same with the checksum of the content."""
        return msgspec.structs.replace(self, content=_checksum(Path(self.path)))

    def is_of(self, now: Origin) -> bool:
        """Whether this recorded origin is the file as it is `now`."""
        known = msgspec.structs.replace(self, ctime_ns=now.ctime_ns, inode=now.inode, content=now.content)
        untouched = (self.ctime_ns, self.inode) == (now.ctime_ns, now.inode)
        return known == now and (untouched or self.content == _checksum(Path(now.path)))


class Seal(msgspec.Struct, frozen=True):
    """What an entry holds: sizes and CRCs of its files by name, and where it comes from."""

    engine: str
    files: dict[str, tuple[int, int]]
    capture: str = ""  # the rank and its source
    origin: Origin | None = None  # None in an entry outside a cache
    signature: str = ""  # of all this, with the user's secret

    @property
    def is_signed(self) -> bool:
        """Whether this user has written the entry."""
        return self.signature == _signature(self) != ""


def user_cache() -> Path | None:
    """The user's cache; None where the environment names no place for it."""
    homes = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    # A relative path would be below the working directory.
    return next((Path(home, "bridge_profiling") for home in homes if os.path.isabs(home)), None)


def user_secret() -> bytes:
    """A random text in the user's cache, made on first use; empty where it can be neither read nor made."""
    folder = user_cache()
    if folder is None:
        return b""
    path = folder / _SECRET

    def write(temporary: Path) -> None:
        temporary.touch(0o600)
        temporary.write_bytes(os.urandom(_SECRET_BYTES))

    with suppress(OSError, TraceError):
        if not path.is_file() or path.stat().st_size != _SECRET_BYTES:
            # Of two processes that do this at once, the entries of one are made again.
            write_atomically(path, write)
        return read_regular(path, _SECRET_BYTES)
    return b""


def _signature(seal: Seal) -> str:
    secret = user_secret()
    text = msgspec.json.encode(msgspec.structs.replace(seal, signature=""))
    return hashlib.blake2b(text, key=secret, digest_size=16).hexdigest() if secret else ""


def write_seal(entry: Path, names: Sequence[str], *, engine: str, capture: str, origin: Origin | None) -> None:
    """Seal the files of an entry. Raises OSError."""
    files = {name: ((entry / name).stat().st_size, _checksum(entry / name)) for name in names}
    seal = Seal(engine, files, capture, origin)
    (entry / SEAL).write_bytes(msgspec.json.encode(msgspec.structs.replace(seal, signature=_signature(seal))))


def read_seal(entry: Path) -> Seal | None:
    """The seal of an entry whose files are as they were written; None if there is none."""
    try:
        seal = msgspec.json.decode(read_regular(entry / SEAL, _MAX_SEAL_BYTES), type=Seal)
        if set(os.listdir(entry)) != {SEAL, *seal.files}:
            return None
        for name, (size, checksum) in seal.files.items():
            path = entry / name
            if path.stat().st_size != size or _checksum(path) != checksum:
                return None
    except (OSError, TraceError, msgspec.DecodeError):
        return None
    return seal


def is_whole(entry: Path) -> bool:
    """Whether an entry still has all of its files, each of its size. Their content is not read again."""
    try:
        seal = msgspec.json.decode(read_regular(entry / SEAL, _MAX_SEAL_BYTES), type=Seal)
        return all((entry / name).stat().st_size == size for name, (size, _) in seal.files.items())
    except (OSError, TraceError, msgspec.DecodeError):
        return False


def _checksum(path: Path) -> int:
    checksum = 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = isal_zlib.crc32(piece, checksum)
    return checksum
