"""An nsys report as an open SQLite file: which tables and columns it has, and their numbers as numpy columns.

Knows nothing of what they mean, and never writes to the file. nsys' tables change between versions, so a table or a column
that is missing is no error: it has no rows, or no values.

Why sqlite3, and not ADBC: 1.0 M kernels with 8 columns take 1.05 s of CPU when SQLite itself joins each column's numbers
into one text that numpy parses, 2.1 s as Python tuples, and 0.77 s through adbc-driver-sqlite 1.13 with its import (medians
of three, an H200 report scaled up 134-fold). A quarter of this step is not worth 20 MB of drivers, which moreover take a
column's type from its first rows.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import shutil
import sqlite3
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from bridge_profiling.errors import CaptureError, TraceError
from bridge_profiling.nsys.command import export_command
from bridge_profiling.nsys.version import find_nsys, without_injection
from bridge_profiling.traces.tables import NULL, Integers

#: Rows that SQLite joins at a time: a few MB of text.
_ROWS = 1 << 16

_MAGIC = b"SQLite format 3\0"

#: Between the texts of one piece; a space in those that have one.
SEPARATOR = "\x1f"

#: An .xz file that unpacks to more is refused. Real reports shrink 6-fold; the largest known are some 10 GB.
_MAX_UNPACKED_BYTES = 64 << 30
_MAX_RATIO = 200
_RATIO_CHECKED_BYTES = 64 << 20

_EXPORT_SECONDS = 3600


class Database:
    """An nsys SQLite export, open for reading.

    Args:
        path: the SQLite file.
        name: the file that errors name, where the SQLite file is a temporary one.

    Raises:
        TraceError: this is no SQLite file. Every method raises it when SQLite cannot read on.
    """

    def __init__(self, path: Path, name: Path) -> None:
        self.name = name
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise TraceError(f"{name} is no SQLite file: it does not begin as one")
        # Immutable: no lock, and no journal looked for beside a report on a read-only file system.
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        # Text that is no UTF-8 must not cost the report.
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            self.rows("PRAGMA trusted_schema = OFF")  # a file of somebody's: its own definitions call no functions
            tables = [name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
            self.tables = {table: [row[1] for row in self.rows(f"PRAGMA table_info({quoted(table)})")] for table in tables}
        except TraceError:
            self._connection.close()
            raise

    def __enter__(self) -> Database:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is such a table with these columns."""
        return set(columns) <= set(self.tables.get(table, ())) and table in self.tables

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """What a query finds: for small tables."""
        try:
            return self._connection.execute(query, parameters).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:  # the last: SQLite names what is damaged
            raise TraceError(f"{self.name} cannot be read: {error}") from error

    def columns(self, table: str, names: Sequence[str], where: str = "1") -> dict[str, Integers]:
        """Columns of integers; NULL where a value is null, or the column or the table is missing.

        Args:
            table: its name.
            names: of the columns.
            where: an SQL condition for the rows.

        Raises:
            TraceError: a column holds what is no integer.
        """
        present = [name for name in names if name in self.tables.get(table, ())]
        pieces: dict[str, list[Integers]] = {name: [] for name in present}
        rows = 0
        chosen = [f"ifnull({quoted(name)}, {NULL})" for name in present]
        for count, texts in self._pieces(table, chosen, where):
            rows += count
            for name, text in zip(present, texts, strict=True):
                pieces[name].append(self._integers(f"{table}.{name}", text, count))
        # One after another, each column's pieces gone when it is whole: not all of them twice.
        return {name: np.concatenate(pieces.pop(name)) if pieces.get(name) else np.full(rows, NULL) for name in names}

    def texts(self, table: str, expression: str, where: str = "1") -> Iterator[list[str]]:
        """Pieces of one column of texts, in the order of `columns`; "" where it is null.

        Args:
            table: its name.
            expression: the column, or SQL that makes a text of it.
            where: an SQL condition for the rows.
        """
        for count, (text,) in self._pieces(
            table, [f"replace(ifnull({expression}, ''), char(31), ' ')"], where, separator=SEPARATOR
        ):
            found = str(text).split(SEPARATOR)
            if len(found) != count:
                raise TraceError(f"{self.name} cannot be read: the texts of {table} are damaged")
            yield found

    def _pieces(
        self, table: str, expressions: Sequence[str], where: str, *, separator: str = ","
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Each piece's number of rows, and each column's values joined into a text."""
        if not expressions or table not in self.tables:
            return
        named = ", ".join(f"{expression} AS c{place}" for place, expression in enumerate(expressions))
        joined = ", ".join(f"group_concat(c{place}, '{separator}')" for place in range(len(expressions)))
        query = (
            f"SELECT count(*), max(row), {joined} FROM (SELECT rowid AS row, {named} FROM {quoted(table)}"
            f" WHERE rowid > ? AND ({where}) ORDER BY rowid LIMIT {_ROWS})"
        )
        last = -(1 << 63)
        while True:
            ((count, reached, *texts),) = self.rows(query, (last,))
            if count:
                yield count, tuple(texts)
            if count < _ROWS:
                return
            last = reached

    def _integers(self, column: str, text: Any, count: int) -> Integers:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                found = np.fromstring(str(text), np.int64, sep=",")
            except (DeprecationWarning, ValueError):
                found = np.empty(0, np.int64)
        if len(found) != count:
            raise TraceError(f"{self.name} cannot be read: {column} holds what is no integer")
        return found

    def strings(self, ids: Integers) -> dict[int, str]:
        """Texts of `StringIds`, which can hold millions: those asked for only."""
        wanted = np.unique(ids[ids != NULL]).tolist()
        found: dict[int, str] = {}
        if self.has("StringIds", "id", "value"):
            for begin in range(0, len(wanted), 500):
                some = wanted[begin : begin + 500]
                marks = ",".join("?" * len(some))
                found |= {
                    row[0]: str(row[1]) for row in self.rows(f"SELECT id, value FROM StringIds WHERE id IN ({marks})", some)
                }
        return found

    def enumeration(self, table: str) -> dict[int, str]:
        """The names of an ENUM_… table's numbers, as `CUDA_MEMCPY_KIND_HTOD`; empty where the version has none."""
        return (
            {int(row[0]): str(row[1]) for row in self.rows(f"SELECT id, name FROM {quoted(table)}")}
            if self.has(table, "id", "name")
            else {}
        )


def quoted(name: str) -> str:
    """A table's or column's name for SQL."""
    return '"' + name.replace('"', '""') + '"'


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Database]:
    """The database of a report: the SQLite export itself, or one made of an `.nsys-rep`; either may be packed as `.xz`.

    What must be unpacked or exported goes to a temporary directory, and is gone afterwards.

    Raises:
        TraceError: it cannot be read or exported.
        OSError: it is not there.
    """
    with tempfile.TemporaryDirectory(prefix="bridge_profiling-", ignore_cleanup_errors=True) as temporary:
        plain = path
        if path.suffix == ".xz":
            plain = Path(temporary, path.name.removesuffix(".xz"))
            _unpack(path, plain)
        if plain.suffix == ".nsys-rep":
            plain = _export(path, plain, Path(temporary, "report.sqlite"))
        with Database(plain, path) as database:
            yield database


def _unpack(path: Path, to: Path) -> None:
    packed = path.stat().st_size
    try:
        with lzma.open(path) as source, to.open("wb") as target:
            while piece := source.read(1 << 22):
                target.write(piece)
                done = target.tell()
                if done > _MAX_UNPACKED_BYTES or (done > _RATIO_CHECKED_BYTES and done > _MAX_RATIO * packed):
                    raise TraceError(f"{path} unpacks to more than {_MAX_RATIO} times its size: that is no report")
    except (lzma.LZMAError, EOFError) as error:
        raise TraceError(f"{path} cannot be unpacked: {error}") from error


def _export(path: Path, report: Path, to: Path) -> Path:
    """Export a report with the nsys of this machine."""
    try:
        nsys = find_nsys().executable
    except CaptureError as error:
        raise TraceError(
            f"{path} is an nsys report, which only nsys itself can read, and there is none here ({error}); install Nsight"
            " Systems, or record with NsysPlugin(export_sqlite=True)"
        ) from error
    # nsys names its export after the report and looks for one beside it: a link keeps the report's folder as it is.
    link = to.with_suffix(".nsys-rep")
    if not link.exists():
        try:
            os.symlink(report.absolute(), link)
        except OSError:
            shutil.copyfile(report, link)
    try:
        done = subprocess.run(
            export_command(nsys, link, to),
            env=without_injection(os.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_EXPORT_SECONDS,
            check=False,
        )
    except (OSError, CaptureError, subprocess.TimeoutExpired) as error:
        raise TraceError(f"{path} cannot be exported: {error}") from error
    if done.returncode or not to.exists():
        said = " ".join(line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip() and "[" not in line)
        raise TraceError(f"{path} cannot be exported: nsys says {said[:500] or f'nothing, and ends with {done.returncode}'}")
    return to
