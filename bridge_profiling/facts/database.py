"""A DuckDB database in memory, for facts across ranks."""

from __future__ import annotations

import mmap
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection
else:
    Connection = Any  # DuckDB takes 0.09 s to import, and workers never need it

#: Address space that DuckDB's threads reserve, more or less.
_DATABASE_BYTES = 1 << 28

_MEMORY_LIMIT = "1GB"


def connect() -> Connection:
    """An empty database. Queries spill to the machine's temporary directory beyond `_MEMORY_LIMIT`."""
    import duckdb

    # DuckDB ends in a segmentation fault where its threads find no memory: this raises an error.
    mmap.mmap(-1, _DATABASE_BYTES).close()
    spill = Path(tempfile.gettempdir(), f"bridge_profiling-{uuid.uuid4().hex}")  # created when needed, removed on close
    connection = duckdb.connect(config={"memory_limit": _MEMORY_LIMIT, "temp_directory": str(spill)})
    # Its progress bar would be written into a notebook, or over ours. Off is refused where a notebook cannot show it anyway.
    if connection.sql("select current_setting('enable_progress_bar')").fetchall()[0][0]:
        connection.execute("set enable_progress_bar = false")
    return connection


def queried(connection: Connection, query: str, values: dict[str, str] | None = None, **tables: pa.Table) -> pa.Table:
    """The rows of a query that can also read some tables, by their names.

    Args:
        connection: the database.
        query: to run.
        values: of its parameters.
        tables: by name.
    """
    for name, table in tables.items():
        connection.register(name, table)
    found = connection.sql(query, params=values or {}).to_arrow_table()
    for name in tables:
        connection.unregister(name)
    return found
