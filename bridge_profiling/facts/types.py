"""Types of facts: an answer, and what collects a table block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.traces.types import Caveat


@dataclass(frozen=True)
class Answer:
    """The result of a question.

    Args:
        table: the rows.
        caveats: what the rows cannot show. Of an answer about one capture they need not name the rank.
    """

    table: pa.Table
    caveats: tuple[Caveat, ...] = ()

    def __reduce__(self) -> tuple[Callable[..., Answer], tuple[bytes, tuple[Caveat, ...]]]:
        """Pickle the table as an Arrow stream: both ways take a tenth of the time of PyArrow's own, 4 ms a rank."""
        return _unpickled, (as_stream(self.table).to_pybytes(), self.caveats)


def as_stream(table: pa.Table) -> pa.Buffer:
    """A table as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def table_of(content: pa.Buffer | bytes) -> pa.Table:
    """The table in an Arrow stream."""
    return pa.ipc.open_stream(content).read_all()


def _unpickled(content: bytes, caveats: tuple[Caveat, ...]) -> Answer:
    return Answer(table_of(content), caveats)


class Collector(Protocol):
    """Takes in a table block by block, so that the table need not fit into memory."""

    def add(self, block: pa.Table) -> None:
        """Take in the next rows; dictionaries of their columns differ from block to block."""

    def result(self) -> Any:
        """What the rows come to."""


class Chosen:
    """Collects the rows of a table that a function chooses."""

    def __init__(self, choose: Callable[[pa.Table], NDArray[np.bool_]]) -> None:
        self._choose = choose
        self._found: list[pa.Table] = []

    def add(self, block: pa.Table) -> None:
        """Take in the next rows."""
        rows = np.flatnonzero(self._choose(block))
        # An empty table keeps the columns' types, once.
        if len(rows) or not self._found:
            self._found.append(block.take(pa.array(rows)))

    def result(self) -> pa.Table:
        """The rows in order."""
        return pa.concat_tables(self._found).unify_dictionaries()
