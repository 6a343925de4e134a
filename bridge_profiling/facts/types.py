"""Of all facts: an answer and its caveats, what collects a table block by block, columns of tables and documents, the database.

`columns.toml` declares the columns of the tables that documents contain.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.layout import name_ranks
from bridge_profiling.traces.types import Caveat, filled, texts

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection
else:
    Connection = Any  # DuckDB takes 0.09 s to import, and workers never need it


@dataclass(frozen=True)
class Answer:
    """The result of a question.

    Args:
        table: the rows.
        caveats: what the rows cannot show. Of an answer about one capture they need not name the rank.
    """

    table: pa.Table
    caveats: tuple[Caveat, ...] = ()


def caveat(code: str, ranks: Iterable[int] = (), file: str | None = None, **values: object) -> Caveat:
    """An entry of caveats.toml with values filled in."""
    text = filled(__package__, "caveats.toml", code, **values)
    return Caveat(code, text, tuple(sorted(ranks)), file)


def merged(caveats: Iterable[Caveat]) -> list[Caveat]:
    """Caveats in order of first appearance; those that differ only in their ranks become one."""
    found: dict[tuple[str, str, str | None], Caveat] = {}
    for caveat in caveats:
        key = caveat.code, caveat.text, caveat.file
        first = found.get(key)
        ranks = caveat.ranks if first is None else tuple(sorted({*first.ranks, *caveat.ranks}))
        found[key] = replace(caveat, ranks=ranks)
    return list(found.values())


def sentences(caveats: Iterable[Caveat]) -> list[str]:
    """Each caveat as text that starts with its ranks, if it applies to some ranks only."""
    return [f"{name_ranks(caveat.ranks)}: {caveat.text}" if caveat.ranks else caveat.text for caveat in merged(caveats)]


#: Types of columns by name, or by the end of the name.
_TYPES = {
    **dict.fromkeys(("iteration", "rank", "stage", "device", "partner", "last", "microbatches", "waits_for"), pa.int32()),
    **dict.fromkeys(("group_size", "captured_ranks"), pa.int32()),
    **dict.fromkeys(("_ns", "bytes", "count", "operations", "collective", "participants", "calls", "samples"), pa.int64()),
    **dict.fromkeys(("_gbs", "chance", "mean", "p95", "max", "value"), pa.float64()),
    **dict.fromkeys(("match", "group_id"), pa.uint64()),
    **dict.fromkeys(("boundary", "between", "point_to_point", "waiting_known"), pa.bool_()),
}


def schema(*names: str, **types: pa.DataType) -> pa.Schema:
    """The schema of a table. A column without a type has that of `_TYPES` for its name, else it is text."""
    usual = {name: next((kind for end, kind in _TYPES.items() if name.endswith(end)), pa.string()) for name in names}
    return pa.schema([(name, types.get(name, usual[name])) for name in names])


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


#: Address space that DuckDB's threads reserve, more or less.
_DATABASE_BYTES = 1 << 28

_MEMORY_LIMIT = "1GB"


def connect() -> Connection:
    """An empty database. Queries spill to the machine's temporary directory beyond `_MEMORY_LIMIT`."""
    import duckdb

    # DuckDB ends in a segmentation fault where its threads find no memory: this raises an error.
    mmap.mmap(-1, _DATABASE_BYTES).close()
    spill = Path(tempfile.gettempdir(), f"bridge_profiling-{os.urandom(16).hex()}")  # created when needed, removed on close
    connection = duckdb.connect(config={"memory_limit": _MEMORY_LIMIT, "temp_directory": str(spill)})
    # Its progress bar would be written into a notebook, or over ours. Off is refused where a notebook cannot show it anyway.
    if connection.sql("select current_setting('enable_progress_bar')").fetchall()[0][0]:
        connection.execute("set enable_progress_bar = false")
    return connection


def queried(connection: Connection, query: str, values: dict[str, str] | None = None, **tables: pa.Table) -> pa.Table:
    """The rows of a query that can also read some tables, by their names; times as whole nanoseconds.

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
    # DuckDB's sums are wider than what they add up.
    types = [field.with_type(pa.int64()) if field.name.endswith("_ns") else field for field in found.schema]
    return found.cast(pa.schema(types))


@dataclass(frozen=True)
class Kind:
    """The type of a column or of a key of a document.

    Args:
        json: its JSON Schema, with its unit as `x-unit`.
        arrow: its type in a table; None if no table has it.
        row: the type of the objects that it holds, if it holds objects.
        optional: whether the key can be missing.
    """

    json: dict[str, Any]
    arrow: pa.DataType | None = None
    row: Row | None = None
    optional: bool = False

    @property
    def or_null(self) -> Kind:
        """The same, or null."""
        json = self.json
        if "enum" in json:
            return replace(self, json=json | {"enum": [*json["enum"], None]})
        if "type" in json:
            return replace(self, json=json | {"type": [json["type"], "null"]})
        return replace(self, json={"anyOf": [json, {"type": "null"}]})


@dataclass(frozen=True)
class Column:
    """A column of a table, or a key of a document: its description and its type."""

    about: str
    kind: Kind


@dataclass(frozen=True)
class Row:
    """The rows of a table, or the objects of a document, with their columns in order."""

    name: str
    about: str
    columns: dict[str, Column]

    def schema(self, *names: str) -> pa.Schema:
        """The schema of a table with such rows, or with some of their columns."""
        columns = {name.replace("_us", "_ns"): column.kind.arrow for name, column in self.columns.items()}
        return pa.schema([(name, columns[name]) for name in names or columns])


#: Ends of names of points in time, which are nanoseconds in documents, too.
_MOMENTS = ("start_ns", "end_ns", "peak_ns", "unix_ns")


@cache
def document_key(name: str) -> str:
    """The key that documents have for a column."""
    return name if name.endswith(_MOMENTS) else name.replace("_ns", "_us")


def documented(found: Any, unit_ns: float = 1.0) -> Any:
    """A table, dataclasses or plain data as documents have it: `x_ns`, in nanoseconds, becomes `x_us`, in microseconds.

    Args:
        unit_ns: of numbers whose keys name no unit, because the key of their object does: by rank, or parts of an estimate.
    """
    if isinstance(found, pa.Table):
        names = {name: document_key(name) for name in found.column_names}
        columns = {key: found[name] if key == name else pc.divide(found[name], 1e3) for name, key in names.items()}
        return pa.table(columns).to_pylist()
    if is_dataclass(found):
        return documented(vars(found), unit_ns)
    if isinstance(found, Mapping):
        keys = {name: document_key(str(name)) for name in found}
        inner_ns = unit_ns if all(str(name) == key for name, key in keys.items()) else 1.0
        units = {"n": 1.0} | {key: 1e3 for name, key in keys.items() if str(name) != key}  # `n` is the number of values
        return {key: documented(found[name], units.get(key, inner_ns)) for name, key in keys.items()}
    if isinstance(found, (list, tuple)):
        return [documented(each, unit_ns) for each in found]
    return found if unit_ns == 1 or isinstance(found, (str, bool, NoneType)) else found / unit_ns


def _number(arrow: pa.DataType, unit: str | None = None, **limits: int) -> Kind:
    kind = "integer" if pa.types.is_integer(arrow) else "number"
    return Kind({"type": kind} | ({} if unit is None else {"x-unit": unit}) | limits, arrow)


Text, Flag = Kind({"type": "string"}, pa.string()), Kind({"type": "boolean"}, pa.bool_())
Int, Float = _number(pa.int32()), _number(pa.float64())
#: `Time`: in a table, `x_ns` in nanoseconds; in a document, `x_us` in microseconds. `Ns`: on a clock, in both.
Time, Ns = Kind({"type": "number", "x-unit": "us"}, pa.int64()), _number(pa.int64(), "ns")
#: `MeanBytes`: of means, and of changes.
Bytes, MeanBytes = _number(pa.int64(), "bytes"), _number(pa.float64(), "bytes")
#: 10⁹ bytes, and 10¹² floating-point operations, per second.
Gbs, Tflops = _number(pa.float64(), "1e9 bytes/s"), _number(pa.float64(), "1e12 FLOP/s")
#: 1 is the whole.
Share = _number(pa.float64(), "share")
#: `Number`: of a rank or a stage, or of few.
Count, Number = _number(pa.int64(), minimum=0), _number(pa.int32(), minimum=0)


def choice(*values: str | int) -> Kind:
    """One of some values."""
    return Kind({"enum": list(values)}, pa.string())


def one(row: Row) -> Kind:
    """An object."""
    return Kind({"$ref": f"#/$defs/{row.name}"}, row=row)


#: Types of declarations by name.
_KINDS = {name: kind for name, kind in dict(globals()).items() if isinstance(kind, Kind)} | {
    "Profiler": choice("kineto", "nsys"),
    "Pair": Kind({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}),
    "Object": Kind({"type": "object"}),
}

#: Regular expressions of keys: of any, of global ranks, and of parts of an iteration.
_KEYS: dict[str, dict[str, Any]] = {
    "name": {},
    "rank": {"propertyNames": {"pattern": "^[0-9]+$"}},
    "part": {"propertyNames": {"pattern": "_us$"}},
}

#: Changes of rows that are on both sides: what the names and the descriptions of amounts begin and end with.
_SIDES = {"base": "before", "other": "after", "change": "the change"}


class Declarations:
    """Rows that TOML files declare, by name; run_document.toml of `report` says how. A file is read when a name needs it.

    Args:
        files: the package and the name of each.
        known: other types by name.
        parts: names that "{part}" stands for.
    """

    def __init__(self, *files: tuple[str, str], known: Mapping[str, Kind] | None = None, parts: Sequence[str] = ()) -> None:
        self._files, self._parts, self._kinds = files, parts, {**_KINDS, **(known or {})}
        self._rows: dict[str, Row] = {}

    def __call__(self, name: str) -> Row:
        """The rows of a name."""
        if name not in self._rows:
            self._rows[name] = self._row(name)
        return self._rows[name]

    def _row(self, name: str) -> Row:
        declared = next(found[name] for file in self._files if name in (found := texts(*file)))
        keys: dict[str, Column] = {}
        for key, value in declared.items():
            if isinstance(value, list):
                keys[key] = Column(value[1], self._kind(value[0]))
            elif isinstance(value, dict):
                each = {part: pair for end, pair in value.items() for part in (self._parts if end == "{part}" else [end])}
                keys |= {
                    f"{side}_{end}": Column(f"{pair[1]}: {when}", self._kind(pair[0]))
                    for end, pair in each.items()
                    for side, when in _SIDES.items()
                }
            elif key != "about":
                keys |= self(value).columns
        return Row(name, declared["about"], keys)

    def _kind(self, text: str) -> Kind:
        if text.endswith(", optional"):
            return replace(self._kind(text.removesuffix(", optional")), optional=True)
        if text.endswith(" or null"):
            return self._kind(text.removesuffix(" or null")).or_null
        if text.startswith("one of "):
            values = text.removeprefix("one of ").split(", ")
            return choice(*(int(value) if value.isdecimal() else value for value in values))
        if text.startswith("list of "):
            inner = self._kind(text.removeprefix("list of "))
            return Kind({"type": "array", "items": inner.json}, inner.arrow and pa.list_(inner.arrow), inner.row)
        of, by, keys = text.rpartition(" by ")
        if by:
            inner = self._kind(of)
            return Kind({"type": "object", "additionalProperties": inner.json} | _KEYS[keys], row=inner.row)
        return self._kinds.get(text) or one(self(text))


#: The rows of tables.
COLUMNS = (__package__, "columns.toml")
declared = Declarations(COLUMNS)
