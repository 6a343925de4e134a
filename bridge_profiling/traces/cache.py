"""Keeps a capture's tables as Parquet, so that it is parsed once. Knows which file they are of, not what they mean.

    <directory>/<digest of the path>-<digest of size, time and engine>/info.json, device_events.parquet, …

An entry is written under a temporary name and renamed: what is there is whole. Many ranks' entries of one directory can be
queried as one, `read_parquet('<directory>/*/device_events.parquet')`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from bridge_profiling.traces.tables import SCHEMAS
from bridge_profiling.traces.types import RankInfo, RankTables

#: To be raised when a reader gives other rows for the same file. Changed columns count by themselves.
ENGINE_VERSION = 4

#: The folder of entries beside a capture.
FOLDER = ".bridge_profiling"

#: Wins over the place beside a capture.
DIRECTORY_VARIABLE = "BRIDGE_PROFILING_CACHE"

#: Rows a Parquet row group holds: what a query reads at a time.
ROW_GROUP_ROWS = 1 << 17

#: What an entry holds besides its tables: what is known about the capture. Its presence makes a folder an entry.
INFO = "info.json"


class ParquetTables(Mapping[str, pa.Table]):
    """Tables of an entry, each read when it is asked for.

    Args:
        entry: the entry's folder.
    """

    def __init__(self, entry: Path) -> None:
        self.entry = entry

    def __getitem__(self, name: str) -> pa.Table:
        path = self.entry / f"{name}.parquet"
        if not path.is_file():
            raise KeyError(name)
        return pq.read_table(path)

    def columns(self, name: str, wanted: Sequence[str]) -> pa.Table:
        """Some columns of a table, without reading the others."""
        return pq.read_table(self.entry / f"{name}.parquet", columns=list(wanted))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.stem for path in self.entry.glob("*.parquet")))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def load(path: Path, read: Callable[[], RankTables], *, directory: Path | None = None, variant: str = "") -> RankTables:
    """A capture's tables: from the cache when it holds those of this very file, else read and kept.

    A cache that cannot be written is no error: then the capture is read each time.

    Args:
        path: the capture.
        read: reads it.
        directory: where entries lie; None takes `$BRIDGE_PROFILING_CACHE`, else `.bridge_profiling` beside the capture,
            else the user's cache.
        variant: what else the tables depend on, such as a rank that the file does not name.

    Raises:
        TraceError: what `read` raises.
        OSError: the capture is not there.
    """
    name = _entry_name(path, variant)
    folders = [directory] if directory is not None else _default_folders(path)
    for folder in folders:
        found = open_entry(folder / name)
        if found is not None:
            return found
    tables = read()
    for folder in folders:
        with contextlib.suppress(OSError):
            write(tables, folder / name)
            tables.entry = folder / name
            break
    return tables


def write(tables: RankTables, entry: Path) -> None:
    """Write an entry, in place of older ones of the same file.

    Args:
        tables: what to keep.
        entry: the entry's folder.

    Raises:
        OSError: there is no room, or no permission.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=entry.parent, ignore_cleanup_errors=True) as temporary:
        fresh = Path(temporary) / entry.name
        fresh.mkdir()
        for name in tables.tables:
            write_table(tables[name], fresh / f"{name}.parquet")
        (fresh / INFO).write_bytes(msgspec.json.encode(tables.info))
        for older in entry.parent.glob(f"{entry.name.partition('-')[0]}-*"):
            shutil.rmtree(older, ignore_errors=True)
        os.replace(fresh, entry)


def write_table(table: pa.Table, path: Path) -> None:
    """Write one table as Parquet.

    Times and ids are deltas, which zstd makes small; names are dictionaries.
    """
    deltas = {column.name: "DELTA_BINARY_PACKED" for column in table.schema if pa.types.is_integer(column.type)}
    pq.write_table(
        table,
        path,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
        use_dictionary=[column.name for column in table.schema if column.name not in deltas],
        column_encoding=deltas or None,
        write_statistics=True,
    )


def open_entry(entry: Path) -> RankTables | None:
    """The tables of an entry; None when it is none."""
    try:
        info = msgspec.json.decode((entry / INFO).read_bytes(), type=RankInfo)
    except (OSError, msgspec.DecodeError):
        return None
    return RankTables(info, ParquetTables(entry), entry)


def _default_folders(path: Path) -> list[Path]:
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return [Path(chosen)]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return [path.absolute().parent / FOLDER, Path(home) / "bridge_profiling"]


def _entry_name(path: Path, variant: str) -> str:
    stat = path.stat()
    schemas = {name: str(schema) for name, schema in SCHEMAS.items()}
    place = str(path.absolute())
    return f"{_digest(place)}-{_digest(repr((place, stat.st_size, stat.st_mtime_ns, ENGINE_VERSION, schemas, variant)))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
