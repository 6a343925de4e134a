"""Loads captures, and keeps their tables as Parquet, so that each is parsed once.

    <directory>/<digest of path and rank>-<digest of size, time and engine>/seal.json, info.json, device_events.parquet, …

An entry is written under a temporary name and renamed, so it is always complete. It is used while its seal fits its files
and the capture; one in the run's directory, which can come from anywhere, only if this user has written it. Otherwise the
capture is read again. The entries of a directory can be queried as one: `read_parquet('<directory>/*/device_events.parquet')`.

A seal's checksums guard against damage and mix-ups, and its signature with a secret of the user against entries that came with
somebody else's captures. Both take 0.14 ms for a trace of 2 MB, which takes 230 ms to read: ISA-L's CRC does 23 GB/s.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from isal import isal_zlib

from bridge_profiling.common.atomic import write_atomically
from bridge_profiling.common.errors import TraceError
from bridge_profiling.common.regular_files import open_regular, read_regular, size_bytes
from bridge_profiling.manifest import RankCapture
from bridge_profiling.traces.discover import Capture
from bridge_profiling.traces.tables import SCHEMAS, BlockTable, give_memory_back
from bridge_profiling.traces.types import RankInfo, RankTables, caveat

#: Raise it when a reader gives other rows or caveats for the same file. Changed columns count by themselves.
ENGINE_VERSION = 15

#: The folder of entries next to a capture, and the variable that names another one.
FOLDER, DIRECTORY_VARIABLE = ".bridge_profiling", "BRIDGE_PROFILING_CACHE"

#: Rows of a Parquet row group: what a query reads at a time.
ROW_GROUP_ROWS = 1 << 17

#: Files of an entry: the RankInfo, and the seal, which names ten files and has no more bytes.
INFO, SEAL, _MAX_SEAL_BYTES = "info.json", "seal.json", 1 << 20

#: The file of the secret in the user's cache, and its bytes.
_SECRET, _SECRET_BYTES = "secret", 32

#: Bytes at each end of a capture that are compared whenever its entry is used. A packed file ends with a checksum of all of it.
_END_BYTES = 1 << 16

_PIECE_BYTES = 1 << 22


class ParquetTable(BlockTable):
    """A table of an entry, read on use."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, wanted: Sequence[str] | None = None) -> pa.Table:
        """The table, or some of its columns, without reading the others."""
        # `read_table` would import PyArrow's data sets: 30 ms.
        with pq.ParquetFile(self._path) as file:
            return file.read(None if wanted is None else list(wanted))

    def blocks(self, wanted: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows, or those of some columns, as they were written: `ROW_GROUP_ROWS` at a time."""
        with pq.ParquetFile(self._path) as file:
            columns = None if wanted is None else list(wanted)
            if not file.num_row_groups:
                yield file.read(columns)
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns)


def load(capture: Capture, *, directory: Path | None = None, cached: bool = True, writer: str = "") -> RankTables:
    """One capture's tables, with what its manifest adds. A cache that cannot be written is not an error.

    Args:
        directory: where entries are; None takes `$BRIDGE_PROFILING_CACHE`, else `.bridge_profiling` next to the capture if that
            is in the run that was named, else the user's cache.
        cached: False reads the file itself, and keeps nothing.
        writer: begins the names of entries that are not complete: see `remove_unfinished`.

    Raises:
        TraceError: nothing could be read. The message names the file.
        OSError: the file is gone.
    """
    return _described(_load_cached(capture, directory, writer) if cached else _read(capture), capture)


def find(capture: Capture, *, directory: Path | None = None) -> RankTables | None:
    """One capture's tables as `load` returns them, if an entry has them: nothing is read or written.

    Raises:
        TraceError: the capture is not a regular file.
        OSError: the capture is gone.
    """
    origin = Origin.of(capture.path)
    kept = _kept(capture, _entries(capture, directory, origin), origin)
    return None if kept is None else _described(kept, capture)


def places(capture: Capture, directory: Path | None = None) -> list[Path]:
    """The folders that can be the entry of a capture as it is now, in the order in which they are used.

    Raises:
        TraceError: the capture is not a regular file.
        OSError: the capture is gone.
    """
    return _entries(capture, directory, Origin.of(capture.path))


def _read(capture: Capture) -> RankTables:
    # Imported on use: reading a Kineto trace needs no SQLite.
    reader = importlib.import_module(f"bridge_profiling.traces.{capture.source}")
    tables: RankTables = reader.read(capture.path, rank=capture.rank, rank_source=capture.rank_source)
    return tables


def _load_cached(capture: Capture, directory: Path | None, writer: str) -> RankTables:
    origin = Origin.of(capture.path)
    entries = _entries(capture, directory, origin)
    if (kept := _kept(capture, entries, origin)) is not None:
        return kept
    origin = origin.with_content()
    tables = _read(capture)
    # Of an nsys report that is not whole, a journal or a lock may be the reason, and go.
    unfinished = capture.source == "nsys" and tables.info.error is not None
    if unfinished or not origin.is_of(Origin.of(capture.path)):
        return tables  # it was written to meanwhile, or is being written
    for entry in entries:
        try:
            write(tables, entry, capture, origin, writer)
            return reopened(tables, entry)
        except OSError as error:
            # PyArrow's own text of a full disk takes two sentences.
            tables = replace(tables, unkept=os.strerror(error.errno) if error.errno else str(error))
    return tables


def reopened(tables: RankTables, entry: Path) -> RankTables:
    """Tables that an entry was just written of. Those made in blocks are read from the entry from now on, to free memory."""
    if any(isinstance(table, BlockTable) for table in tables.tables.values()):
        tables.tables = _stored(entry)
        give_memory_back()
    return RankTables(tables.info, tables.tables, entry)


def _kept(capture: Capture, entries: Iterable[Path], origin: Origin) -> RankTables | None:
    """The tables of the first entry that is whole and was made of this capture by this engine."""
    for entry in entries:
        seal = read_seal(entry)
        if seal is None or (seal.engine, seal.capture) != (_engine(), _identity(capture)):
            continue
        trusted = entry.parent.name != FOLDER or seal.is_signed
        if trusted and seal.origin is not None and seal.origin.is_of(origin) and (kept := open_entry(entry)) is not None:
            return kept
    return None


def write(
    tables: RankTables, entry: Path, capture: Capture | None = None, origin: Origin | None = None, writer: str = ""
) -> None:
    """Write an entry, in place of older ones of the same file. Raises OSError without space or permission."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{writer}", dir=entry.parent, ignore_cleanup_errors=True) as temporary:
        fresh = Path(temporary) / entry.name
        fresh.mkdir()
        for name, table in tables.tables.items():
            write_blocks(tables.blocks(name), SCHEMAS[name], fresh / f"{name}.parquet")
            if isinstance(table, BlockTable):
                give_memory_back()
        (fresh / INFO).write_bytes(msgspec.json.encode(tables.info))
        identity = "" if capture is None else _identity(capture)
        write_seal(fresh, sorted(os.listdir(fresh)), engine=_engine(), capture=identity, origin=origin)
        if capture is not None and origin is not None and _kept(capture, [entry], origin) is not None:
            return  # another process was first, and may be reading it
        for older in entry.parent.glob(f"{entry.name.partition('-')[0]}-*"):
            _remove(older)
        os.replace(fresh, entry)


def remove_unfinished(captures: Iterable[Capture], directory: Path | None, writer: str) -> None:
    """Remove what killed processes have left where they wrote entries; `writer` is the name that they were given."""
    for folder in {folder for capture in captures for folder in _folders(capture, directory)}:
        for left in folder.glob(f".{writer}*"):
            _remove(left)


def _remove(entry: Path) -> None:
    """Remove an entry, or whatever is in its place."""
    if entry.is_symlink() or not entry.is_dir():
        entry.unlink(missing_ok=True)
    else:
        shutil.rmtree(entry, ignore_errors=True)


def write_blocks(blocks: Iterable[pa.Table], schema: pa.Schema, path: Path) -> None:
    """Write the rows of one table as Parquet. Times and ids are packed deltas, and names are dictionaries, with LZ4 on top.

    A rank of 14 MB takes a third less time than with zstd and statistics of all columns, and 6% more space. `rank` keeps its
    statistics: they select the files that a query reads.
    """
    deltas = {column.name: "DELTA_BINARY_PACKED" for column in schema if pa.types.is_integer(column.type)}
    with pq.ParquetWriter(
        path,
        schema,
        compression="lz4",
        use_dictionary=[column.name for column in schema if column.name not in deltas],
        column_encoding=deltas or None,
        write_statistics=["rank"],
    ) as writer:
        for block in blocks:
            writer.write_table(block, row_group_size=ROW_GROUP_ROWS)


def open_directory(entry: Path) -> RankTables | None:
    """The tables of an entry that a user names; None when it is not whole, or of another engine or with other columns."""
    seal = read_seal(entry)
    if seal is None or seal.engine != _engine():
        return None
    try:
        found = {path.stem: pq.read_schema(path).remove_metadata() for path in entry.glob("*.parquet")}
    except (OSError, pa.ArrowException):
        return None
    fits = all(name in SCHEMAS and schema.equals(SCHEMAS[name]) for name, schema in found.items())
    return open_entry(entry) if fits else None


def open_entry(entry: Path) -> RankTables | None:
    """The tables of an entry that this run has written or checked; None when the folder is not one."""
    try:
        info = msgspec.json.decode((entry / INFO).read_bytes(), type=RankInfo)
    except (OSError, msgspec.DecodeError):
        return None
    return RankTables(info, _stored(entry), entry)


def _stored(entry: Path) -> dict[str, BlockTable]:
    return {path.stem: ParquetTable(path) for path in sorted(entry.glob("*.parquet"))}


def _folders(capture: Capture, directory: Path | None) -> list[Path]:
    if directory is not None:
        return [directory]
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return [Path(chosen)]
    # Links can lead anywhere, and next to a file that was named are files of others.
    own = Path(os.path.realpath(capture.path.parent), FOLDER)
    in_run = capture.run is not None and own.is_relative_to(os.path.realpath(capture.run)) and not own.is_symlink()
    return [own] * bool(in_run and user_secret()) + [folder for folder in [user_cache()] if folder is not None]


def _entries(capture: Capture, directory: Path | None, origin: Origin) -> list[Path]:
    version = repr((origin.size, origin.mtime_ns, _engine(), _identity(capture)))
    name = f"{_digest(f'{capture.rank} {origin.path}')}-{_digest(version)}"
    return [folder / name for folder in _folders(capture, directory)]


def _engine() -> str:
    """Of entries with another one, rows or columns may differ."""
    return _digest(repr((ENGINE_VERSION, {name: str(schema) for name, schema in SCHEMAS.items()})))


def _identity(capture: Capture) -> str:
    return f"{capture.rank} {capture.rank_source}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _described(tables: RankTables, capture: Capture) -> RankTables:
    info = tables.info if capture.manifest is None else _with_manifest(tables, capture.manifest)
    if info.world_size is not None and info.rank >= info.world_size:
        outside = caveat("rank_outside_world", file=info.files[0], rank=info.rank, world_size=info.world_size)
        info = replace(info, world_size=None, caveats=[*info.caveats, outside])
    return replace(tables, info=info)


def _with_manifest(tables: RankTables, capture: RankCapture) -> RankInfo:
    """What is known about a capture, with what its manifest adds unless it contradicts the capture."""
    manifest, info = capture.manifest, tables.info
    captured = set(capture.captured)
    # Snapshots have none.
    found = set(tables.columns("iterations", ["iteration"])["iteration"].to_pylist()) if captured else set()
    contradicts = None
    if info.rank != capture.rank:
        ranks = {"rank": capture.rank, "path": info.files[0], "other": info.rank}
        contradicts = caveat("manifest_contradicts.rank", file=capture.path, **ranks)
    elif found and captured.isdisjoint(found):
        ends = {"first": min(captured), "last": max(captured), "found_first": min(found), "found_last": max(found)}
        contradicts = caveat("manifest_contradicts.window", file=capture.path, **ends)
    if contradicts:
        return replace(info, caveats=[*info.caveats, contradicts])
    caveats = list(info.caveats)
    lost = sorted(captured - found) if found and not info.error else []
    if lost:
        caveats.append(caveat("manifest_differs.iteration", manifest=capture.path, iteration=lost[0]))
    if None not in (info.world_size, manifest.world_size) and info.world_size != manifest.world_size:
        sizes = {"said": manifest.world_size, "captured": info.world_size}
        caveats.append(caveat("manifest_differs.ranks", manifest=capture.path, **sizes))
    if manifest.status != "complete":
        reason = manifest.reason or "its manifest gives no reason"
        caveats.append(caveat("capture_incomplete", status=manifest.status, reason=reason))
    coordinates = {name: (place[0], place[1]) for name, place in manifest.coordinates.items()}
    return replace(
        info,
        coordinates=coordinates or info.coordinates,
        world_size=info.world_size or manifest.world_size,
        host=manifest.host or info.host,
        versions=info.versions | {name: str(version) for name, version in manifest.versions.items() if version},
        partial=info.partial or manifest.status == "partial",
        caveats=caveats,
    )


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


def read_seal(entry: Path, *, content: bool = True) -> Seal | None:
    """The seal of an entry whose files are as they were written, by their sizes and their `content`; None if there is none."""
    try:
        seal = msgspec.json.decode(read_regular(entry / SEAL, _MAX_SEAL_BYTES), type=Seal)
        whole = all((entry / name).stat().st_size == size for name, (size, _) in seal.files.items())
        if whole and content:
            whole = set(os.listdir(entry)) == {SEAL, *seal.files}
            whole = whole and all(_checksum(entry / name) == checksum for name, (_, checksum) in seal.files.items())
    except (OSError, TraceError, msgspec.DecodeError):
        return None
    return seal if whole else None


def is_whole(entry: Path) -> bool:
    """Whether an entry still has all of its files, each of its size. Their content is not read again."""
    return read_seal(entry, content=False) is not None


def _checksum(path: Path) -> int:
    checksum = 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = isal_zlib.crc32(piece, checksum)
    return checksum
