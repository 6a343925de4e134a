"""What `make fuzz` tries: damaged captures and messages, and what must hold for each.

A reader gives tables, or one error that names the file. When n device events are made unusable, n are counted, and the numbers
of other ranks stay as they are.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import pickle
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from bridge_profiling.capture.control.directory import RequestDirectory
from bridge_profiling.capture.control.messages import AcceptedCapture, CaptureRequest, JobStatus, parse_request
from bridge_profiling.common.errors import ProfilingConfigError, TraceError
from bridge_profiling.manifest import RankCapture, read_manifest
from bridge_profiling.run import Run
from bridge_profiling.settings.overrides import apply_overrides
from bridge_profiling.settings.profiling import ProfilingConfig
from bridge_profiling.traces import kineto, nsys
from bridge_profiling.traces import memory as snapshot
from bridge_profiling.traces.discover import find_run
from tests.findings.simulated_jobs import Here
from tests.hostile.runs import manifest_with_everything
from tests.hostile.test_kineto import EVENTS
from tests.traces import nsys_files
from tests.traces.kineto_files import call, document, kernel, steps
from tests.traces.test_memory_snapshot import entry, segment

Target = Callable[[Path, Any], None]

# Values that no field expects.

numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1 << 31, 1 << 63, -(1 << 63), 10**30, 1e300, float("nan"), "1e999990", "7" * 5000, "0x10", True]),
)
leaves = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=20), st.sampled_from(["\0", "\x1b[31m", "\ud800", "../x", "{"])
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
#: Where in nested data something is put: numbers that choose a branch each, and the value; `...` removes.
changes = st.lists(
    st.tuples(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=6), st.one_of(values, st.just(...))),
    min_size=1,
    max_size=4,
)
#: Where in a text how much is replaced, as shares of its length.
pieces = st.one_of(
    st.binary(max_size=6), st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\0" * 300, b'},{"ph":', b"]}"])
)
edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), pieces), max_size=4)


def changed(data: Any, changes: list[tuple[list[int], Any]]) -> Any:
    """A copy of nested data with other values in some places."""
    data = copy.deepcopy(data)
    for path, value in changes:
        owner = data
        for depth, number in enumerate(path):
            keys = list(owner) if isinstance(owner, dict) else range(len(owner)) if isinstance(owner, list) else []
            if not keys:
                break
            key = keys[number % len(keys)]
            if depth == len(path) - 1 or not isinstance(owner[key], dict | list):
                if value is ...:
                    del owner[key]
                else:
                    owner[key] = copy.deepcopy(value)  # Hypothesis can draw one object twice
                break
            owner = owner[key]
    return data


def edited(raw: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    """Bytes with some replaced."""
    text = bytearray(raw)
    for share, length, piece in edits:
        place = int(share * len(text))
        text[place : place + length] = piece
    return bytes(text)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """An error of a reader may end the block, and must name the file."""
    try:
        yield
    except TraceError as error:
        if str(path) not in str(error):
            raise AssertionError("the error does not name the file") from error


def read_or_refused(read: Callable[[Path], Any], path: Path) -> Any:
    """Tables whose events end after they start; None after an error, which names the file."""
    with named(path):
        tables = None
        tables = read(path)
    if tables is None:
        return None
    assert tables.info.error is None or str(path) in tables.info.error
    for table in map(tables.columns, tables.tables):
        if "end_ns" in table.column_names:
            rows = zip(table["start_ns"].to_pylist(), table["end_ns"].to_pylist(), strict=True)
            assert all(start <= end for start, end in rows)
    return tables


# Kineto.

STEPS = 12


def rank_of(number: int) -> dict[str, Any]:
    """A rank of twelve iterations of two kernels, one of which communicates."""
    events = steps(*[400] * STEPS, operators=True)
    for place in range(STEPS):
        start, correlation = 1000 * place + 510 + 10 * number, 100 + place
        message = {"Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Group size": 2}
        group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        events += [
            call("cudaLaunchKernel", start - 20, 2, correlation),
            kernel("ncclDevKernel_AllReduce", start, 30, correlation=correlation, stream=20, **message, **group),
        ]
    return document(events, distributedInfo={"rank": number, "world_size": 2})


def answers(folder: Path) -> dict[str, Any]:
    """What a run says of rank 1 and of what was lost."""
    with Run(folder, engine=Here(), parquet=folder / "tables") as run:
        tables = {name: getattr(run.facts, name) for name in ("breakdown", "iterations", "idle_causes")}
        rows = {name: [row for row in table.to_pylist() if row["rank"] == 1] for name, table in tables.items()}
        verdicts = {rank for finding in run.findings for rank in finding.ranks}
        verdicts |= set(run.facts.stragglers["rank"].to_pylist())
        info = run.facts.every_info[0]
        return {"rows": rows, "lost": info.lost, "judged": info.judged, "about": verdicts, "errors": run.facts.errors}


def write_run(folder: Path, first: dict[str, Any]) -> Path:
    """A directory with rank 0, and rank 1 as it is."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "run").mkdir()
    for number, trace in enumerate((first, rank_of(1))):
        (folder / "run" / f"rank-{number}.json").write_text(json.dumps(trace))
    return folder / "run"


@cache
def undamaged(folder: Path) -> dict[str, Any]:
    """The answers about the whole run."""
    return answers(write_run(folder, rank_of(0)))


def kineto_events(folder: Path, drawn: list[tuple[int, str]]) -> None:
    """Damaged device events are counted, exactly; a rank that lost many is not judged; the other rank's numbers stay."""
    trace, expected = rank_of(0), undamaged(folder)["rows"]
    device = [place for place, event in enumerate(trace["traceEvents"]) if event["cat"] == "kernel"]
    damaged = {device[place % len(device)]: kind for place, kind in drawn}
    for place, kind in damaged.items():
        trace["traceEvents"][place] = EVENTS[kind](trace["traceEvents"][place])
    found = answers(write_run(folder, trace))
    assert (found["lost"].device, found["lost"].of_device) == (len(damaged), len(device))
    assert found["rows"] == expected
    assert found["judged"] == (len(damaged) <= 0.01 * len(device))
    assert found["judged"] or (0 not in found["about"] and len(found["errors"]) == 1)


def kineto_text(folder: Path, drawn: tuple[list[Any], bool]) -> None:
    """Damaged text costs the events that it is in, and no others."""
    changes, packed = drawn
    head, _, events = json.dumps(rank_of(0)).encode().partition(b'"traceEvents": [')
    body, tail = events[:-2], events[-2:]
    holes = any(b"\0" in piece for _, _, piece in changes)
    raw = head + b'"traceEvents": [' + edited(body, changes) + tail
    path = folder / "rank-0.json"
    path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    tables = read_or_refused(kineto.read, path)
    ends = any(b"]" in piece for _, _, piece in changes)
    if tables is not None and not ends:
        assert tables["device_events"].num_rows >= 2 * STEPS - 2 * len(changes)
        if not holes:
            assert tables.info.lost.total <= 3 * len(changes) + 1


def kineto_anything(folder: Path, drawn: tuple[list[Any], list[Any], bool]) -> None:
    """Any JSON in place of anything, and any bytes in place of others."""
    data, edits, packed = drawn
    raw = edited(json.dumps(changed(rank_of(0), data)).encode(), edits)
    path = folder / "rank-0.json"
    path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    read_or_refused(kineto.read, path)


# nsys.

#: What makes a kernel of a report unusable.
UNUSABLE = {
    "no name": "demangledName = NULL",
    "a name that is missing": "demangledName = 999",
    "no start": "start = NULL",
    "no end": '"end" = NULL',
    "an end before the start": '"end" = start - 1',
}


def nsys_kernels(folder: Path, drawn: list[tuple[int, str]]) -> None:
    """Damaged kernels are counted, exactly."""
    report = nsys_files.nccl_report(blobs=True)
    for number in range(10):
        report.call("cudaLaunchKernel", 1000 + 100 * number, 1010 + 100 * number, 50 + number)
        report.kernel("gemm", 1020 + 100 * number, 1060 + 100 * number, correlation=50 + number)
    path = folder / "rank-0.sqlite"
    path.unlink(missing_ok=True)
    report.write(path)
    damaged = {1 + place % 12: kind for place, kind in drawn}
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for row, kind in damaged.items():
            connection.execute(f"UPDATE {nsys_files.KERNEL} SET {UNUSABLE[kind]} WHERE rowid = {row}")
    info = nsys.read(path).info
    assert (info.lost.device, info.lost.of_device, info.judged) == (len(damaged), 12, not damaged)


def nsys_anything(folder: Path, drawn: tuple[list[Any], list[Any]]) -> None:
    """Any value in any cell, missing columns and tables, and damaged pages."""
    cells, edits = drawn
    report = nsys_files.nccl_report(blobs=bool(len(cells) % 2))
    report.rows |= {"StringIds2": []}
    report.rows = {name: rows for name, rows in changed(report.rows, cells).items() if _is_table(rows)}
    path = folder / "rank-0.sqlite"
    path.unlink(missing_ok=True)
    try:
        report.write(path)
    except (sqlite3.Error, OverflowError, UnicodeEncodeError):  # SQLite itself refuses the value
        return
    path.write_bytes(edited(path.read_bytes(), edits))
    read_or_refused(nsys.read, path)


def _is_table(rows: Any) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) and row for row in rows)


# Snapshots.


def whole_snapshot() -> dict[str, Any]:
    """Allocations, a segment, an out-of-memory error and annotations."""
    trace = [entry("alloc", 512 * at, 500, at) for at in range(6)]
    trace += [entry("free_requested", 0, 500, 7), entry("free_completed", 0, 500, 8), entry("segment_alloc", 1 << 20, 4096, 9)]
    trace.append({"action": "oom", "size": 1 << 30, "device_free": 5, "time_us": 10, "frames": []})
    notes = [{"stage": stage, "name": "step", "device": 0, "time_us": at} for stage, at in (("START", 1), ("END", 9))]
    blocks = (512, "active_allocated", 500), (3584, "inactive", 0)
    return {"segments": [segment(0, 4096, *blocks)], "device_traces": [trace, []], "external_annotations": notes}


def snapshots(folder: Path, drawn: tuple[list[Any], list[Any], int]) -> None:
    """Any value in place of anything, and any bytes in place of others."""
    data, edits, protocol = drawn
    path = folder / "rank-0.pickle"
    try:
        raw = pickle.dumps(changed(whole_snapshot(), data), protocol)
    except UnicodeEncodeError:
        return
    path.write_bytes(edited(raw, edits))
    read_or_refused(snapshot.read, path)


# Manifests.


def manifests(folder: Path, drawn: tuple[list[Any], list[Any]]) -> None:
    """A manifest is read or is one error; the capture next to it is found either way."""
    data, edits = drawn
    root = folder / "out"
    path = root / "manifest" / "iter-10-12" / "rank-1.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(edited(json.dumps(changed(asdict(manifest_with_everything(1, Path("torch/a"))), data)).encode(), edits))
    trace = root / "torch" / "iter-10-12" / "rank-1.json"
    trace.parent.mkdir(parents=True, exist_ok=True)
    trace.write_text(json.dumps(rank_of(1)))
    with named(path):
        capture = RankCapture(root, "iter-10-12", read_manifest(path))
        for profiled in (True, False):
            capture.durations_ns(profiled=profiled)
            capture.mfu(profiled=profiled)
    assert trace in [each.path for each in find_run(root).captures]


# Overrides.


@dataclass
class Section:
    """Fields of the types that recipes have."""

    iterations: int = 10
    rate: float = 0.5
    file: str | None = None
    fused: bool = True
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recipe:
    """Sections as of a recipe."""

    train: Section = field(default_factory=Section)
    model: Section | None = None
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)


_KEYS = [f"{section}.{each.name}" for section in ("train", "model") for each in fields(Section)]
_KEYS += [f"profiling.{each.name}" for each in fields(ProfilingConfig)]
_YAML = [
    "[" * 5000,
    "{" * 5000,
    "7" * 5000,
    "&x y",
    "*x",
    "|",
    "a #b",
    "010",
    "1:1",
    "!!python/name:os.system x",
    "<<: *x",
    "'",
    "~",
]
overrides_drawn = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(_KEYS), st.text(max_size=8)),
        st.sampled_from(["=", "=", "=", "", "==", "+=", "= "]),
        st.one_of(st.text(max_size=12), st.sampled_from(_YAML), values.map(json.dumps)),
    ).map("".join),
    max_size=3,
)


def overrides(folder: Path, drawn: list[str]) -> None:
    """Overrides are applied or are one error, after which nothing is changed."""
    config = Recipe()
    before = repr(config)
    try:
        apply_overrides(config, drawn)
    except ProfilingConfigError:
        assert repr(config) == before


# Control messages.


def messages(folder: Path, drawn: tuple[list[Any], list[Any]]) -> None:
    """A message is read as what it is, or is none; a request is one error if it is not valid."""
    data, edits = drawn
    request = asdict(CaptureRequest(iterations=3, start=20, ranks=[0, 1], profilers=["torch"], id="a"))
    decided = {"end": 23, "launch": "l", "run": "r", "attempt": 0, "accepted_at_iteration": 7}
    status = JobStatus(
        run="r", launch="l", job_id=None, host="h", pid=1, pid_space=None, poll_seconds=1.0, world_size=2, pipeline_ranks=[0],
        profile_ranks=[0], profilers=["torch"], train_iters=50,
    )  # fmt: skip
    directory = RequestDirectory(folder)
    (directory.path / "accepted").mkdir(parents=True, exist_ok=True)
    for name, content in (("progress", asdict(status)), ("accepted/a", request | decided), ("request", request)):
        raw = edited(json.dumps(changed(content, data)).encode(), edits)
        (directory.path / f"{name}.json").write_bytes(raw)
    assert isinstance(directory.status(), JobStatus | None)
    assert all(isinstance(accepted, AcceptedCapture) and accepted.folder for accepted in directory.accepted())
    with contextlib.suppress(ProfilingConfigError):
        assert isinstance(parse_request(directory.pending() or ""), CaptureRequest)


TARGETS: dict[str, tuple[Target, st.SearchStrategy[Any]]] = {
    "kineto_events": (
        kineto_events,
        st.lists(st.tuples(st.integers(0, 2 * STEPS), st.sampled_from(sorted(EVENTS))), max_size=5),
    ),
    "kineto_text": (kineto_text, st.tuples(edits, st.booleans())),
    "kineto_anything": (kineto_anything, st.tuples(changes, edits, st.booleans())),
    "nsys_kernels": (nsys_kernels, st.lists(st.tuples(st.integers(0, 12), st.sampled_from(sorted(UNUSABLE))), max_size=5)),
    "nsys_anything": (nsys_anything, st.tuples(changes, edits)),
    "snapshots": (snapshots, st.tuples(changes, edits, st.integers(2, 5))),
    "manifests": (manifests, st.tuples(changes, edits)),
    "overrides": (overrides, overrides_drawn),
    "messages": (messages, st.tuples(changes, edits)),
}
