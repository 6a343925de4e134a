"""Damaged captures and manifests: a few of each kind, always the same; FUZZ_EXAMPLES of `make fuzz` are new ones.

A reader gives tables, or one error that names the file.
"""

import contextlib
import copy
import gzip
import json
import os
import pickle
import sqlite3
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from bridge_profiling.common.errors import TraceError
from bridge_profiling.manifest import RankCapture, read_manifest
from bridge_profiling.traces import kineto, memory, nsys
from bridge_profiling.traces.discover import find_run
from tests.hostile.runs import manifest_with_everything
from tests.traces.kineto_files import call, document, kernel, steps
from tests.traces.nsys_files import nccl_report
from tests.traces.test_memory_snapshot import entry, segment

#: Values that no field expects.
_ODD = [0, -1, 1 << 31, 1 << 63, -(1 << 63), 10**30, 1e300, float("nan"), "1e999990", "7" * 5000, "0x10", True]
_ODD += [None, "\0", "\x1b[31m", "\ud800", "../x", "{"]
values = st.recursive(
    st.sampled_from(_ODD) | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
#: Where in nested data something is put: numbers that choose a branch each, and the value; `...` removes.
changes = st.lists(
    st.tuples(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=6), values | st.just(...)), min_size=1, max_size=4
)
#: Where in a text how much is replaced, as shares of its length.
_PIECES = st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\0" * 300, b'},{"ph":', b"]}"])
edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.binary(max_size=6) | _PIECES), max_size=4)


def changed(data, changes):
    """A copy of nested data with other values in some places."""
    data = copy.deepcopy(data)
    for path, value in changes:
        owner = data
        for depth, number in enumerate(path):
            keys = list(owner) if isinstance(owner, dict) else range(len(owner)) if isinstance(owner, list) else []
            if not keys:
                break
            key = keys[number % len(keys)]
            if depth < len(path) - 1 and isinstance(owner[key], dict | list):
                owner = owner[key]
                continue
            if value is ...:
                del owner[key]
            else:
                owner[key] = copy.deepcopy(value)  # Hypothesis can draw one object twice
            break
    return data


def edited(raw, edits):
    """Bytes with some replaced."""
    text = bytearray(raw)
    for share, length, piece in edits:
        place = int(share * len(text))
        text[place : place + length] = piece
    return bytes(text)


@contextlib.contextmanager
def named(path):
    """An error of a reader may end the block, and must name the file."""
    try:
        yield
    except TraceError as error:
        if str(path) not in str(error):
            raise AssertionError("the error does not name the file") from error


def read_or_refused(read, path):
    """Tables whose events end after they start; None after an error, which names the file."""
    tables = None
    with named(path):
        tables = read(path)
    if tables is None:
        return None
    assert tables.info.error is None or str(path) in tables.info.error
    for table in map(tables.columns, tables.tables):
        if "end_ns" in table.column_names:
            rows = zip(table["start_ns"].to_pylist(), table["end_ns"].to_pylist(), strict=True)
            assert all(start <= end for start, end in rows)
    return tables


STEPS = 12


def rank_of(number):
    """A rank of twelve iterations of two kernels, one of which communicates."""
    events = steps(*[400] * STEPS, operators=True)
    message = {"Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Group size": 2}
    message |= {"Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    for place in range(STEPS):
        start, correlation = 1000 * place + 510 + 10 * number, 100 + place
        events.append(call("cudaLaunchKernel", start - 20, 2, correlation))
        events.append(kernel("ncclDevKernel_AllReduce", start, 30, correlation=correlation, stream=20, **message))
    return document(events, distributedInfo={"rank": number, "world_size": 2})


def kineto_text(folder, drawn):
    """Damaged text costs the events that it is in, and no others; with any JSON in place of anything, it is read or refused."""
    data, edits, packed = drawn
    head, _, events = json.dumps(changed(rank_of(0), data)).encode().partition(b'"traceEvents": [')
    raw = head + b'"traceEvents": [' + edited(events[:-2], edits) + events[-2:]
    path = folder / "rank-0.json"
    path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    tables = read_or_refused(kineto.read, path)
    if tables is not None and not data and not any(b"]" in piece for _, _, piece in edits):
        assert tables["device_events"].num_rows >= 2 * STEPS - 2 * len(edits)
        assert tables.info.lost.total <= 3 * len(edits) + 1 or any(b"\0" in piece for _, _, piece in edits)


def nsys_report(folder, drawn):
    """Any value in any cell, missing columns and tables, and damaged pages."""
    cells, edits = drawn
    report = nccl_report(blobs=bool(len(cells) % 2))
    found = changed(report.rows | {"StringIds2": []}, cells)
    report.rows = {
        name: rows
        for name, rows in found.items()
        if isinstance(rows, list) and all(isinstance(row, dict) and row for row in rows)
    }
    path = folder / "rank-0.sqlite"
    path.unlink(missing_ok=True)
    try:
        report.write(path)
    except (sqlite3.Error, OverflowError, UnicodeEncodeError):  # SQLite itself refuses the value
        return
    path.write_bytes(edited(path.read_bytes(), edits))
    read_or_refused(nsys.read, path)


def whole_snapshot():
    """Allocations, a segment, an out-of-memory error and annotations."""
    trace = [entry("alloc", 512 * at, 500, at) for at in range(6)]
    trace += [entry("free_requested", 0, 500, 7), entry("free_completed", 0, 500, 8), entry("segment_alloc", 1 << 20, 4096, 9)]
    trace.append({"action": "oom", "size": 1 << 30, "device_free": 5, "time_us": 10, "frames": []})
    notes = [{"stage": stage, "name": "step", "device": 0, "time_us": at} for stage, at in (("START", 1), ("END", 9))]
    blocks = (512, "active_allocated", 500), (3584, "inactive", 0)
    return {"segments": [segment(0, 4096, *blocks)], "device_traces": [trace, []], "external_annotations": notes}


def snapshots(folder, drawn):
    """Any value in place of anything, and any bytes in place of others."""
    data, edits, protocol = drawn
    path = folder / "rank-0.pickle"
    with contextlib.suppress(UnicodeEncodeError):
        path.write_bytes(edited(pickle.dumps(changed(whole_snapshot(), data), protocol), edits))
        read_or_refused(memory.read, path)


def manifests(folder, drawn):
    """A manifest is read or is one error; the capture next to it is found either way."""
    data, edits = drawn
    path, trace = (folder / kind / "iter-10-12" / "rank-1.json" for kind in ("manifest", "torch"))
    for each in (path, trace):
        each.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(edited(json.dumps(changed(asdict(manifest_with_everything(1, Path("torch/a"))), data)).encode(), edits))
    trace.write_text(json.dumps(rank_of(1)))
    with named(path):
        capture = RankCapture(folder, "iter-10-12", read_manifest(path))
        for profiled in (True, False):
            capture.durations_ns(profiled=profiled)
            capture.mfu(profiled=profiled)
    assert trace in [each.path for each in find_run(folder).captures]


#: A new reader needs a row.
TARGETS = {
    kineto_text: st.tuples(st.just([]) | changes, edits, st.booleans()),
    nsys_report: st.tuples(changes, edits),
    snapshots: st.tuples(changes, edits, st.integers(2, 5)),
    manifests: st.tuples(changes, edits),
}

#: Examples that failed are repeated first.
KEPT = Path(__file__).parents[2] / ".cache" / "fuzz"

MANY = int(os.environ.get("FUZZ_EXAMPLES", 0))
FEW = settings(max_examples=5, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
if MANY:
    FEW = settings(FEW, max_examples=MANY, derandomize=False, database=DirectoryBasedExampleDatabase(KEPT), print_blob=True)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
@pytest.mark.timeout(86400 if MANY else 600)
def test_each_target_holds(tmp_path, target):
    FEW(given(TARGETS[target])(lambda drawn: target(tmp_path, drawn)))()
