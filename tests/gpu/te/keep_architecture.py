"""Keeps one GPU architecture's machine code in a CUDA library, as `nvcc -arch=sm_NN` would have built it.

    python3 keep_architecture.py LIBRARY 90

Works in place. The file keeps its size, and the space of what is removed becomes zeros, which any compressor takes out: the
190 MB of Transformer Engine 2.16's compressed core library become 12. A library holds one fat binary per source file, each a
header followed by entries; an entry is a header of its own and machine code (kind 2) or PTX (kind 1) for one architecture.
"""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path

#: What a fat binary begins with.
_MAGIC = 0xBA55ED50

_MACHINE_CODE = 2


def keep_architecture(library: Path, architecture: int) -> str:
    """Rewrite a library in place; says what is left in it."""
    with open(library, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        binaries, kept = _keep(data, *_section(data, ".nv_fatbin"), architecture)
    return f"{library.name}: {kept / 1e6:.1f} MB of sm_{architecture} code in {binaries} fat binaries"


def _keep(data: mmap.mmap, start: int, size: int, architecture: int) -> tuple[int, int]:
    """Move each fat binary's wanted entries to its front, and let its header end there.

    Returns:
        The number of fat binaries, and the bytes of machine code that are left.

    Raises:
        SystemExit: a fat binary has none for this architecture.
    """
    at, end, binaries, kept = start, start + size, 0, 0
    while at <= end - 16:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != _MAGIC:
            at += 8
            continue
        entry, stop, wanted = at + header, at + header + length, b""
        while entry < stop:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            (entry_architecture,) = struct.unpack_from("<I", data, entry + 28)
            if kind == _MACHINE_CODE and entry_architecture == architecture:
                wanted += data[entry : entry + entry_header + payload]
            entry += entry_header + payload
        if not wanted:
            sys.exit(f"the fat binary at {at:#x} has no machine code for sm_{architecture}")
        data[at + header : stop] = wanted + bytes(length - len(wanted))
        struct.pack_into("<Q", data, at + 8, len(wanted))
        binaries, kept, at = binaries + 1, kept + len(wanted), stop
    return binaries, kept


def _section(data: mmap.mmap, name: str) -> tuple[int, int]:
    """Where a section of a 64-bit ELF file lies in it, and how large it is."""
    (table,) = struct.unpack_from("<Q", data, 40)
    row_size, rows, names = struct.unpack_from("<HHH", data, 58)
    (strings,) = struct.unpack_from("<Q", data, table + names * row_size + 24)
    for row in range(rows):
        at = table + row * row_size
        text = strings + struct.unpack_from("<I", data, at)[0]
        if data[text : data.find(b"\0", text)] == name.encode():
            offset, size = struct.unpack_from("<QQ", data, at + 24)
            return offset, size
    sys.exit(f"the library has no section {name}: no CUDA code")


if __name__ == "__main__":
    print(keep_architecture(Path(sys.argv[1]), int(sys.argv[2])))
