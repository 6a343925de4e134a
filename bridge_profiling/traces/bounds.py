"""Opens capture files, packed or plain, and limits what any reader takes from one: sizes, ratios, and lengths of texts."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from isal import igzip_lib

from bridge_profiling.common.errors import TraceError
from bridge_profiling.common.regular_files import open_regular

_GZIP_MAGIC, _XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"
_READ_BYTES = 1 << 20
_TRAILER_BYTES = 8

#: Of an xz decoder. `xz -9` takes 65 MB; a file of 100 bytes can ask for 4 GB.
XZ_MEMORY_BYTES = 256 << 20

#: Characters of a name that are read. Templates of CUTLASS reach some thousands.
MAX_NAME = 1 << 14

#: Times without a base are taken for Unix time when they are after 2001. Later bases would overflow 64 bits together with a
#: file's own times.
UNIX_SINCE_NS, MAX_BASE_NS = 10**18, 4 * 10**18

#: Devices of one process.
MAX_DEVICES = 1024


class DamagedError(TraceError):
    """A packed file that ends early or is corrupt. Everything before the damage was yielded."""


#: Unpacked bytes that are read. No profiler writes more for one rank; snapshots are read into memory as a whole.
KINETO, NSYS, SNAPSHOT = 64 << 30, 64 << 30, 8 << 30

#: Unpacked bytes for each packed one, which count once so many bytes are unpacked. Kineto's JSON shrinks 11- to 25-fold as
#: gzip, nsys' reports 6-fold as xz, and snapshots 45-fold; a bomb reaches 1,000 as gzip and 7,000 as xz.
_MAX_RATIO, _RATIO_CHECKED_BYTES = 200, 32 << 20


def unpack(path: Path, max_bytes: int, piece_bytes: int = _READ_BYTES) -> Iterator[bytes]:
    """The bytes of a gzip, .xz or plain file, in pieces. Its first bytes say which it is, not its name.

    Raises:
        TraceError: it is not a regular file, or exceeds its limits.
        DamagedError: it is cut off or corrupt.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        magic = file.read(len(_XZ_MAGIC))
        file.seek(0)
        if magic.startswith(_GZIP_MAGIC):
            pieces = _unpacked(path, file, "gzip", lambda: igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP), piece_bytes)
        elif magic == _XZ_MAGIC:
            pieces = _unpacked(path, file, "xz", lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES), piece_bytes)
        else:
            pieces = iter(lambda: file.read(piece_bytes), b"")
        done = 0
        for piece in pieces:
            done += len(piece)
            if done > max_bytes:
                raise TraceError(f"{path} is refused: it holds more than {max_bytes >> 30} GiB")
            if done > _RATIO_CHECKED_BYTES and done > _MAX_RATIO * file.tell():
                raise TraceError(f"{path} is refused: it unpacks to more than {_MAX_RATIO} times its size")
            yield piece


def _unpacked(path: Path, file: BinaryIO, kind: str, begin: Callable[[], Any], piece_bytes: int) -> Iterator[bytes]:
    """All streams of a packed file, with padding of zeros between or after them."""
    unpacker, held = begin(), b""
    started = True  # the unpacker was given some of its stream
    try:
        while True:
            packed = b""
            if unpacker.eof:
                packed, unpacker, started = unpacker.unused_data, begin(), False
            elif unpacker.needs_input:
                fresh = file.read(_READ_BYTES)
                packed = held + fresh
                # The checksum is held back, so that all data are out before it can fail.
                held = packed[-_TRAILER_BYTES:] if fresh else b""
                packed = packed[: len(packed) - len(held)]
                if not fresh and not packed:
                    break
            packed = packed if started else packed.lstrip(b"\0")
            started |= bool(packed)
            if started and (piece := unpacker.decompress(packed, piece_bytes)):
                yield piece
    except (lzma.LZMAError, igzip_lib.IsalError) as error:  # type: ignore[misc]
        raise DamagedError(f"{path} is damaged: {error}") from error
    if started:
        raise DamagedError(f"{path} is cut off: the {kind} data end early")
