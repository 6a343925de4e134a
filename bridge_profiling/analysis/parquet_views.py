"""Many ranks' Parquet as one database, for questions that go across ranks. Reads the cache's entries, writes nothing."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from bridge_profiling.traces.tables import SCHEMAS

if TYPE_CHECKING:
    import duckdb


def connect(entries: Sequence[Path], *, memory_limit: str = "1GB") -> duckdb.DuckDBPyConnection:
    """A database in memory, with one view for each table of `traces.tables.SCHEMAS`; its rows are all ranks'.

    Nothing is copied: a query reads the columns it names, a row group at a time, so memory does not grow with the ranks.
    Rows come in the order of the entries.

    Args:
        entries: the ranks' cache entries, folders that hold `<table>.parquet`.
        memory_limit: what queries may hold before they spill to the machine's temporary directory.
    """
    import duckdb  # Loaded by those who ask across ranks; the workers never do.

    spill = Path(tempfile.gettempdir(), f"bridge_profiling-{uuid.uuid4().hex}")  # made when it is needed, removed on close
    connection = duckdb.connect(config={"memory_limit": memory_limit, "temp_directory": str(spill)})
    # A progress bar of its own would be written into a notebook, or over ours.
    connection.execute("set enable_progress_bar = false")
    for name, schema in SCHEMAS.items():
        files = [str(path) for entry in entries if (path := entry / f"{name}.parquet").is_file()]
        if files:
            connection.read_parquet(files).create_view(name)
        else:
            connection.from_arrow(_plain(schema).empty_table()).create(name)
    return connection


def _plain(schema: pa.Schema) -> pa.Schema:
    """A schema as Parquet gives it back: without dictionaries, which are another type to a database."""
    return pa.schema([(column.name, _value_type(column.type)) for column in schema])


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
