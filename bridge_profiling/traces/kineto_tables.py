"""Columns of a Kineto file joined into the tables: launches, iterations, collectives. Reads no files."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.traces.joins import Iterations, Operation, batch, collective_columns, ranks_of, rows_by_key, taken
from bridge_profiling.traces.kinds import (
    COMMUNICATION,
    COMPUTE,
    MEMCPY,
    MEMSET,
    copy_kind,
    kernel_kind,
    synchronization_kind,
    torch_operation,
)
from bridge_profiling.traces.kineto_collect import MEANINGS, Collector, Message
from bridge_profiling.traces.kineto_columns import Columns
from bridge_profiling.traces.tables import NULL, Integers, build, coded_column, integer_column
from bridge_profiling.traces.types import Caveat, ProcessGroup

_ITERATION = re.compile(r"(?:ProfilerStep\s*#|iteration[_ #])(\d+)$")
_FLUSH = re.compile(r"flush", re.IGNORECASE)

_NO_STREAM = (1 << 32) - 1
_MAX_ITERATION = (1 << 31) - 1

#: Which calls a kernel can carry out, by the operation that its name tells; else those of that operation.
_CALLED = {"send_recv": ("send", "recv", "all_to_all", "gather", "scatter")}

_AS_WRITTEN = ("device", "stream", "correlation", "operator", "graph", "bytes")
_KINDS = (COMPUTE, COMMUNICATION, MEMCPY, MEMSET)

#: c10::DeviceType.
_DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 14: "meta", 20: "privateuseone"}


def tables_of(
    collected: Collector, rank: int, groups: Sequence[ProcessGroup], base_ns: int, caveats: list[Caveat]
) -> dict[str, pa.Table]:
    """The tables of one rank.

    Args:
        collected: its events.
        rank: global rank.
        groups: process groups that the trace lists.
        base_ns: added to every time.
        caveats: filled.
    """
    names = _Names(list(collected.names.values))
    host = _Host(collected, names, base_ns)
    iterations, boundary = _iterations(host, names, np.array(collected.marks, np.int64) + base_ns, caveats)
    device = _Device(collected, host, names, iterations, base_ns)
    operations = _operations(device, host, collected, {group.name: group for group in groups}, caveats)
    columns, rows = device.columns(names), device.communication
    tables = {
        "device_events": build("device_events", rank, columns),
        "collectives": build("collectives", rank, collective_columns(operations, columns, rows, device.issued_ns[rows])),
        "iterations": build("iterations", rank, _iteration_columns(iterations, boundary)),
        "host_events": build("host_events", rank, host.table_columns(collected)),
    }
    if len(collected.synchronizations):
        tables["synchronizations"] = build("synchronizations", rank, _synchronization_columns(collected, names, base_ns))
    if len(collected.memory):
        tables["memory_events"] = build("memory_events", rank, _memory_columns(collected.memory, base_ns))
    return tables


class _Names:
    """The file's names, and what each says, asked once per name."""

    def __init__(self, names: list[str]) -> None:
        self.all = names

    def column(self, codes: NDArray[np.int32]) -> pa.Array:
        """Names as a table's column, with those only that it has."""
        return coded_column(codes, self.all)

    def say(self, codes: NDArray[np.int32], what: Callable[[str], Any]) -> tuple[list[Any], NDArray[np.int32]]:
        """What each name in a column says: the answers of the names used, and each row's place among them."""
        used, place = _used(codes, len(self.all))
        return [what(self.all[code]) for code in used.tolist()], place


class _Host:
    """Host events by start, the longer one first."""

    def __init__(self, collected: Collector, names: _Names, base_ns: int) -> None:
        columns = collected.host
        start, end = columns.take("start_ns"), columns.take("end_ns")
        self.order = np.lexsort((-end, start)).astype(np.int32)
        self.start_ns, self.end_ns = start[self.order] + base_ns, end[self.order] + base_ns
        del start, end
        self.category, self.name, self.thread, self.correlation = (
            columns.take(name, self.order) for name in ("category", "name", "thread", "correlation")
        )
        self.names = names

    def of_category(self, category: str) -> NDArray[np.int64]:
        """Rows of one category."""
        return np.flatnonzero(self.category == MEANINGS.index(category))

    def table_columns(self, collected: Collector) -> dict[str, pa.Array]:
        """The columns of host_events."""
        columns = collected.host
        shapes = [b"".join(text.split()).decode("utf-8", "replace") or None for text in collected.shapes.values]
        return {
            "process": integer_column(columns.take("process", self.order)),
            "thread": integer_column(self.thread),
            "category": coded_column(self.category, MEANINGS),
            "name": self.names.column(self.name),
            "start_ns": pa.array(self.start_ns),
            "end_ns": pa.array(self.end_ns),
            "correlation": integer_column(self.correlation),
            "operator": integer_column(_without_correlations(columns.take("operator", self.order), self.correlation)),
            "shapes": coded_column(columns.take("shapes", self.order), shapes),
            "stack": coded_column(columns.take("stack", self.order), list(collected.stacks.values)),
        }


class _Device:
    """Work on the device by start, with its launches and iterations."""

    def __init__(self, collected: Collector, host: _Host, names: _Names, iterations: Iterations, base_ns: int) -> None:
        columns = collected.device
        self.rocm = any(name.startswith("hip") for name in names.say(host.name[host.of_category("runtime")], str)[0])
        start, name = columns.take("start_ns"), columns.take("name")
        order = np.argsort(start, kind="stable")
        # Synchronization records stand among the kernels of some versions, on a stream that is none.
        waits, place = names.say(name[order], lambda name: synchronization_kind(name) is not None)
        self.order = order[~np.array(waits, bool)[place]] if any(waits) else order
        self.start_ns, self.end_ns = start[self.order] + base_ns, columns.take("end_ns", self.order) + base_ns
        self.raw = {each: columns.take(each, self.order) for each in ("category", *_AS_WRITTEN)} | {"name": name[self.order]}
        self.raw["operator"] = _without_correlations(self.raw["operator"], self.raw["correlation"])

        calls = host.of_category("runtime")
        launch = rows_by_key(host.correlation[calls], self.raw["correlation"])
        self.launch_start_ns = taken(host.start_ns[calls], launch)
        self.launch_end_ns = taken(host.end_ns[calls], launch)
        self.launch_thread = taken(host.thread[calls], launch)
        belongs_ns = np.where(launch >= 0, self.launch_start_ns, self.start_ns)
        self.issued_ns = belongs_ns
        self.iteration = iterations.containing(belongs_ns)

        self.kind, self.backend, self.operation = self._kinds(collected, names)
        self.communication = np.flatnonzero(self.kind == _KINDS.index(COMMUNICATION))
        self.collective = np.full(len(self.start_ns), NULL)
        self.collective[self.communication] = np.arange(len(self.communication))

    def _kinds(self, collected: Collector, names: _Names) -> tuple[NDArray[np.int8], pa.Array, list[str | None]]:
        """Each row's kind (number in _KINDS) and backend, and the operation that a communication kernel's name tells.

        A kernel that Kineto describes as a collective is one, whatever its name.
        """
        said, place = names.say(self.raw["name"], lambda name: kernel_kind(name, rocm=self.rocm))
        category = self.raw["category"]
        kernel = category == MEANINGS.index("kernel")
        told = np.array([each.kind == COMMUNICATION for each in said], bool)[place] & kernel
        described = np.isin(self.order, list(collected.messages)) & kernel
        kind = np.select(
            [told | described, category == MEANINGS.index("memcpy"), category == MEANINGS.index("memset")],
            [_KINDS.index(each) for each in (COMMUNICATION, MEMCPY, MEMSET)],
        ).astype(np.int8)
        backends = [each.backend or "other" for each in said]
        operations = [said[place[row]].operation for row in np.flatnonzero(told | described)]
        return kind, coded_column(np.where(told | described, place, -1), backends), operations

    def columns(self, names: _Names) -> dict[str, pa.Array]:
        """The columns of device_events."""
        copies, place = names.say(self.raw["name"], copy_kind)
        is_copy = self.raw["category"] == MEANINGS.index("memcpy")
        moves = {
            name: coded_column(np.where(is_copy, place, -1), [getattr(copy, name) for copy in copies])
            for name in ("direction", "from_memory", "to_memory")
        }
        return {
            "kind": coded_column(self.kind, _KINDS),
            "backend": self.backend,
            "name": names.column(self.raw["name"]),
            "start_ns": pa.array(self.start_ns),
            "end_ns": pa.array(self.end_ns),
            **{
                name: integer_column(self.raw[name])
                for name in ("device", "stream", "correlation", "operator", "graph", "bytes")
            },
            "launch_start_ns": integer_column(self.launch_start_ns),
            "launch_end_ns": integer_column(self.launch_end_ns),
            "launch_thread": integer_column(self.launch_thread),
            "iteration": integer_column(self.iteration),
            "collective": integer_column(self.collective),
            **moves,
        }


def _operations(
    device: _Device, host: _Host, collected: Collector, groups: dict[str, ProcessGroup], caveats: list[Caveat]
) -> list[Operation]:
    """What each communication kernel carries out.

    Kineto describes a kernel by the call it was launched in. Operations issued as a batch (`batch_isend_irecv`) are
    launched after all their calls; those calls, since the thread's launch before, describe the kernel then.
    """
    calls = _CallsByThread(host, collected)
    undescribed = 0
    issued = device.issued_ns[device.communication]
    found: dict[int, Operation] = {}
    for place in np.argsort(issued, kind="stable").tolist():
        row = int(device.communication[place])
        told = device.operation[place]
        before = calls.take(int(device.launch_thread[row]), int(device.launch_start_ns[row]), _CALLED.get(told or "", (told,)))
        message = collected.messages.get(int(device.order[row]))
        if message is not None:
            found[place] = _operation(message).in_known_group(groups)
        elif before:
            found[place] = batch([_operation(call).in_known_group(groups) for call in before])
        else:
            found[place] = Operation(told)
            undescribed += 1
    if undescribed:
        caveats.append(
            Caveat(
                "collectives_undescribed",
                f"{undescribed} of {len(issued)} communication kernels have no description: their groups and sizes are unknown",
            )
        )
    return [found[place] for place in range(len(issued))]


class _CallsByThread:
    """The host's calls for communication, by thread, each taken once."""

    def __init__(self, host: _Host, collected: Collector) -> None:
        self._calls: dict[int, deque[tuple[int, Message]]] = defaultdict(deque)
        rows = np.flatnonzero(np.isin(host.order, list(collected.calls)))
        for row in rows.tolist():
            self._calls[int(host.thread[row])].append((int(host.start_ns[row]), collected.calls[int(host.order[row])]))

    def take(self, thread: int, until_ns: int, operations: Sequence[str | None]) -> list[Message]:
        """The thread's calls for some operations up to a time, of those that no earlier kernel can have carried out.

        Calls in a group of one launch nothing.
        """
        calls = self._calls.get(thread)
        found = []
        while calls and calls[0][0] <= until_ns:
            message = calls.popleft()[1]
            if message.group_size != 1 and torch_operation(message.operation) in operations:
                found.append(message)
        return found


def _operation(message: Message) -> Operation:
    operation = torch_operation(message.operation)
    peer = {"send": message.destination, "recv": message.source}.get(operation, NULL)
    return Operation(
        operation=operation,
        group_name=message.group_name,
        group=message.group,
        group_ranks=ranks_of(message.group_ranks),
        group_size=_known(message.group_size),
        in_elements=_known(message.in_elements),
        out_elements=_known(message.out_elements),
        dtype=message.dtype,
        peer=_known(peer),
    )


def _known(value: int) -> int | None:
    return None if value == NULL else value


def _iterations(host: _Host, names: _Names, marks_ns: Integers, caveats: list[Caveat]) -> tuple[Iterations, NDArray[np.bool_]]:
    """The iterations that annotations name, ascending in time, and which are boundary iterations."""
    said, place = names.say(host.name, lambda name: _ITERATION.match(name))
    number = np.array([NULL if match is None else min(int(match[1]), _MAX_ITERATION) for match in said], np.int64)[place]
    rows = np.flatnonzero((number != NULL) & (host.category != MEANINGS.index("python")))
    # The same range can stand on several threads; the first is the loop's.
    rows = np.sort(rows[np.unique(number[rows], return_index=True)[1]])
    start, end, number = host.start_ns[rows], host.end_ns[rows], number[rows]
    if (np.diff(number) < 0).any():
        raise ValueError("its iterations do not follow one another in time: the clock went backwards")
    if (start[1:] < end[:-1]).any():
        caveats.append(
            Caveat("iterations_overlap", "iterations overlap: an event inside two of them counts toward the later one")
        )
    boundary = np.zeros(len(rows), bool)
    for mark in marks_ns.tolist():
        boundary |= (start < mark) & (mark < end)
    overhead = host.of_category("overhead")
    flushes = [row for row in overhead.tolist() if _FLUSH.search(names.all[host.name[row]])]
    for row in flushes:
        boundary |= (start < host.end_ns[row]) & (host.start_ns[row] < end)
    return Iterations(number, start, end, rows), boundary


def _iteration_columns(iterations: Iterations, boundary: NDArray[np.bool_]) -> dict[str, pa.Array]:
    return {
        "iteration": pa.array(iterations.number),
        "start_ns": pa.array(iterations.start_ns),
        "end_ns": pa.array(iterations.end_ns),
        "boundary": pa.array(boundary),
    }


def _synchronization_columns(collected: Collector, names: _Names, base_ns: int) -> dict[str, pa.Array]:
    columns = collected.synchronizations
    start = columns.take("start_ns")
    order = np.argsort(start, kind="stable")
    kinds, place = names.say(columns.take("name", order), synchronization_kind)
    stream = columns.take("stream", order)
    return {
        "kind": coded_column(place, kinds),
        "start_ns": pa.array(start[order] + base_ns),
        "end_ns": pa.array(columns.take("end_ns", order) + base_ns),
        # All ones, in 32 or 64 bits, is CUPTI's word for no stream in particular.
        "stream": integer_column(np.where((stream < 0) | (stream == _NO_STREAM), NULL, stream)),
        **{
            name: integer_column(columns.take(name, order))
            for name in ("device", "correlation", "producer_stream", "producer_correlation")
        },
    }


def _memory_columns(columns: Columns, base_ns: int) -> dict[str, pa.Array]:
    time_ns = columns.take("time_ns")
    order = np.argsort(time_ns, kind="stable")
    types = columns.take("device_type", order)
    used = np.unique(types).tolist()
    return {
        "time_ns": pa.array(time_ns[order] + base_ns),
        "device_type": coded_column(np.searchsorted(used, types), [_DEVICE_TYPES.get(each) for each in used]),
        "device": integer_column(columns.take("device_id", order)),
        "address": pa.array(columns.take("address", order)),
        "bytes": integer_column(columns.take("memory_bytes", order)),
        "total_allocated_bytes": integer_column(columns.take("total_allocated", order)),
        "total_reserved_bytes": integer_column(columns.take("total_reserved", order)),
    }


def _without_correlations(operator: Integers, correlation: Integers) -> Integers:
    """Operators' ids, NULL where they are none: torch 1.10 to 1.13 give runtime calls and kernels their correlation as id."""
    known = (operator != NULL) & (correlation != NULL)
    same = known & (operator == correlation)
    return np.where(same, NULL, operator) if same.sum() * 2 > known.sum() else operator


def _used(codes: NDArray[Any], size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The codes that occur, and each row's place among them."""
    used = np.flatnonzero(np.bincount(codes, minlength=size)) if len(codes) else np.empty(0, np.int64)
    place = np.zeros(size, np.int32)
    place[used] = np.arange(len(used))
    return used, place[codes]
