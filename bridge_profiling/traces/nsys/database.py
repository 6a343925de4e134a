"""An nsys report as an open SQLite file: its tables and columns, with numbers as numpy arrays.

nsys' tables change between versions: a missing table has no rows, and a missing column no values.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sqlite3
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces.bounds import MAX_NAME, open_regular
from bridge_profiling.traces.nsys.pages import Piece, TableFile, UnusualError
from bridge_profiling.traces.tables import NULL, Columns, Integers, to_int64


def durations(start: Integers, end: Integers) -> Integers:
    """Ends less starts; NULL where one is, -1 where it is negative: times of damaged rows exceed 64 bits together."""
    return np.where((start == NULL) | (end == NULL), NULL, np.where(end < start, -1, end - start))


#: Rows that SQLite gives at a time: Python's objects for more exceed the processor's cache.
_ROWS = 1 << 12

_MAGIC = b"SQLite format 3\0"

#: Bytes of a value in SQLite.
_MAX_VALUE_BYTES = 1 << 28

#: SQLite's steps per byte of the file and query; a real report takes 2. Damaged pages can list each other in circles.
_STEPS_PER_BYTE, _FREE_STEPS, _STEPS_AT_A_TIME = 200, 10_000_000, 1_000_000

#: A table's name with the version of its columns.
_VERSION = re.compile(r"(\w+)_V(\d{1,4})")

#: Where SQLite locks a file that is written: the pending and the reserved byte.
_LOCKED_BYTES = (0x40000000, 2)


@dataclass(frozen=True)
class Among:
    """A condition: an integer column is in one of some ranges, both ends included."""

    column: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def sql(self) -> str:
        """The condition in SQL."""
        return "(" + " OR ".join(f"{quoted(self.column)} BETWEEN {low} AND {high}" for low, high in self.ranges) + ")"

    def holds(self, values: Integers) -> NDArray[np.bool_]:
        """For which values it holds; for NULL it does not."""
        return np.logical_or.reduce([(values >= low) & (values <= high) for low, high in self.ranges])


def sql_of(where: Sequence[Among]) -> str:
    """Conditions that all have to hold, in SQL."""
    return " AND ".join([each.sql for each in where]) or "1"


#: Columns that rows need an integer in, where they meet some conditions.
Needed = Mapping[str, Sequence[Among]]
_NOTHING_NEEDED: Needed = {}


class Database:
    """An nsys SQLite export, open for reading. Errors name the file `name`: the SQLite file can be a temporary one.

    Raises:
        TraceError: this is not an SQLite file. Every method raises it when SQLite cannot read the file.
    """

    def __init__(self, path: Path, name: Path) -> None:
        self.name = name
        self._file = file = open_regular(path)
        if file.read(len(_MAGIC)) != _MAGIC:
            file.close()
            raise TraceError(f"{name} is not an SQLite file")
        self.pending = _pending(path, file)  # why the report may not be whole; None if it is
        self._steps = _FREE_STEPS + _STEPS_PER_BYTE * os.fstat(file.fileno()).st_size
        # Immutable: no lock, and no search for a journal next to a report on a read-only file system.
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        try:
            self.rows("PRAGMA trusted_schema = OFF")  # the file's own definitions call no functions
            computed = "type = 'view' OR sql LIKE 'CREATE VIRTUAL%'"
            self._views = {name for (name,) in self.rows(f"SELECT name FROM sqlite_master WHERE {computed}")}
            tables = [name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
            self._tables = {table: [row[1] for row in self.rows(f"PRAGMA table_info({quoted(table)})")] for table in tables}
            self._newest = self._versions_alone()
        except TraceError:
            self.close()
            raise

    def _versions_alone(self) -> dict[str, str]:
        """Names without a version of tables that exist with one alone, such as NVTX_EVENTS_V3: the newest has both names."""
        versions: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for table in self._tables:
            if (version := _VERSION.fullmatch(table)) and version[1] not in self._tables:
                versions[version[1]].append((int(version[2]), table))
        newest = {table: max(each)[1] for table, each in versions.items()}
        for table, named in newest.items():
            self._tables[table] = self._tables[named]
            self.rows(f"CREATE TEMP VIEW {quoted(table)} AS SELECT * FROM main.{quoted(named)}")
        return newest

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
        self._file.close()

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is such a table with these columns.

        Raises:
            TraceError: it is a view or a virtual table, which computes its rows and need not end.
        """
        if table in self._views:
            raise TraceError(f"{self.name} cannot be read: {table} is a view or a virtual table, and nsys writes plain ones")
        return table in self._tables and set(columns) <= set(self._tables[table])

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The result of a query; for small tables."""
        return list(itertools.chain.from_iterable(self._fetched(query, parameters)))

    def _fetched(self, query: str, parameters: Sequence[Any]) -> Iterator[list[tuple[Any, ...]]]:
        """The same, some rows at a time."""
        steps = iter(range(0, self._steps, _STEPS_AT_A_TIME))
        self._connection.set_progress_handler(lambda: next(steps, None) is None, _STEPS_AT_A_TIME)
        try:
            yield from iter(partial(self._connection.execute(query, parameters).fetchmany, _ROWS), [])
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:  # the last: SQLite names the damaged part
            raise TraceError(f"{self.name} cannot be read: {error}") from error

    def select(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """Some columns of a small table; empty where one of them is missing."""
        return self.rows(f"SELECT {', '.join(map(quoted, columns))} FROM {quoted(table)}") if self.has(table, *columns) else []

    def columns(
        self, table: str, names: Sequence[str], where: Sequence[Among] = (), needed: Needed = _NOTHING_NEEDED
    ) -> tuple[dict[str, Integers], int]:
        """Columns of integers, NULL where a value, the column or the table is missing.

        With how many rows of the table lack an integer that they need.
        """
        found, lost = Columns(), 0
        present = [name for name in names if self.has(table, name)]
        for piece in self.pieces(table, present, where, needed=needed):
            lost += piece.without
            found.add(**piece.integers)
        return {name: found.take(name) if name in present else np.full(len(found), NULL) for name in names}, lost

    def pieces(
        self,
        table: str,
        names: Sequence[str],
        where: Sequence[Among] = (),
        text: str | None = None,
        needed: Needed = _NOTHING_NEEDED,
    ) -> Iterator[Piece]:
        """A table's rows by rowid: columns of integers that it has, and one of texts, of which null ones are empty.

        A piece can be without rows that meet the conditions. Rows that lack an integer which they need are counted: see
        `Piece.without`.
        """
        if not self.has(table) or not (names or text):
            return
        needed = {name: conditions for name, conditions in needed.items() if self.has(table, name)}
        deciding = {*needed, *(each.column for each in (*where, *itertools.chain(*needed.values())))}
        last = NULL
        try:
            for piece in self._from_pages(table, {*names, *deciding}, text):
                yield _chosen(piece, names, where, needed)
                last = piece.last
        except UnusualError:
            lacking = [f"typeof({quoted(name)}) != 'integer'" for name in needed]
            condition = " OR ".join([sql_of(where), *lacking])
            for piece in self._from_sqlite(table, {*names} - deciding, deciding, text, condition, last):
                yield _chosen(piece, names, where, needed)

    def _from_pages(self, table: str, names: set[str], text: str | None) -> Iterator[Piece]:
        table = self._newest.get(table, table)
        described = {row[1]: row for row in self.rows(f"PRAGMA table_xinfo({quoted(table)})")}
        # A column that is the row's number, or computed, is not in the record. Others are converted as their type demands.
        plain = all(kept[5] == 0 and kept[6] == 0 for kept in described.values())
        if not plain or not all("INT" in described[name][2].upper() for name in names):
            raise UnusualError
        if text is not None and described[text][2].upper() != "TEXT":
            raise UnusualError
        root = self.rows("SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?", (table,))[0][0]
        places = {name: described[name][0] for name in names}
        yield from TableFile(self._file).rows(root, places, None if text is None else described[text][0])

    def _from_sqlite(
        self, table: str, names: set[str], deciding: set[str], text: str | None, condition: str, last: int
    ) -> Iterator[Piece]:
        """The rows after one that meet a condition. Whatever is not an integer is null in the columns that decide."""
        integers = [
            *map(quoted, names),
            *(f"CASE typeof({column}) WHEN 'integer' THEN {column} END" for column in map(quoted, deciding)),
        ]
        # Functions of SQLite end a text at a zero, and count characters.
        texts = [] if text is None else [f"CAST(substr(ifnull({quoted(text)}, ''), 1, {MAX_NAME}) AS BLOB)"]
        wanted = ", ".join(["rowid", *integers, *texts])
        named = quoted(self._newest.get(table, table))  # a view has no rowid
        query = f"SELECT {wanted} FROM {named} WHERE rowid > ? AND ({condition}) ORDER BY rowid"
        for rows in self._fetched(query, (last,)):
            found = dict(zip(("", *names, *deciding, text), zip(*rows, strict=True), strict=False))
            columns = {}
            for name in (*names, *deciding):
                try:
                    columns[name] = to_int64(pa.array(found[name], pa.int64()))
                except (pa.ArrowInvalid, TypeError) as error:
                    problem = f"{table}.{name} holds something other than integers"
                    raise TraceError(f"{self.name} cannot be read: {problem}") from error
            yield Piece(rows[-1][0], columns, None if text is None else pa.array(found[text], pa.binary()))

    def strings(self, ids: Integers) -> dict[int, str]:
        """Some texts of `StringIds`, which can hold millions.

        Raises:
            TraceError: the report has no such table.
        """
        wanted = np.unique(ids[ids != NULL]).tolist()
        if wanted and not self.has("StringIds", "id", "value"):
            raise TraceError(f"{self.name} cannot be read: its table StringIds, which holds all names, is missing")
        found: dict[int, str] = {}
        for begin in range(0, len(wanted), 500):
            some = wanted[begin : begin + 500]
            rows = self.rows(
                f"SELECT id, substr(value, 1, {MAX_NAME}) FROM StringIds WHERE id IN ({','.join('?' * len(some))})", some
            )
            found |= {number: str(text) for number, text in rows if text is not None}
        return found


def _chosen(piece: Piece, names: Sequence[str], where: Sequence[Among], needed: Needed) -> Piece:
    """The rows of a piece that meet some conditions."""

    def meeting(conditions: Sequence[Among]) -> NDArray[np.bool_]:
        return np.logical_and.reduce([each.holds(piece.integers[each.column]) for each in conditions])

    lacking = [(piece.integers[name] == NULL) & meeting(conditions) for name, conditions in needed.items()]
    without, met = int(np.logical_or.reduce(lacking).sum()), meeting(where)
    integers, texts = {name: piece.integers[name] for name in names}, piece.texts
    if not met.all():
        integers = {name: values[met] for name, values in integers.items()}
        texts = None if texts is None else texts.filter(pa.array(met))
    return replace(piece, integers=integers, texts=texts, without=without)


def _pending(path: Path, file: BinaryIO) -> str | None:
    """What says that a database is not whole: a journal of changes next to it, or a process that writes it."""
    for suffix in ("-wal", "-journal"):
        journal = path.with_name(path.name + suffix)
        with contextlib.suppress(OSError):
            if journal.stat().st_size:
                return f"changes are pending in {journal.name}, which are not read"
    if sys.platform == "linux":
        import fcntl

        asked = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, *_LOCKED_BYTES, 0)
        with contextlib.suppress(OSError):
            lock, *_, process = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
            if lock != fcntl.F_UNLCK:
                return f"process {process} is writing it"
    return None


def quoted(name: str) -> str:
    """A table's or column's name for SQL."""
    return '"' + name.replace('"', '""') + '"'
