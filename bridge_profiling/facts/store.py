"""Keeps facts in files: those about a capture, and those about a run, so that a second command computes none again.

A file is a signed line, a header and the tables as Arrow streams, compressed together. It is only a shortcut: the header says
what the facts were computed from, and a file that is damaged, of anything else or not this user's is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import msgspec
import pyarrow as pa
from isal import isal_zlib

from bridge_profiling.common.atomic import write_atomically
from bridge_profiling.common.errors import TraceError
from bridge_profiling.common.regular_files import read_regular
from bridge_profiling.facts.names import CHECKPOINT, DATA_LOADING, VARIABLE
from bridge_profiling.facts.types import Answer
from bridge_profiling.traces.cache import SEAL, Origin, user_secret
from bridge_profiling.traces.discover import Capture
from bridge_profiling.traces.types import Caveat, RankInfo

#: A run of 256 ranks has facts of a tenth of this. Larger ones are not kept.
_MAX_BYTES = 1 << 28

#: Facts come from these; another release may compute another last digit.
_LIBRARIES = ("duckdb", "numpy", "pyarrow")

#: The code that facts come from.
_FOLDERS = ("common", "facts", "traces")

#: All tables at once: to compress each takes eight times as long.
_CODEC = "zstd"


@dataclass(frozen=True)
class FactOptions:
    """What changes the facts about a capture besides its events.

    Args:
        data_loading: regular expression for names of ranges that load data.
        checkpoint: regular expression for names of ranges that save a checkpoint.
    """

    data_loading: str = DATA_LOADING
    checkpoint: str = CHECKPOINT


#: The default names of ranges.
DEFAULT_OPTIONS = FactOptions()


class _Table(msgspec.Struct, frozen=True):
    """A fact in a file: its caveats, and where its table begins and ends after the header."""

    caveats: tuple[Caveat, ...]
    begin: int
    end: int


class _Header(msgspec.Struct, frozen=True):
    """What facts were computed from, and each by its name."""

    facts: dict[str, _Table]
    size: int  # of the tables, uncompressed
    made_of: str = ""  # a digest of everything but the capture
    origin: Origin | None = None  # of the capture
    info: RankInfo | None = None  # about the capture


class Packed:
    """Facts as bytes.

    Raises:
        ValueError: the bytes are damaged, or are not this user's.
    """

    def __init__(self, content: bytes) -> None:
        first, header, tables = content.split(b"\n", 2)  # JSON holds no line break
        if first != _signed(header, tables):
            raise ValueError("not a file of facts")
        self.content, self.header = content, msgspec.json.decode(header, type=_Header)
        self._tables = pa.decompress(tables, self.header.size, _CODEC)

    def __getitem__(self, name: str) -> Answer:
        kept = self.header.facts[name]
        return Answer(pa.ipc.open_stream(self._tables.slice(kept.begin, kept.end - kept.begin)).read_all(), kept.caveats)


def packed(facts: Mapping[str, Answer], **about: object) -> bytes:
    """Facts by name as bytes; `about` are other fields of the header."""
    streams = [_stream(fact.table) for fact in facts.values()]
    places = zip(facts.items(), streams, itertools.accumulate(map(len, streams)), strict=True)
    kept = {name: _Table(fact.caveats, end - len(stream), end) for (name, fact), stream, end in places}
    tables = b"".join(streams)
    header = msgspec.json.encode({"facts": kept, "size": len(tables), **about})
    tables = pa.compress(tables, _CODEC, asbytes=True)
    return b"\n".join([_signed(header, tables), header, tables])


def _stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _signed(header: bytes, tables: bytes) -> bytes:
    """Checksums, and a signature: facts that came with the captures are not this user's."""
    checksum = b"%08x" % isal_zlib.crc32(tables)
    return checksum + hashlib.blake2b(checksum + header, key=user_secret(), digest_size=16).hexdigest().encode()


def fact_files(capture: Capture, entries: Iterable[Path]) -> list[Path]:
    """Where the facts about a capture can be: in its run, and next to the entries of the cache that can have its tables."""
    files = [entry.with_name(f"{entry.name}.facts") for entry in entries]
    folder = capture.path.parent
    root = folder.parents[1] if len(folder.parents) > 1 else folder
    if (root / "manifest" / folder.name).is_dir() and user_secret():
        profiler = "torch" if capture.source == "kineto" else capture.source
        files.insert(0, root / "facts" / folder.name / f"rank-{capture.rank}.{profiler}.facts")
    return files


def find_facts(capture: Capture, files: Iterable[Path]) -> Packed | None:
    """The facts about a capture as it is now, with the default options, from the first file that has them."""
    for path in files:
        with contextlib.suppress(OSError, TraceError, ValueError):
            kept = Packed(read_regular(path, _MAX_BYTES))
            origin = kept.header.origin
            if kept.header.made_of == _about(capture) and origin is not None and origin.is_of(Origin.of(capture.path)):
                return kept
    return None


def keep_facts(capture: Capture, info: RankInfo, facts: Mapping[str, Answer], path: Path) -> bytes:
    """Write the facts about a capture, with the default options, to a file. Returns its content.

    Raises:
        OSError: without space or permission.
    """
    content = packed(facts, info=info, made_of=_about(capture), origin=Origin.of(capture.path).with_content())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return content


def _about(capture: Capture) -> str:
    return _digest(_code(), repr((capture.source, capture.rank, capture.rank_source, capture.manifest)), _patterns())


class KeptFacts:
    """The facts about a run that are kept in a file.

    Args:
        captures: all of the run's.
        entries: the folders of their tables, which were just checked or written.
        options: of the facts.

    Raises:
        OSError: an entry is not accessible, so nothing can be kept.
    """

    def __init__(self, captures: Sequence[Capture], entries: Sequence[Path], options: FactOptions) -> None:
        self._made_of = _digest(*map(_about, captures), *((entry / SEAL).read_bytes() for entry in entries))
        names = [f"{capture.rank} {capture.path.absolute()}" for capture in captures]
        self._path = entries[0].parent / f"facts-{_digest(*names, *astuple(options))}.arrow"
        #: The facts that are kept, by name.
        self.found: dict[str, Answer] = {}
        with contextlib.suppress(OSError, TraceError, ValueError):
            kept = Packed(read_regular(self._path, _MAX_BYTES))
            if kept.header.made_of == self._made_of:
                self.found = {name: kept[name] for name in kept.header.facts}

    def keep(self, facts: Mapping[str, Answer]) -> None:
        """Keep these facts, if there are others than before. Without space or permission, the file stays as it is."""
        if facts.keys() <= self.found.keys():
            return
        content = packed(facts, made_of=self._made_of)
        if len(content) < _MAX_BYTES:
            with contextlib.suppress(OSError):
                write_atomically(self._path, lambda temporary: temporary.write_bytes(content))


def _patterns() -> str:
    """A digest of a user's own patterns of names."""
    patterns = os.environ.get(VARIABLE)
    return _digest(Path(patterns).read_bytes()) if patterns else ""


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
