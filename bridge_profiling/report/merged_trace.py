"""One trace of all ranks on one clock, for https://ui.perfetto.dev or chrome://tracing.

Each rank is a process; its host threads and streams are threads; arrows lead from launches to the work they launched. A finding
is a track on top of the ranks it is about. Written rank by rank in batches of rows, so memory does not grow with the run.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from isal import igzip

from bridge_profiling.facts.run import RunFacts
from bridge_profiling.findings import Event, Finding
from bridge_profiling.report.page import write_output
from bridge_profiling.report.timeline import event_length_ns
from bridge_profiling.traces.types import RankInfo

#: Rows in memory at a time.
_BATCH_ROWS = 1 << 14

#: torch's names for kinds of the tables, which tools that read its traces know.
_CATEGORIES = {
    "compute": "kernel",
    "communication": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "annotation": "user_annotation",
    "python": "python_function",
    "overhead": "overhead",
}

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
        with _opened(temporary, compressed=output.name.endswith(".gz")) as file:
            # The base turns times into Unix time: as microseconds in JSON, Unix times would lose their nanoseconds.
            # By the first key, `traces.discover` knows that this is not a rank's capture.
            file.write('{"bridge_profiling":"merged trace","schemaVersion":1,"displayTimeUnit":"ms",')
            file.write(f'"baseTimeNanoseconds":{base_ns},"traceEvents":[\n')
            file.write('{"ph":"M","name":"trace_name","pid":0,"tid":0,"args":{"name":"all ranks"}}')
            for done, (info, entry) in enumerate(ranks, 1):
                rank = _Rank(info, offsets[info.rank] - base_ns, tracks)
                for event in itertools.chain(rank.annotations(entry, findings), rank.events(entry, host=host)):
                    file.write(",\n" + event)
                count += rank.count
                if on_progress is not None:
                    on_progress(done, len(ranks))
            file.write("\n]}\n")

    write_output(output, write)
    return count


class _Rank:
    """One rank's events as JSON, with `shift_ns` added to its times.

    `tracks` numbers the threads of all ranks: Perfetto treats threads of the same number as one.
    """

    def __init__(self, info: RankInfo, shift_ns: int, tracks: Iterator[int]) -> None:
        self.count = 0
        self._rank, self._shift_ns, self._tracks = info.rank, shift_ns, tracks
        self._known: dict[tuple[str, int, int], int] = {}
        coordinates = "".join(f" {name} {place}" for name, (place, _) in (info.coordinates or {}).items())
        self._title = f"rank {info.rank}{coordinates}" + (f" on {info.host}" if info.host else "")

    def events(self, entry: Path, *, host: bool) -> Iterator[str]:
        """Every event; before the first one of a track, its name and place."""
        yield self._said("process_name", 0, name=self._title)
        yield self._said("process_sort_index", 0, sort_index=self._rank)
        if host:
            for rows in _batches(entry / "host_events.parquet", _HOST_COLUMNS):
                yield from self._host(rows)
        for rows in _batches(entry / "device_events.parquet", _DEVICE_COLUMNS):
            yield from self._device(rows, arrows=host)

    def annotations(self, entry: Path, findings: Sequence[Finding]) -> Iterator[str]:
        """Each finding about this rank as a track above the threads; slices of a track may not overlap."""
        for number, finding in enumerate(findings, 1):
            places = _places(finding, self._rank, entry)
            if not places:
                continue
            track = next(self._tracks)
            yield self._said("thread_name", track, name=f"finding {number}: {finding.id}")
            yield self._said("thread_sort_index", track, sort_index=number - 1_000_000)
            args = {
                "title": finding.title,
                "change": finding.action,
                "recoverable_us_per_iteration": finding.recoverable_us_per_iteration,
                "at_most_us_per_iteration": finding.at_most_us_per_iteration,
                "confidence": str(finding.confidence),
            }
            over = -self._shift_ns
            for event in sorted(places, key=lambda place: place.start_ns or 0):
                # Nothing begins before the trace does, nor before the end of the previous slice.
                start = max(event.start_ns or 0, over)
                over = max(over, (event.start_ns or 0) + event_length_ns(event))
                if over > start:
                    said = json.dumps({"event": event.name, "count": event.count, **args})[1:-1]
                    yield self._slice("finding", json.dumps(finding.title), track, start, over, said)

    def _host(self, rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
        for category, name, thread, start, end, correlation, shapes in rows:
            track = yield from self._track("thread", thread)
            args = f'"correlation":{correlation}' if correlation is not None else ""
            if shapes is not None:
                args += f'{"," if args else ""}"Input Dims":{shapes}'
            yield self._complete(category, name, track, start, end, args)

    def _device(self, rows: Iterator[tuple[Any, ...]], *, arrows: bool) -> Iterator[str]:
        for kind, name, device, stream, start, end, correlation, launched, thread, iteration, size in rows:
            track = yield from self._track("stream", stream or 0, device or 0)
            values = {"device": device, "stream": stream, "correlation": correlation, "iteration": iteration, "bytes": size}
            args = ",".join(f'"{key}":{value}' for key, value in values.items() if value is not None)
            yield self._complete(kind, name, track, start, end, args)
            if arrows and launched is not None and thread is not None and correlation is not None:
                launching = yield from self._track("thread", thread)
                yield self._arrow("s", correlation, launching, launched)
                yield self._arrow("f", correlation, track, start)

    def _complete(self, category: str, name: str, track: int, start_ns: int, end_ns: int, args: str) -> str:
        self.count += 1
        return self._slice(_CATEGORIES.get(category, category), name, track, start_ns, end_ns, args)

    def _slice(self, category: str, name: str, track: int, start_ns: int, end_ns: int, args: str) -> str:
        return (
            f'{{"ph":"X","cat":"{category}","name":{name},"pid":{self._rank},"tid":{track},'
            f'"ts":{_us(start_ns + self._shift_ns)},"dur":{_us(end_ns - start_ns)},"args":{{{args}}}}}'
        )

    def _arrow(self, phase: str, correlation: int, track: int, time_ns: int) -> str:
        """One end of an arrow. Ids are the ranks' own: correlations have 32 bits, and JSON's numbers hold 53."""
        end = ',"bp":"e"' if phase == "f" else ""
        return (
            f'{{"ph":"{phase}","cat":"ac2g","name":"ac2g","id":{self._rank << 32 | correlation & 0xFFFFFFFF},'
            f'"pid":{self._rank},"tid":{track},"ts":{_us(time_ns + self._shift_ns)}{end}}}'
        )

    def _track(self, kind: str, number: int, device: int = 0) -> Generator[str, None, int]:
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

    def _said(self, what: str, track: int, **args: Any) -> str:
        return f'{{"ph":"M","name":"{what}","pid":{self._rank},"tid":{track},"args":{json.dumps(args)}}}'


def _places(finding: Finding, rank: int, entry: Path) -> list[Event]:
    """Where a finding shows on a rank: its events there, or each iteration if the rank is responsible."""
    known = [event for event in finding.events if event.rank == rank and event.start_ns is not None and event.duration_us]
    if known or rank not in finding.ranks or any(event.start_ns is not None for event in finding.events):
        return known
    rows = (row for batch in _batches(entry / "iterations.parquet", ("iteration", "start_ns", "end_ns")) for row in batch)
    return [Event(rank, f"iteration {number}", number, start, (end - start) / 1e3) for number, start, end in rows]


def _us(time_ns: int) -> str:
    """Microseconds with all digits: 1234567 is 1234.567."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _batches(path: Path, columns: Sequence[str]) -> Iterator[Iterator[tuple[Any, ...]]]:
    """Rows of some columns of a table, names as JSON text; none if the table is missing."""
    if not path.is_file():
        return
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns)):
            yield zip(*(_values(name, batch.column(name)) for name in columns), strict=True)


def _values(name: str, column: pa.Array) -> list[Any]:
    if name != "name":
        return column.to_pylist()
    # A few thousand names for a million events: each is quoted once per batch.
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    quoted = [json.dumps(name) for name in encoded.dictionary.to_pylist()]
    return ['""' if place is None else quoted[place] for place in encoded.indices.to_pylist()]


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
    """When a rank's first event begins, from Parquet's statistics; None without events."""
    found = []
    for name in ("device_events", "host_events") if host else ("device_events",):
        path = entry / f"{name}.parquet"
        if path.is_file():
            metadata = pq.read_metadata(path)
            column = metadata.schema.names.index("start_ns")
            groups = [metadata.row_group(place).column(column).statistics for place in range(metadata.num_row_groups)]
            found += [group.min for group in groups if group is not None and group.has_min_max]
    return min(found, default=None)


def _opened(path: Path, *, compressed: bool) -> IO[str]:
    if compressed:
        return io.TextIOWrapper(io.BufferedWriter(igzip.IGzipFile(path, "wb", compresslevel=1), 1 << 20), encoding="utf-8")
    return path.open("w", encoding="utf-8")
