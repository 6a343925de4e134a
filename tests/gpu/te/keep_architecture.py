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
        code = _section(data, ".nv_fatbin")
        if code is None:
            sys.exit(f"{library.name} has no CUDA code")
        binaries, kept = _keep(data, *code, architecture)
        # Input of the device linker, which nothing loads at run time: 127 of NCCL's 252 MB.
        if (relocatable := _section(data, "__nv_relfatbin")) is not None:
            start, size = relocatable
            data[start : start + size] = bytes(size)
    return f"{library.name}: {kept / 1e6:.1f} MB of sm_{architecture} code in {binaries} fat binaries"


def _keep(data: mmap.mmap, start: int, size: int, architecture: int) -> tuple[int, int]:
    """Move each fat binary's wanted entries to its front, and let its header end there.

    A fat binary without the architecture stays as it is: it holds kernels for newer GPUs, and the library may ask for them.

    Returns:
        The number of fat binaries that were cut, and the bytes of machine code that they keep.

    Raises:
        SystemExit: no fat binary has code for this architecture.
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
        if wanted:
            data[at + header : stop] = wanted + bytes(length - len(wanted))
            struct.pack_into("<Q", data, at + 8, len(wanted))
            binaries, kept = binaries + 1, kept + len(wanted)
        at = stop
    if not binaries:
        sys.exit(f"the library has no machine code for sm_{architecture}")
    return binaries, kept


def _section(data: mmap.mmap, name: str) -> tuple[int, int] | None:
    """Offset and size of a section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 40)
    row_size, rows, names = struct.unpack_from("<HHH", data, 58)
    (strings,) = struct.unpack_from("<Q", data, table + names * row_size + 24)
    for row in range(rows):
        at = table + row * row_size
        text = strings + struct.unpack_from("<I", data, at)[0]
        if data[text : data.find(b"\0", text)] == name.encode():
            offset, size = struct.unpack_from("<QQ", data, at + 24)
            return offset, size
    return None


if __name__ == "__main__":
    print(keep_architecture(Path(sys.argv[1]), int(sys.argv[2])))
