"""Reads a torch profiler (Kineto) trace into the tables: any version since torch 1.8, CUDA or ROCm, in bounded memory.

Events are sorted by start, and joined with their launches, iterations and collectives.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces import joins, kinds
from bridge_profiling.traces.bounds import UNIX_SINCE_NS
from bridge_profiling.traces.iterations import Iterations, find_iterations
from bridge_profiling.traces.kineto.collect import MEANINGS, Collector
from bridge_profiling.traces.kineto.columns import InexactTimes, Names
from bridge_profiling.traces.kineto.decode import EventReader, rank_info
from bridge_profiling.traces.periods import find_periods
from bridge_profiling.traces.tables import NULL, Columns, Integers, build, coded_column
from bridge_profiling.traces.types import Caveat, LostRecords, ProcessGroup, RankInfo, RankSource, RankTables, caveat

_KINDS = (kinds.COMPUTE, kinds.COMMUNICATION, kinds.MEMCPY, kinds.MEMSET)

#: Columns of `device_events`: what the names of copies say, and those that are attributes of `Device`.
_OF_COPIES = ("direction", "from_memory", "to_memory")
_OF_LAUNCHES = ("launch_start_ns", "launch_end_ns", "launch_thread")
_AS_THEY_ARE = ("device", "stream", "start_ns", "end_ns", "correlation", "operator", "graph", "bytes", *_OF_LAUNCHES)


class Host:
    """Host events by start, the longer one first."""

    def __init__(self, collected: Collector, names: Names, base_ns: int) -> None:
        columns = collected.host
        start, end = columns.take("start_ns"), columns.take("end_ns")
        self.order = joins.start_order(start, end).astype(np.int32)
        self.start_ns, self.end_ns = start[self.order] + base_ns, end[self.order] + base_ns
        del start, end
        self.category, self.name, self.thread, self.correlation = (
            columns.take(name, self.order) for name in ("category", "name", "thread", "correlation")
        )
        self.names = names

    def of_category(self, category: str) -> NDArray[np.int64]:
        """Rows of one category."""
        return np.flatnonzero(self.category == MEANINGS.index(category))

    def columns(self, collected: Collector) -> dict[str, Any]:
        """The columns of host_events."""
        columns = collected.host
        sequence = columns.take("sequence", self.order)
        shapes = [b"".join(text.split()).decode("utf-8", "replace") or None for text in collected.shapes.values]
        return {
            **{name: getattr(self, name) for name in ("thread", "start_ns", "end_ns", "correlation")},
            "process": columns.take("process", self.order),
            "category": coded_column(self.category, MEANINGS),
            "name": coded_column(self.name, self.names.all),
            "operator": _without_correlations(columns.take("operator", self.order), self.correlation),
            # torch writes -1, or its unsigned form, for none.
            "sequence": np.where(sequence < 0, NULL, sequence),
            "shapes": coded_column(columns.take("shapes", self.order), shapes),
            "stack": coded_column(columns.take("stack", self.order), list(collected.stacks.values)),
        }


class Device:
    """Work on the device by start, with its launches."""

    def __init__(self, collected: Collector, host: Host, names: Names, base_ns: int) -> None:
        columns = collected.device
        calls = host.of_category("runtime")
        self._rocm = any(name.startswith("hip") for name in names.say(host.name[calls], str)[0])
        start, name = columns.take("start_ns"), columns.take("name")
        order = np.argsort(start, kind="stable")
        # Some versions write synchronization records among the kernels, on a stream that does not exist.
        waits = names.which(name[order], lambda name: kinds.synchronization_kind(name) is not None)
        self.order = order[~waits] if waits.any() else order
        self.start_ns, self.end_ns = start[self.order] + base_ns, columns.take("end_ns", self.order) + base_ns
        self._name = name[self.order]
        self._category, self.device, self.stream, self.correlation, operator, self.graph, self.bytes = (
            columns.take(each, self.order)
            for each in ("category", "device", "stream", "correlation", "operator", "graph", "bytes")
        )
        self._configuration = coded_column(
            columns.take("configuration", self.order), [_configuration(text) for text in collected.configurations.values]
        )
        self.operator = _without_correlations(operator, self.correlation)
        self.launch = joins.launch_of(
            self.correlation,
            self.start_ns,
            kernel=self._category == MEANINGS.index("kernel"),
            calls=host.correlation[calls],
            call_start_ns=host.start_ns[calls],
            launches_one=names.which(host.name[calls], joins.launches_one),
        )
        self.launch_start_ns, self.launch_end_ns, self.launch_thread = (
            joins.taken(each[calls], self.launch.row) for each in (host.start_ns, host.end_ns, host.thread)
        )
        self._classify(collected, names)

    def _classify(self, collected: Collector, names: Names) -> None:
        """Each row's kind (index of _KINDS) and backend, and the operation in a communication kernel's name.

        A kernel that Kineto describes as a collective is one, whatever its name.
        """
        said, place = names.say(self._name, lambda name: kinds.kernel_kind(name, rocm=self._rocm))
        kernel = self._category == MEANINGS.index("kernel")
        named = np.array([each.kind == kinds.COMMUNICATION for each in said], bool)[place] & kernel
        communication = named | (np.isin(self.order, list(collected.collectives)) & kernel)
        copies, sets = (self._category == MEANINGS.index(each) for each in ("memcpy", "memset"))
        codes = [_KINDS.index(each) for each in (kinds.COMMUNICATION, kinds.MEMCPY, kinds.MEMSET)]
        self._kind = np.select([communication, copies, sets], codes).astype(np.int8)
        self._backend = coded_column(np.where(communication, place, -1), [each.backend or "other" for each in said])
        self.communication = np.flatnonzero(communication)
        self.operation = [said[place[row]].operation for row in self.communication.tolist()]

    def times(self, host: Host, names: Names) -> joins.DeviceTimes:
        """Its times, and the host's that they have to agree with."""
        calls = host.of_category("runtime")
        return joins.DeviceTimes(
            start_ns=self.start_ns,
            duration_ns=self.end_ns - self.start_ns,
            device=self.device,
            stream=self.stream,
            computes=self._kind != _KINDS.index(kinds.COMMUNICATION),
            launches=self.launch,
            call_start_ns=host.start_ns[calls],
            call_duration_ns=host.end_ns[calls] - host.start_ns[calls],
            calls_named=lambda wanted: names.which(host.name[calls], wanted),
            host_ns=(host.start_ns[:1], host.end_ns),
        )

    def periods(self, times: joins.DeviceTimes, names: Names, begin_ns: int) -> tuple[Iterations, list[Caveat]]:
        """Iterations in which its kernels repeat."""
        copied = names.which(self._name, lambda name: "H" in kinds.copy_kind(name).direction)
        copied &= self._category == MEANINGS.index("memcpy")
        return find_periods(times, names.all, self._name, self._kind == _KINDS.index(kinds.COMPUTE), copied, begin_ns)

    def columns(self, names: Names, iterations: Iterations) -> dict[str, Any]:
        """The columns of device_events."""
        copies, place = names.say(self._name, kinds.copy_kind)
        copy = np.where(self._category == MEANINGS.index("memcpy"), place, -1)
        collective = np.full(len(self.start_ns), NULL)
        collective[self.communication] = np.arange(len(self.communication))
        return {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "kind": coded_column(self._kind, _KINDS),
            "backend": self._backend,
            "name": coded_column(self._name, names.all),
            "iteration": iterations.containing(self.launch.issued_ns),
            "collective": collective,
            **{name: coded_column(copy, [getattr(each, name) for each in copies]) for name in _OF_COPIES},
            "configuration": self._configuration,
        }


def _configuration(written: bytes) -> str | None:
    """The value of `device_events.configuration` from JSON as Kineto wrote it, with zeros between."""
    try:
        values: list[Any] = [json.loads(text) if text else None for text in written.split(b"\0")]
        grid, block = ([int(size) for size in sizes] for sizes in values[:2])
        registers, shared_bytes = (None if number is None else int(number) for number in values[2:])
        return kinds.configuration(grid, block, registers, shared_bytes)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _without_correlations(operator: Integers, correlation: Integers) -> Integers:
    """Operators' ids; NULL where torch 1.10 to 1.13 wrote the correlation of a runtime call or kernel as its operator's id."""
    known = (operator != NULL) & (correlation != NULL)
    same = known & (operator == correlation)
    return np.where(same, NULL, operator) if same.sum() * 2 > known.sum() else operator


#: CUPTI's word for no stream in particular: all ones, in 32 or 64 bits.
_NO_STREAM = (1 << 32) - 1

#: Categories that caveats name one by one; the others are added up.
_NAMED = 3

#: c10::DeviceType.
_DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 14: "meta", 20: "privateuseone"}


def read(path: Path, *, rank: int = 0, rank_source: RankSource = "order") -> RankTables:
    """The tables of one trace. Times are exact to the nanosecond.

    Args:
        path: gzip, .xz or plain.
        rank: used when the trace names none.
        rank_source: where that rank comes from.

    Returns:
        Its tables. When `info.error` is set, the file is damaged, and they hold what could be read.

    Raises:
        TraceError: nothing could be read. The message names the file.
    """
    try:
        return _read(path, rank, rank_source, exact=False)
    except InexactTimes:
        return _read(path, rank, rank_source, exact=True)


def _read(path: Path, rank: int, rank_source: RankSource, *, exact: bool) -> RankTables:
    reader = EventReader(path, exact=exact)
    collected = Collector(exact=exact)
    collected.add_all(reader)
    if not len(collected.host) and not len(collected.device) and not len(collected.memory):
        raise TraceError(reader.error or _nothing_in(path, collected, reader))
    info = rank_info(path, reader.keys, rank, rank_source)
    lost = _lost(reader, collected, len(collected.device))
    try:
        tables, caveats, ambiguous, unrecorded = _tables(collected, info, whole=not lost.device)
    except ValueError as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    starts = [table[name] for table in tables.values() for name in ("start_ns", "time_ns") if name in table.column_names]
    first_ns = min((column[0].as_py() for column in starts if len(column)), default=0)
    info.clock = "unix" if first_ns > UNIX_SINCE_NS else "unknown"
    info.caveats += caveats
    if unusable := lost.total - collected.negative:
        least = "at least " if reader.damaged else ""
        info.add_caveat("events_undecodable.kineto", of_file=True, least=least, count=unusable)
    device = tables["device_events"]
    info.caveats += _events_left_out(collected)
    joins.add_trace_caveats(
        info,
        device_events=device.num_rows,
        unlaunched=device["launch_thread"].null_count,
        iterations=tables["iterations"].num_rows,
        marks="ProfilerStep#N",
    )
    if reader.error is not None:
        info.error = f"{reader.error}; everything before it was read"
    elif reader.damaged:
        info.error = f"{path} is damaged: at least {reader.left_out} events could not be read; the others were"
    elif collected.negative:
        info.error = f"{path} holds {collected.negative} events that end before they start; the others were read"
    more = ambiguous + unrecorded
    joins.add_lost(
        info,
        LostRecords(lost.total + more, lost.device + more, lost.of_device + unrecorded, unrecorded),
        ambiguous,
    )
    info.partial = info.error is not None
    return RankTables(info, tables)


def _lost(reader: EventReader, collected: Collector, recorded: int) -> LostRecords:
    """What could not be used, with an estimate for text that does not show how many events it held."""
    hole = reader.hole_bytes / max(reader.bytes_read - reader.hole_bytes, 1)
    in_hole, of_device = math.ceil(hole * collected.events), math.ceil(hole * recorded)
    total = max(reader.left_out, in_hole) + collected.untimed + collected.negative
    device = max(reader.lost_device + collected.lost_device, of_device)
    return LostRecords(total, device, recorded + device)


def _nothing_in(path: Path, collected: Collector, reader: EventReader) -> str:
    if collected.negative or collected.untimed or collected.undated:
        return f"{path} cannot be read: none of its events has a usable time"
    if reader.left_out:
        return f"{path} is not a Kineto trace: none of its {reader.left_out} events can be decoded"
    return f"{path} is not a Kineto trace: none of its {collected.events} entries is an event that Kineto writes"


def _events_left_out(collected: Collector) -> Iterator[Caveat]:
    if undated := len(collected.undated):
        few = undated <= joins.FEW * (len(collected.device) + undated)
        yield caveat("events_undated" if few else "device_events_undated", count=undated)
    unknown, others = _by_count(collected.unknown), _by_count(collected.left_out)
    for category, count in unknown[:_NAMED]:
        yield caveat("category_unknown", count=count, category=category)
    for (kind, category), count in others[:_NAMED]:
        of_category = f" of the category {category!r}" if category else ""
        yield caveat("events_not_read.kind", count=count, kind=kind, of_category=of_category)
    if collected.impossible:
        yield caveat("numbers_impossible", count=collected.impossible)
    if more := sum(count for _, count in [*unknown[_NAMED:], *others[_NAMED:]]):
        yield caveat("events_not_read.more", count=more)


def _by_count(counts: Counter[Any]) -> list[tuple[Any, int]]:
    """The largest first, in an order that does not depend on the file's."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _tables(collected: Collector, info: RankInfo, *, whole: bool) -> tuple[dict[str, pa.Table], list[Caveat], int, int]:
    """The tables, caveats, and the numbers of device events with ambiguous launches and of kernels without a record.

    `whole`: no device event of the file is lost.
    """
    names, base_ns = Names(list(collected.names.values)), info.clock_base_ns
    host = Host(collected, names, base_ns)
    device = Device(collected, host, names, base_ns)
    times, time_caveats = joins.checked_times(device.times(host, names))
    device.end_ns = times.start_ns + times.duration_ns
    if joins.clocks_disagree(time_caveats):
        device.launch_start_ns = device.launch_end_ns = np.full(len(device.start_ns), NULL)
    iterations, caveats = _iterations(host, device, times, names, collected.marks, base_ns)
    unrecorded = 0
    if whole and not device.launch.ambiguous:  # else the missing ones are counted already
        calls = host.of_category("runtime")
        launches = joins.unrecorded_launches(
            np.append(device.correlation, collected.undated),
            calls=host.correlation[calls],
            call_start_ns=host.start_ns[calls],
            calls_named=times.calls_named,
        )
        iterations, incomplete, unrecorded = iterations.complete(*launches)
        caveats += incomplete
    caveats += time_caveats
    info.content = joins.content_of(host.start_ns, host.end_ns, device.start_ns, device.end_ns)
    operations, undescribed = _operations(device, host, collected, {group.name: group for group in info.groups})
    device_events, rows = build("device_events", info.rank, device.columns(names, iterations)), device.communication
    if undescribed:
        unknown = "messages are" if all(each.group_name for each in operations) else "group and message are"
        described = caveat("collectives_undescribed", undescribed=undescribed, kernels=len(rows), unknown=unknown)
        caveats.append(described)
    tables = {
        "device_events": device_events,
        "collectives": build(
            "collectives", info.rank, joins.collective_columns(operations, device_events, rows, device.launch.issued_ns[rows])
        ),
        "iterations": iterations.table(info.rank, _boundary(iterations, host, names, collected.marks, base_ns)),
        "host_events": build("host_events", info.rank, host.columns(collected)),
    }
    if len(collected.synchronizations):
        tables["synchronizations"] = build("synchronizations", info.rank, _wait_columns(collected, names), base_ns)
    if len(collected.memory):
        tables["memory_events"] = build("memory_events", info.rank, _memory_columns(collected.memory), base_ns)
    return tables, caveats, device.launch.ambiguous, unrecorded


def _operations(
    device: Device, host: Host, collected: Collector, groups: Mapping[str, ProcessGroup]
) -> tuple[list[joins.Operation], int]:
    """What each communication kernel carries out, and the number of kernels without a description.

    Kineto describes a kernel by the call it was launched in. Operations issued as a batch (`batch_isend_irecv`) are
    launched after all their calls; then the thread's calls since its previous launch describe the kernel. Without any operator,
    kernels are collectives of the group that the trace lists, if it lists only one; those that send and receive are
    all-to-alls.
    """
    only = _only_group(groups) if not collected.calls and not collected.collectives else None
    calls: dict[int, deque[tuple[int, joins.Operation]]] = defaultdict(deque)
    for row in np.flatnonzero(np.isin(host.order, list(collected.calls))).tolist():
        calls[int(host.thread[row])].append((int(host.start_ns[row]), collected.calls[int(host.order[row])]))
    issued = device.launch.issued_ns[device.communication]
    found: dict[int, joins.Operation] = {}
    undescribed = 0
    for place in np.argsort(issued, kind="stable").tolist():
        row, named = int(device.communication[place]), device.operation[place]
        launched_ns = int(device.launch_start_ns[row])
        before = _taken(calls.get(int(device.launch_thread[row])), launched_ns, joins.carried_out_by(named))
        described = collected.collectives.get(int(device.order[row]))
        if described is not None:
            found[place] = described.in_known_group(groups)
        elif before:
            found[place] = joins.batch([call.in_known_group(groups) for call in before])
        else:
            alone = joins.Operation(named)
            if only is not None and named is not None:
                alone = joins.Operation("all_to_all" if named == "send_recv" else named, only.name).in_known_group(groups)
            found[place] = alone
            undescribed += 1
    return [found[place] for place in range(len(issued))], undescribed


def _only_group(groups: Mapping[str, ProcessGroup]) -> ProcessGroup | None:
    """The only group of several ranks that communicates on devices; None if there are more, or its ranks are unknown."""
    several = [group for group in groups.values() if len(group.ranks) != 1 and "nccl" in group.backend]
    return several[0] if len(several) == 1 and several[0].ranks else None


def _taken(
    calls: deque[tuple[int, joins.Operation]] | None, until_ns: int, operations: Sequence[str | None]
) -> list[joins.Operation]:
    """Remove a thread's calls up to a time, and return those that the kernel launched then can carry out."""
    found = []
    while calls and calls[0][0] <= until_ns:
        call = calls.popleft()[1]
        if call.group_size != 1 and call.operation in operations:  # a group of one launches nothing
            found.append(call)
    return found


def _iterations(
    host: Host, device: Device, times: joins.DeviceTimes, names: Names, marks: Sequence[int], base_ns: int
) -> tuple[Iterations, list[Caveat]]:
    rows = np.flatnonzero((host.category == MEANINGS.index("annotation")) | (host.category == MEANINGS.index("operator")))
    calls = host.of_category("runtime")
    # A capture of a device begins with what the host first asks of it, long after the profiler's own mark.
    profiler_ns = np.array(marks, np.int64) + base_ns if marks else host.start_ns[:1]
    first = (host.start_ns[host.of_category("annotation")], host.start_ns[calls] if len(calls) else profiler_ns)
    begin_ns = min((int(times.min()) for times in first if len(times)), default=0)
    launched_ns = host.start_ns[calls][names.which(host.name[calls], joins.launches_one)]
    found = find_iterations(names.all, host.name[rows], host.start_ns[rows], host.end_ns[rows], launched_ns, begin_ns)
    if len(found[0].number) or found[1]:
        return found
    return device.periods(times, names, begin_ns)


def _boundary(iterations: Iterations, host: Host, names: Names, marks: Sequence[int], base_ns: int) -> NDArray[np.bool_]:
    """Which iterations the profiler starts, stops or flushes in."""
    marks_ns = np.array(marks, np.int64) + base_ns
    overhead = host.of_category("overhead")
    rows = overhead[names.which(host.name[overhead], lambda name: "flush" in name.lower())]
    return iterations.overlapping(marks_ns, marks_ns) | iterations.overlapping(host.start_ns[rows], host.end_ns[rows])


def _wait_columns(collected: Collector, names: Names) -> dict[str, Any]:
    columns = collected.synchronizations
    start_ns = columns.take("start_ns")
    order = np.argsort(start_ns, kind="stable")
    said, kind = names.say(columns.take("name", order), kinds.synchronization_kind)
    others = ("end_ns", "device", "stream", "correlation", "producer_stream", "producer_correlation")
    waits = {name: columns.take(name, order) for name in others}
    nowhere = (waits["stream"] < 0) | (waits["stream"] == _NO_STREAM)
    stream = np.where(nowhere, NULL, waits["stream"])
    return waits | {"kind": coded_column(kind, said), "start_ns": start_ns[order], "stream": stream}


def _memory_columns(columns: Columns) -> dict[str, Any]:
    time_ns = columns.take("time_ns")
    order = np.argsort(time_ns, kind="stable")
    types = columns.take("device_type", order)
    used = np.unique(types).tolist()
    others = ("thread", "address", "device", "bytes", "total_allocated_bytes", "total_reserved_bytes")
    device_type = coded_column(np.searchsorted(used, types), [_DEVICE_TYPES.get(each) for each in used])
    return {"time_ns": time_ns[order], "device_type": device_type} | {name: columns.take(name, order) for name in others}
