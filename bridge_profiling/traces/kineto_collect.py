"""Sorts a Kineto file's events by what they are, and keeps columns of them. Joins nothing and judges nothing.

A piece's event objects live until its columns are made; what stays is about 60 bytes an event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.kineto_columns import (
    Codes,
    Columns,
    Identifiers,
    arguments,
    exact_starts_ns,
    integer,
    starts_ns,
    times_ns,
)
from bridge_profiling.traces.kineto_events import ABSENT, AnyEvent, Args
from bridge_profiling.traces.tables import NULL, Integers

HOST = ("operator", "runtime", "annotation", "python", "overhead")
DEVICE = ("kernel", "memcpy", "memset")
_OTHER = ("synchronization", "span", "instant", "known", "unknown")
MEANINGS = (*HOST, *DEVICE, *_OTHER)

#: Kineto's categories since torch 1.8, in lower case. "known" ones say nothing that another category does not say better.
_CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "cpu_op": "operator",
    "operator": "operator",
    "user_annotation": "annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "runtime": "runtime",
    "hip_runtime": "runtime",
    "python_function": "python",
    "overhead": "overhead",
    "cuda_sync": "synchronization",
    "trace": "span",
    "gpu_user_annotation": "known",
    "ac2g": "known",
    "fwdbwd": "known",
    "async_cpu_to_gpu": "known",
    "forward_backward": "known",
    "cpu_instant_event": "instant",
    "": "unknown",
}

#: Phases of the trace event format (`ph`). A complete event has a duration; some writers name no phase.
_COMPLETE = frozenset(("X", ""))
_INSTANT = frozenset(("i", "I", "R", ""))
#: Arrows between events, and names of processes and threads.
_NO_EVENT = frozenset(("s", "t", "f", "M"))
#: The others hold nothing that a table has a place for; they are counted by what they are.
_LEFT_OUT = {
    "C": "counter samples",
    **dict.fromkeys("bneSTpF", "asynchronous events"),
    **dict.fromkeys("BE", "begin and end events"),
    **dict.fromkeys("NOD", "object events"),
}

#: torch 1.8 writes iterations as operators.
_ITERATION = "ProfilerStep"

_MEMORY = "[memory]"
_CALL = "record_param_comms"
_NO_TRANSFER = ("wait", "coalesced", "init")
_MARKS = ("Iteration Start", "Record Window End")
_NO_ARGS = Args()


@dataclass(frozen=True)
class Message:
    """What Kineto says of one collective besides its kernel's times; NULL and None for what it does not say."""

    operation: str
    in_elements: int
    out_elements: int
    dtype: str | None
    group_name: str | None
    group: str | None
    group_ranks: str | None
    group_size: int
    source: int
    destination: int


class Collector:
    """Takes a file's events, a piece at a time.

    Args:
        exact: whether the events' starts are text.
        operators: keep operators and Python frames; runtime calls, annotations and the profiler's own work are always kept.

    Attributes:
        host, device, synchronizations, memory: columns of those events.
        names, shapes, stacks, device_types: what the numbers in their columns stand for.
        messages: what Kineto says of a collective, by row of `device`.
        calls: what it says of the host's calls for one, by row of `host`; all there is on operations issued as a batch.
        marks: times of the profiler's own marks, where recording starts and ends.
        unknown: complete and instant events in categories that are not read, by category.
        left_out: events of other phases that are not read, by what they are and their category.
        events: events seen.
        negative: events left out because they end before they start.
        untimed: events left out because a time is no time, or a duration is missing.
    """

    def __init__(self, *, exact: bool, operators: bool) -> None:
        self._exact, self._operators = exact, operators
        self.host, self.device, self.synchronizations, self.memory = Columns(), Columns(), Columns(), Columns()
        self.names, self.shapes, self.stacks, self.device_types = Codes(), Codes(), Codes(), Codes()
        self.messages: dict[int, Message] = {}
        self.calls: dict[int, Message] = {}
        self.marks: list[int] = []
        self.unknown: Counter[str] = Counter()
        self.left_out: Counter[tuple[str, str]] = Counter()
        self.events = self.negative = self.untimed = 0
        self._categories = Codes()
        self._meaning_of: list[int] = []
        self._identifiers = Identifiers()

    def add(self, events: list[AnyEvent]) -> None:
        """Append a piece.

        Raises:
            InexactTimes: read the file again, with `exact=True`.
        """
        self.events += len(events)
        complete = [event for event in events if event.dur is not None and event.ph in _COMPLETE]
        if len(complete) < len(events):
            self._add_others([event for event in events if event.dur is None or event.ph not in _COMPLETE])
        if not complete:
            return
        meanings = self._meanings(complete)
        device = (meanings >= len(HOST)) & (meanings < len(HOST) + len(DEVICE))
        self._add_device(*_chosen(complete, meanings, device))
        self._add_host(*_chosen(complete, meanings, self._wanted(complete, meanings)))
        self._add_synchronizations(_chosen(complete, meanings, meanings == MEANINGS.index("synchronization"))[0])
        for event in _chosen(complete, meanings, meanings == MEANINGS.index("span"))[0]:
            self._add_span(event)
        # torch 2.13's exporter in Python gives them a duration.
        self._add_instants(_chosen(complete, meanings, meanings == MEANINGS.index("instant"))[0])

    def _wanted(self, events: list[AnyEvent], meanings: NDArray[np.int8]) -> NDArray[np.bool_]:
        """Which events are host events to keep."""
        host = meanings < len(HOST)
        if self._operators:
            return host
        named = np.array([event.name[: len(_ITERATION)] == _ITERATION for event in events])
        return host & (named | ((meanings != MEANINGS.index("operator")) & (meanings != MEANINGS.index("python"))))

    def _meanings(self, events: Sequence[AnyEvent]) -> NDArray[np.int8]:
        codes = self._categories.encode([event.cat for event in events])
        known = self._categories.values
        if len(known) > len(self._meaning_of):
            names = list(known)[len(self._meaning_of) :]
            self._meaning_of += [MEANINGS.index(_CATEGORIES.get(str(name or "").lower(), "unknown")) for name in names]
        meanings = np.array(self._meaning_of, np.int8)[codes]
        strange = codes[meanings == MEANINGS.index("unknown")]
        if len(strange):
            categories = list(known)
            self.unknown.update({str(categories[code]): int(count) for code, count in enumerate(np.bincount(strange)) if count})
        return meanings

    def _times(self, events: Sequence[AnyEvent]) -> tuple[NDArray[np.bool_], Integers, Integers]:
        """Which events have times that can be used, and all starts and ends."""
        start, duration = times_ns(events, exact=self._exact)
        timed = (start != NULL) & (duration != NULL)
        good = timed & (duration >= 0)
        self.untimed += int(len(events) - timed.sum())
        self.negative += int(timed.sum() - good.sum())
        return good, start, start + duration

    def _add_host(self, events: list[AnyEvent], meanings: NDArray[np.int8]) -> None:
        if not events:
            return
        good, start, end = self._times(events)
        args = [event.args or _NO_ARGS for event in events]
        names = self.names.encode([event.name for event in events])
        if _CALL in self.names.values:
            row_of = len(self.host) + np.cumsum(good) - 1
            for place in np.flatnonzero(good & (names == self.names.values[_CALL])).tolist():
                if (operation := args[place].collective) is not None and operation not in _NO_TRANSFER:
                    self.calls[int(row_of[place])] = _message(operation, args[place])
        self.host.add(
            category=meanings[good],
            name=names[good],
            process=self._identifiers.of([event.pid for event in events])[good],
            thread=self._identifiers.of([event.tid for event in events])[good],
            start_ns=start[good],
            end_ns=end[good],
            correlation=arguments(args, "correlation")[good],
            operator=_operators(args)[good],
            shapes=self.shapes.encode([bytes(arg.input_dims or arg.old_input_dims) for arg in args])[good],
            stack=self.stacks.encode([arg.call_stack for arg in args])[good],
        )

    def _add_device(self, events: list[AnyEvent], meanings: NDArray[np.int8]) -> None:
        if not events:
            return
        good, start, end = self._times(events)
        args = [event.args or _NO_ARGS for event in events]
        row_of = len(self.device) + np.cumsum(good) - 1
        for place, arg in enumerate(args):
            if arg.collective is not None and good[place]:
                self.messages[int(row_of[place])] = _message(arg.collective, arg)
        stream, device = arguments(args, "stream"), arguments(args, "device")
        moved = arguments(args, "original_stream")
        stream = np.where(moved == NULL, stream, moved)
        if (stream == NULL).any():
            # Kineto's rows on a device's track: the process is the device, the thread is the stream.
            stream = np.where(stream == NULL, self._identifiers.of([event.tid for event in events]), stream)
        if (device == NULL).any():
            device = np.where(device == NULL, self._identifiers.of([event.pid for event in events]), device)
        self.device.add(
            category=meanings[good],
            name=self.names.encode([event.name for event in events])[good],
            device=device[good],
            stream=stream[good],
            start_ns=start[good],
            end_ns=end[good],
            correlation=arguments(args, "correlation")[good],
            operator=_operators(args)[good],
            graph=arguments(args, "graph")[good],
            bytes=arguments(args, "bytes")[good],
        )

    def _add_synchronizations(self, events: list[AnyEvent]) -> None:
        if not events:
            return
        good, start, end = self._times(events)
        args = [event.args or _NO_ARGS for event in events]
        self.synchronizations.add(
            name=self.names.encode([event.name for event in events])[good],
            start_ns=start[good],
            end_ns=end[good],
            **{
                name: arguments(args, name)[good]
                for name in ("device", "stream", "correlation", "producer_stream", "producer_correlation")
            },
        )

    def _add_others(self, events: list[AnyEvent]) -> None:
        """Take the instants among events that are not complete, and count what is not read."""
        instants = []
        # Nearly all of them are arrows.
        for event in [event for event in events if event.ph not in _NO_EVENT]:
            if event.ph in _INSTANT:
                instants.append(event)
            elif event.ph in _COMPLETE:
                self.untimed += 1
            else:
                self.left_out[_LEFT_OUT.get(event.ph, f"events of the phase {event.ph!r}"), str(event.cat or "")] += 1
        # The profiler's own marks have no category. Of the others, those are counted whose category is not known.
        self._meanings([event for event in instants if event.cat])
        self._add_instants(instants)

    def _add_instants(self, instants: list[AnyEvent]) -> None:
        marks = self._starts([event for event in instants if event.name.startswith(_MARKS)])
        self.marks += marks[marks != NULL].tolist()
        found = [event for event in instants if event.name == _MEMORY and event.args is not None]
        if not found:
            return
        args: list[Args] = [event.args for event in found if event.args is not None]
        time_ns = self._starts(found)
        good = time_ns != NULL
        self.untimed += int(len(good) - good.sum())
        self.memory.add(
            time_ns=time_ns[good],
            address=np.fromiter((_address(arg.address) for arg in args), np.uint64, len(args))[good],
            **{
                name: arguments(args, name)[good]
                for name in ("device_type", "device_id", "memory_bytes", "total_allocated", "total_reserved")
            },
        )

    def _add_span(self, event: AnyEvent) -> None:
        good, start, end = self._times([event])
        if good[0]:
            self.marks += [int(start[0]), int(end[0])]

    def _starts(self, events: Sequence[AnyEvent]) -> Integers:
        starts = [event.ts for event in events]
        return exact_starts_ns(starts) if self._exact else starts_ns(starts)


def _chosen(
    events: list[AnyEvent], meanings: NDArray[np.int8], which: NDArray[np.bool_]
) -> tuple[list[AnyEvent], NDArray[np.int8]]:
    if which.all():
        return events, meanings
    rows = np.flatnonzero(which)
    return [events[row] for row in rows.tolist()], meanings[rows]


def _operators(args: Sequence[Args]) -> Integers:
    """External ids; NULL for none, which CUPTI writes as 0."""
    found = arguments(args, "external_id")
    if (found == NULL).any():
        found = np.where(found == NULL, arguments(args, "old_external_id"), found)
    return np.where(found == 0, NULL, found)


def _message(operation: str, arg: Args) -> Message:
    return Message(
        operation,
        integer(arg.in_elements),
        integer(arg.out_elements),
        arg.dtype,
        None if arg.group_name is None else str(arg.group_name),
        arg.group_description or None,
        arg.group_ranks or None,
        integer(arg.group_size),
        integer(arg.source_rank),
        integer(arg.destination_rank),
    )


def _address(value: object) -> int:
    if isinstance(value, str):
        try:
            value = int(value, 0)
        except ValueError:
            return 0
    return value if isinstance(value, int) and 0 <= value < 1 << 64 and value != ABSENT else 0
