"""Writes small traces and reports, reads them, and knows where the real captures lie."""

import functools
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.traces import kineto
from bridge_profiling.traces.nsys import tables as nsys
from bridge_profiling.traces.types import RankTables
from tests.traces.kineto_files import document
from tests.traces.nsys_files import Report

WriteTrace = Callable[..., Path]


def values(table: Any, *columns: str) -> list[Any]:
    """Some columns of a table, row by row: tuples, or the values of one column."""
    lists = [table[name].to_pylist() for name in columns]
    return lists[0] if len(columns) == 1 else list(zip(*lists, strict=True))


def contents(tables: RankTables) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables."""
    return {name: table.to_pylist() for name, table in tables.tables.items()}


def caveats(tables: RankTables) -> dict[str, str]:
    return {each.code: each.text for each in tables.info.caveats}


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """Writes a trace from events, or from text as it is, and gives its path."""

    def write(content: list[dict[str, Any]] | dict[str, Any] | str | bytes, name: str = "rank-3.json.gz", **keys: Any) -> Path:
        if isinstance(content, list):
            content = document(content, **keys)
        if isinstance(content, dict):
            content = json.dumps(content)
        raw = content.encode() if isinstance(content, str) else content
        path = tmp_path / name
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return write


@pytest.fixture
def read_trace(write_trace: WriteTrace) -> Callable[..., RankTables]:
    """Reads what `write_trace` writes."""
    return lambda content, *name, **keys: kineto.read(write_trace(content, *name, **keys))


@pytest.fixture
def read_report(tmp_path: Path) -> Callable[..., RankTables]:
    """Reads a report from an SQLite export called rank-1.sqlite."""

    def read(report: Report, **rank: Any) -> RankTables:
        path = tmp_path / "rank-1.sqlite"
        path.unlink(missing_ok=True)
        return nsys.read(report.write(path), **rank)

    return read


@pytest.fixture(scope="session")
def captures() -> Path:
    """The real H200 captures."""
    named = os.environ.get("BRIDGE_PROFILING_CAPTURES")
    path = Path(named) if named else Path(__file__).parents[3] / "shared" / "captures"
    if not path.is_dir():
        pytest.skip(f"the real captures are not in {path}: BRIDGE_PROFILING_CAPTURES names their place")
    return path


@pytest.fixture(scope="session")
def decoded(captures: Path) -> Callable[[str], RankTables]:
    """The tables of a real Kineto trace, `tp2_dp2/rank-0` for example, which is read once."""
    return functools.cache(lambda name: kineto.read(captures / "kineto" / f"{name}.json.gz"))
