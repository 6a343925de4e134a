"""Writes small traces and reports, reads them, and knows where the real captures lie."""

import gzip
import json
import os
from pathlib import Path

import pytest

from bridge_profiling.traces import kineto, nsys
from tests.traces.kineto_files import document


def values(table, *columns):
    """Some columns of a table, row by row: tuples, or the values of one column."""
    lists = [table[name].to_pylist() for name in columns]
    return lists[0] if len(columns) == 1 else list(zip(*lists, strict=True))


def contents(tables):
    """All rows of all tables."""
    return {name: tables[name].to_pylist() for name in tables.tables}


def caveats(tables):
    return {each.code: each.text for each in tables.info.caveats}


@pytest.fixture
def write_trace(tmp_path):
    """Writes a trace from events, or from text as it is, and gives its path."""

    def write(content, name="rank-3.json.gz", **keys):
        if isinstance(content, list):
            content = document(content, **keys)
        if isinstance(content, dict):
            content = json.dumps(content)
        raw = content.encode() if isinstance(content, str) else content
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return write


@pytest.fixture
def read_trace(write_trace):
    """Reads what `write_trace` writes."""
    return lambda content, *name, **keys: kineto.read(write_trace(content, *name, **keys))


@pytest.fixture
def read_report(tmp_path):
    """Reads a report from an SQLite export called rank-1.sqlite."""

    def read(report, **rank):
        path = tmp_path / "rank-1.sqlite"
        path.unlink(missing_ok=True)
        return nsys.read(report.write(path), **rank)

    return read


@pytest.fixture(scope="session")
def captures():
    """The real H200 captures."""
    named = os.environ.get("BRIDGE_PROFILING_CAPTURES")
    path = Path(named) if named else Path(__file__).parents[3] / "shared" / "captures"
    if not path.is_dir():
        pytest.skip(f"the real captures are not in {path}: BRIDGE_PROFILING_CAPTURES names their place")
    return path
