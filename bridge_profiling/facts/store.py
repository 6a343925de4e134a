"""Keeps the facts about a run, so that a second command on the same captures computes none again.

One file in the folder of the captures' tables: a checksum, a header and each table as an Arrow stream. It is only a shortcut:
the header says what they were computed from, and a file that is damaged or of anything else is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import msgspec
import pyarrow as pa
from isal import isal_zlib

from bridge_profiling.atomic import write_atomically
from bridge_profiling.errors import TraceError
from bridge_profiling.facts.names import VARIABLE
from bridge_profiling.facts.rank import FactOptions
from bridge_profiling.facts.types import Answer, as_stream, table_of
from bridge_profiling.regular_files import read_regular
from bridge_profiling.traces.cache import SEAL, user_secret
from bridge_profiling.traces.discover import Capture
from bridge_profiling.traces.types import Caveat

#: A run of 256 ranks has facts of a tenth of this. Larger ones are not kept.
_MAX_BYTES = 1 << 28

#: Facts come from these; another release may compute another last digit.
_LIBRARIES = ("duckdb", "numpy", "pyarrow")

#: The code that facts come from.
_FOLDERS = ("facts", "traces")

#: Digits of the checksum at the begin of a file.
_CHECKSUM_DIGITS = 8

#: Bytes that the first table's offset is a multiple of, and so every table's: Arrow warns of arrays that begin elsewhere.
_ALIGNMENT = 64


class _Kept(msgspec.Struct, frozen=True):
    """A fact in the file: its caveats, and where its table begins and ends after the header."""

    caveats: tuple[Caveat, ...]
    begin: int
    end: int


class _Header(msgspec.Struct, frozen=True):
    """What the facts were computed from, and each by its name and options."""

    origin: str
    facts: dict[str, _Kept]


class KeptFacts:
    """The facts about a run that are kept in a file.

    Args:
        captures: all of the run's.
        entries: the folders of their tables, which were just checked or written.

    Raises:
        OSError: an entry is not accessible, so nothing can be kept.
    """

    def __init__(self, captures: Sequence[Capture], entries: Sequence[Path]) -> None:
        self._origin = _origin(captures, entries)
        names = [f"{capture.rank} {capture.path.absolute()}" for capture in captures]
        self._path = entries[0].parent / f"facts-{_digest(*names)}.arrow"
        self._facts, self._tables = self._read()

    def get(self, options: FactOptions) -> dict[str, Answer]:
        """The facts with these options by name; empty if none are kept."""
        found = ((msgspec.json.decode(key), kept) for key, kept in self._facts.items())
        mine = list(vars(options).values())
        return {name: Answer(table_of(self._stream(kept)), kept.caveats) for (name, *given), kept in found if given == mine}

    def add(self, facts: Mapping[FactOptions, Mapping[str, Answer]]) -> None:
        """Keep these facts too. Without space or permission, the file stays as it is."""
        added = {_key(name, options): fact for options, named in facts.items() for name, fact in named.items()}
        if added.keys() <= self._facts.keys():
            return
        streams = {key: (kept.caveats, self._stream(kept)) for key, kept in self._facts.items() if key not in added}
        streams |= {key: (fact.caveats, as_stream(fact.table)) for key, fact in added.items()}
        ends = itertools.accumulate(len(stream) for _, stream in streams.values())
        places = zip(streams.items(), ends, strict=True)
        kept = {key: _Kept(caveats, end - len(stream), end) for (key, (caveats, stream)), end in places}
        header = msgspec.json.encode(_Header(self._origin, kept))
        header += b" " * (-(_CHECKSUM_DIGITS + len(header) + 1) % _ALIGNMENT)
        content = b"".join([header, b"\n", *(stream for _, stream in streams.values())])
        if len(content) < _MAX_BYTES:
            text = _checksum(content) + content
            with contextlib.suppress(OSError):
                write_atomically(self._path, lambda temporary: temporary.write_bytes(text))

    def _stream(self, kept: _Kept) -> pa.Buffer:
        return self._tables.slice(kept.begin, kept.end - kept.begin)

    def _read(self) -> tuple[Mapping[str, _Kept], pa.Buffer]:
        try:
            content = read_regular(self._path, _MAX_BYTES)
            if content[:_CHECKSUM_DIGITS] == _checksum(memoryview(content)[_CHECKSUM_DIGITS:]):
                end = content.index(b"\n")  # JSON holds none
                header = msgspec.json.decode(content[_CHECKSUM_DIGITS:end], type=_Header)
                if header.origin == self._origin:
                    return header.facts, pa.py_buffer(content).slice(end + 1)
        except (OSError, TraceError, ValueError):
            pass
        return {}, pa.py_buffer(b"")


def _key(name: str, options: FactOptions) -> str:
    return json.dumps([name, *vars(options).values()])


def _checksum(content: bytes | memoryview) -> bytes:
    return b"%0*x" % (_CHECKSUM_DIGITS, isal_zlib.crc32(content))


def _origin(captures: Sequence[Capture], entries: Sequence[Path]) -> str:
    """A digest of what the facts depend on: tables, manifests, this code, its libraries, and a user's patterns of names."""
    found = [repr((capture.source, capture.rank, capture.rank_source, capture.manifest)) for capture in captures]
    tables = [(entry / SEAL).read_bytes() for entry in entries]
    patterns = os.environ.get(VARIABLE)
    # The secret: facts that came with the captures are not this user's.
    return _digest(_code(), user_secret(), *found, *tables, Path(patterns).read_bytes() if patterns else "")


@cache
def _code() -> str:
    """A digest of the code that reads captures and computes facts: 5 ms."""
    package = Path(__file__).parents[1]
    files = [path for pattern in ("*.py", *(f"{folder}/**/*.*" for folder in _FOLDERS)) for path in package.glob(pattern)]
    code = [path.read_bytes() for path in sorted(files) if path.suffix in (".py", ".toml")]
    return _digest(*code, *(f"{name} {version(name)}" for name in _LIBRARIES))


def _digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part if isinstance(part, bytes) else part.encode(errors="surrogatepass")).digest())
    return whole.hexdigest()[:32]
