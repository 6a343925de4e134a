"""One trace of all ranks on one clock, for https://ui.perfetto.dev or chrome://tracing.

Each rank is a process; its host threads and streams are threads; arrows lead from launches to the work they launched. A finding
is a track on top of the ranks it is about. Written rank by rank in batches of rows, so memory does not grow with the run.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from isal import igzip

from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.types import documented
from bridge_profiling.findings import Event, Finding
from bridge_profiling.report.page import write_output
from bridge_profiling.report.timeline import event_length_ns
from bridge_profiling.report.words import resource
from bridge_profiling.traces import cache
from bridge_profiling.traces.types import RankInfo

#: An event of the trace, as plain data.
_Event = dict[str, Any]

_ENCODER = msgspec.json.Encoder()

#: Rows in memory at a time.
_BATCH_ROWS = 1 << 14

#: torch's names for kinds of the tables, which tools that read its traces know.
_CATEGORIES = resource("theme")["categories"]

_DEVICE_COLUMNS = (
    "kind",
    "name",
    "device",
    "stream",
    "start_ns",
    "end_ns",
    "correlation",
    "launch_start_ns",
    "launch_thread",
    "iteration",
    "bytes",
)
_HOST_COLUMNS = ("category", "name", "thread", "start_ns", "end_ns", "correlation", "shapes")


def write_merged_trace(
    facts: RunFacts,
    output: Path,
    *,
    host: bool = True,
    findings: Sequence[Finding] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write one trace of all ranks.

    Args:
        facts: of the run.
        output: the file, written atomically; compressed if its name ends with .gz.
        host: include the hosts' ranges, and arrows from launches to the work they launched.
        findings: annotated at their events, otherwise over the iterations of the responsible ranks.
        on_progress: called with the number of ranks written, and of all.

    Returns:
        The number of device and host events written.

    Raises:
        ProfilingConfigError: the file cannot be written.
    """
    ranks = facts.captures.entries()
    offsets, base_ns = _offsets_ns(ranks, facts.clock_offsets if len(ranks) > 1 else None, host=host)
    tracks, count = itertools.count(1), 0

    def write(temporary: Path) -> None:
        nonlocal count
        with igzip.IGzipFile(temporary, "wb", compresslevel=1) if output.name.endswith(".gz") else temporary.open("wb") as raw:
            file = io.BufferedWriter(raw, 1 << 20)
            # The base turns times into Unix time: as microseconds in JSON, Unix times would lose their nanoseconds.
            # By the first key, `traces.discover` knows that this is not a rank's capture.
            file.write(b'{"bridge_profiling":"merged trace","schemaVersion":1,"displayTimeUnit":"ms",')
            file.write(b'"baseTimeNanoseconds":%d,"traceEvents":[\n' % base_ns)
            file.write(_encoded({"ph": "M", "name": "trace_name", "pid": 0, "tid": 0, "args": {"name": "all ranks"}}))
            for done, (info, entry) in enumerate(ranks, 1):
                rank = _Rank(info, offsets[info.rank] - base_ns, tracks)
                for event in itertools.chain(rank.annotations(entry, findings), rank.events(entry, host=host)):
                    file.write(b",\n" + _encoded(event))
                count += rank.count
                if on_progress is not None:
                    on_progress(done, len(ranks))
            file.write(b"\n]}\n")
            file.flush()

    write_output(output, write)
    return count


def _encoded(event: _Event) -> bytes:
    """An event as JSON on one line; with escapes if a terminal would obey something in it, or it has half of a character."""
    with suppress(UnicodeEncodeError):
        if (text := _ENCODER.encode(event)).decode().isprintable():
            return text
    return json.dumps(event, separators=(",", ":"), default=lambda raw: json.loads(bytes(raw))).encode()


class _Rank:
    """One rank's events, with `shift_ns` added to its times.

    `tracks` numbers the threads of all ranks: Perfetto treats threads of the same number as one.
    """

    def __init__(self, info: RankInfo, shift_ns: int, tracks: Iterator[int]) -> None:
        self.count = 0
        self._rank, self._shift_ns, self._tracks = info.rank, shift_ns, tracks
        self._known: dict[tuple[str, int, int], int] = {}
        coordinates = "".join(f" {name} {place}" for name, (place, _) in (info.coordinates or {}).items())
        self._title = f"rank {info.rank}{coordinates}" + (f" on {info.host}" if info.host else "")

    def events(self, entry: Path, *, host: bool) -> Iterator[_Event]:
        """Every event; before the first one of a track, its name and place."""
        yield self._said("process_name", 0, name=self._title)
        yield self._said("process_sort_index", 0, sort_index=self._rank)
        if host:
            for category, name, thread, start, end, correlation, shapes in _rows(entry, "host_events", _HOST_COLUMNS):
                track = yield from self._track("thread", thread)
                dimensions = None if shapes is None else msgspec.Raw(shapes.encode())
                yield self._slice(category, name, track, start, end, {"correlation": correlation, "Input Dims": dimensions})
        for kind, name, device, stream, start, end, correlation, launched, thread, iteration, size in _rows(
            entry, "device_events", _DEVICE_COLUMNS
        ):
            track = yield from self._track("stream", stream or 0, device or 0)
            values = {"device": device, "stream": stream, "correlation": correlation, "iteration": iteration, "bytes": size}
            yield self._slice(kind, name, track, start, end, values)
            if host and launched is not None and thread is not None and correlation is not None:
                launching = yield from self._track("thread", thread)
                yield self._arrow("s", correlation, launching, launched)
                yield self._arrow("f", correlation, track, start) | {"bp": "e"}

    def annotations(self, entry: Path, findings: Sequence[Finding]) -> Iterator[_Event]:
        """Each finding about this rank as a track above the threads; slices of a track may not overlap."""
        for number, finding in enumerate(findings, 1):
            places = _places(finding, self._rank, entry)
            if not places:
                continue
            track = next(self._tracks)
            yield self._said("thread_name", track, name=f"finding {number}: {finding.id}")
            yield self._said("thread_sort_index", track, sort_index=number - 1_000_000)
            known = {
                "title": finding.title,
                "change": finding.action,
                "recoverable_ns_per_iteration": finding.recoverable_ns_per_iteration,
                "at_most_ns_per_iteration": finding.at_most_ns_per_iteration,
                "confidence": finding.confidence,
            }
            args = documented(known)
            over = -self._shift_ns
            for event in sorted(places, key=lambda place: place.start_ns or 0):
                # Nothing begins before the trace does, nor before the end of the previous slice.
                start = max(event.start_ns or 0, over)
                over = max(over, (event.start_ns or 0) + event_length_ns(event))
                if over > start:
                    said = {"event": event.name, "count": event.count, **args}
                    yield self._at("X", "finding", finding.title, track, start) | {"dur": (over - start) / 1e3, "args": said}

    def _slice(self, category: str, name: str, track: int, start_ns: int, end_ns: int, values: dict[str, Any]) -> _Event:
        self.count += 1
        args = {key: value for key, value in values.items() if value is not None}
        begun = self._at("X", _CATEGORIES.get(category, category), name, track, start_ns)
        return begun | {"dur": (end_ns - start_ns) / 1e3, "args": args}

    def _arrow(self, phase: str, correlation: int, track: int, time_ns: int) -> _Event:
        """One end of an arrow. Ids are the ranks' own: correlations have 32 bits, and JSON's numbers hold 53."""
        return self._at(phase, "ac2g", "ac2g", track, time_ns) | {"id": self._rank << 32 | correlation & 0xFFFFFFFF}

    def _at(self, phase: str, category: str, name: str | None, track: int, time_ns: int) -> _Event:
        return {
            "ph": phase,
            "cat": category,
            "name": name or "",
            "pid": self._rank,
            "tid": track,
            "ts": (time_ns + self._shift_ns) / 1e3,
        }

    def _track(self, kind: str, number: int, device: int = 0) -> Generator[_Event, None, int]:
        """The track of a thread or a stream; before its first event, those that name and place it."""
        key = (kind, device, number)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = next(self._tracks)
            name = f"thread {number}" if kind == "thread" else f"device {device} stream {number}"
            yield self._said("thread_name", found, name=name)
            # Streams below threads, whatever their numbers.
            yield self._said("thread_sort_index", found, sort_index=found + (1_000_000 if kind == "stream" else 0))
        return found

    def _said(self, what: str, track: int, **args: Any) -> _Event:
        return {"ph": "M", "name": what, "pid": self._rank, "tid": track, "args": args}


def _places(finding: Finding, rank: int, entry: Path) -> list[Event]:
    """Where a finding shows on a rank: its events there, or each iteration if the rank is responsible."""
    known = [event for event in finding.events if event.rank == rank and event.start_ns is not None and event.duration_ns]
    if known or rank not in finding.ranks or any(event.start_ns is not None for event in finding.events):
        return known
    rows = _rows(entry, "iterations", ("iteration", "start_ns", "end_ns"))
    return [Event(rank, f"iteration {number}", number, start, end - start) for number, start, end in rows]


def _rows(entry: Path, name: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Rows of some columns of a rank's table; none if the table is missing."""
    tables = cache.open_entry(entry)
    for block in tables.blocks(name, columns) if tables is not None else ():
        for batch in block.to_batches(_BATCH_ROWS):
            yield from zip(*map(_values, batch.columns), strict=True)


def _values(column: pa.Array) -> list[Any]:
    if not pa.types.is_dictionary(column.type):
        return column.to_pylist()
    # A few thousand names for a million events: each becomes an object once per batch.
    names = column.dictionary.to_pylist()
    return [None if place is None else names[place] for place in column.indices.to_pylist()]


def _offsets_ns(
    ranks: Sequence[tuple[RankInfo, Path]], clock_offsets: pa.Table | None, *, host: bool
) -> tuple[dict[int, int], int]:
    """Each rank's offset to the common clock, and the earliest time on it.

    Ranks whose clock is unknown, and that share no collective with others, begin when the others do.
    """
    rows = [] if clock_offsets is None else clock_offsets.to_pylist()
    offsets = {info.rank: 0 for info, _ in ranks} | {row["rank"]: row["offset_ns"] for row in rows}
    reference = {info.rank: info.rank for info, _ in ranks} | {row["rank"]: row["reference"] for row in rows}
    clock = {info.rank: info.clock for info, _ in ranks}
    begins = {
        info.rank: first + offsets[info.rank] for info, entry in ranks if (first := _first_ns(entry, host=host)) is not None
    }
    known = [begin for rank, begin in begins.items() if clock.get(reference[rank]) == "unix"]
    base_ns = min(known or begins.values(), default=0)
    for lost in {reference[rank] for rank in begins if clock.get(reference[rank]) != "unix"}:
        together = [rank for rank in begins if reference[rank] == lost]
        late_ns = min(begins[rank] for rank in together) - base_ns
        for rank in together:
            offsets[rank] -= late_ns
    return offsets, base_ns


def _first_ns(entry: Path, *, host: bool) -> int | None:
    """When a rank's first event begins; None without events."""
    tables = cache.open_entry(entry)
    names = ("device_events", "host_events") if host else ("device_events",)
    blocks = [block for name in names for block in tables.blocks(name, ["start_ns"])] if tables is not None else []
    return min((pc.min(block["start_ns"]).as_py() for block in blocks if block.num_rows), default=None)
