"""A DuckDB database over the Parquet of all ranks."""

from __future__ import annotations

import mmap
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from bridge_profiling.facts.clocks import in_sql
from bridge_profiling.traces.tables import SCHEMAS

if TYPE_CHECKING:
    import duckdb

#: Address space that DuckDB's threads reserve, more or less.
_DATABASE_BYTES = 1 << 28


def connect(
    entries: Sequence[Path], numbers: Mapping[int, int] | None = None, *, memory_limit: str = "1GB"
) -> duckdb.DuckDBPyConnection:
    """A database in memory with one view for each table of `traces.tables.SCHEMAS`, over the rows of all ranks.

    Nothing is copied: a query reads the columns it names, a row group at a time, so memory does not grow with the ranks.

    Args:
        entries: folders of the ranks' Parquet, whose order the rows keep.
        numbers: what to add to each rank's numbers of iterations (`numbering`).
        memory_limit: size at which queries spill to the machine's temporary directory.
    """
    import duckdb  # workers never need it, and it takes 0.09 s to import

    # DuckDB ends in a segmentation fault where its threads find no memory: this raises an error.
    mmap.mmap(-1, _DATABASE_BYTES).close()
    spill = Path(tempfile.gettempdir(), f"bridge_profiling-{uuid.uuid4().hex}")  # created when needed, removed on close
    connection = duckdb.connect(config={"memory_limit": memory_limit, "temp_directory": str(spill)})
    # Its progress bar would be written into a notebook, or over ours. Off is refused where a notebook cannot show it anyway.
    if connection.sql("select current_setting('enable_progress_bar')").fetchall()[0][0]:
        connection.execute("set enable_progress_bar = false")
    # Each folder is listed once: to look for each table of a thousand ranks takes a second.
    listed = [(str(entry), frozenset(os.listdir(entry))) for entry in entries]
    for name, schema in SCHEMAS.items():
        files = [os.path.join(entry, f"{name}.parquet") for entry, names in listed if f"{name}.parquet" in names]
        if files:
            rows = connection.read_parquet(files)
            (rows.project(in_sql(numbers)) if numbers and "iteration" in schema.names else rows).create_view(name)
        else:
            # Parquet has no dictionary type, and to DuckDB it would be another one.
            plain = [(each.name, getattr(each.type, "value_type", each.type)) for each in schema]
            connection.from_arrow(pa.schema(plain).empty_table()).create(name)
    return connection
