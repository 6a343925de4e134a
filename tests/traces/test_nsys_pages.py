"""Tables that are read from the pages of the file, or in blocks, have the rows of SQLite, which reads whatever is unusual."""

import io
import itertools
import sqlite3

import numpy as np
import pyarrow as pa
import pytest

from bridge_profiling.traces import cache, nsys
from bridge_profiling.traces.discover import Capture
from bridge_profiling.traces.nsys.database import MAX_NAME, Among, Database
from bridge_profiling.traces.nsys.pages import TableFile
from tests.traces.nsys_files import small_report

NUMBERS = [None, 0, 1, -1, 127, -129, 1 << 15, -(1 << 23), 1 << 31, -(1 << 47), 1 << 62, -(1 << 63) + 1]
TEXTS = [None, "", "x", "aten::mm, seq = 3", "é\x1f\x1e", "n" * 300]
ROWS = [(number, text, count) for count, number, text in itertools.product(range(30), NUMBERS, TEXTS)]


@pytest.fixture
def file(tmp_path):
    """Writes a table of 2,160 rows on small pages, changes it, and returns its file."""

    def write(change):
        path = tmp_path / "rank-0.sqlite"
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA page_size = 1024")
            connection.execute("CREATE TABLE t (a INTEGER, s TEXT, b INT)")
            connection.executemany("INSERT INTO t VALUES (?, ?, ?)", ROWS)
            connection.executescript(change)
        connection.close()
        return path

    return write


def together(pieces):
    columns = zip(*((piece.integers["a"], piece.integers["b"], piece.texts) for piece in pieces), strict=True)
    return [np.concatenate(column).tolist() for column in columns]


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ("", True),
        ("DELETE FROM t WHERE rowid % 3 = 0; ALTER TABLE t ADD c INTEGER", True),
        ("UPDATE t SET s = char(97, 0, 98) WHERE rowid = 900", False),
        (f"UPDATE t SET s = printf('%.*c', {MAX_NAME + 9}, 'x') WHERE rowid = 2159", False),
        ("UPDATE t SET b = '1' || char(0) WHERE b = 29; ALTER TABLE t RENAME a TO d; ALTER TABLE t ADD a INT DEFAULT 7", False),
        ("DROP TABLE t; CREATE TABLE t (a INTEGER PRIMARY KEY, s TEXT, b INT); INSERT INTO t VALUES (5, 'x', 6)", False),
        ("DROP TABLE t; CREATE TABLE t (a, s BLOB, b INT); INSERT INTO t VALUES (5, 'x', 6)", False),
    ],
)
def test_the_rows_are_sqlites(file, monkeypatch, change, plain):
    database = Database(file(change), "t")
    asked = ("t", ["a", "b"], [Among("b", ((2, 5), (6, 20)))], "s")
    found = list(database.pieces(*asked))
    assert all(piece.pages is not None for piece in found) is plain
    monkeypatch.setattr(database, "_from_pages", lambda *of: iter(TableFile(io.BytesIO()).rows(2, {})))
    assert together(found) == together(database.pieces(*asked))
    database.close()


def test_blocks_are_the_whole(tmp_path, monkeypatch):
    path = small_report().write(tmp_path / "rank-0.sqlite")
    whole = nsys.read(path)["host_events"]
    monkeypatch.setattr(nsys, "_BLOCK_ROWS", 2)
    tables = nsys.read(path)
    blocks = list(tables.blocks("host_events"))
    assert len(blocks) > 1
    assert pa.concat_tables(blocks).to_pylist() == whole.to_pylist()
    kept = cache.load(Capture(path, "nsys", 0, "order"), directory=tmp_path / "cache")
    assert isinstance(kept.tables["host_events"], cache.ParquetTable)
    assert kept["host_events"].to_pylist() == whole.to_pylist()
