"""Events of a Kineto file sorted into columns by what they are.

A piece's event objects live until its columns are made; about 60 bytes an event remain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.bounds import MAX_NAME
from bridge_profiling.traces.joins import MAX_RANKS, Operation, ranks_of
from bridge_profiling.traces.kinds import torch_operation
from bridge_profiling.traces.kineto.columns import (
    Codes,
    Identifiers,
    durations_ns,
    integer,
    integers,
    starts_ns,
)
from bridge_profiling.traces.kineto.decode import ABSENT, CATEGORIES, AnyEvent, Args, EventReader, Number, usual_types
from bridge_profiling.traces.tables import MAX_SIZE, NULL, Columns, Integers
from bridge_profiling.traces.types import texts

HOST = ("operator", "runtime", "annotation", "python", "overhead")
DEVICE = ("kernel", "memcpy", "memset")
_OTHER = ("synchronization", "span", "instant", "known", "unknown")
MEANINGS = (*HOST, *DEVICE, *_OTHER)

#: Phases of the trace event format (`ph`). A complete event has a duration; some writers name no phase.
_COMPLETE = frozenset(("X", ""))
_INSTANT = frozenset(("i", "I", "R", ""))
#: Arrows between events, and names of processes and threads.
_NO_EVENT = frozenset(("s", "t", "f", "M"))

#: Characters of a category or phase that caveats show.
_SHOWN = 50

_MEMORY = "[memory]"
_CALL = "record_param_comms"
_NO_TRANSFER = ("wait", "coalesced", "init")
_MARKS = ("Iteration Start", "Record Window End")
_NO_ARGS = Args()

_ranks_of = lru_cache(maxsize=1 << 10)(ranks_of)


class Collector:
    """Sorts a file's events into columns, a piece at a time; `exact` says that their starts are text."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self.host, self.device, self.synchronizations, self.memory = Columns(), Columns(), Columns(), Columns()
        self.names, self.shapes, self.stacks, self.configurations = Codes(MAX_NAME), Codes(), Codes(), Codes()
        # Descriptions of communication kernels, by row of `device`.
        self.collectives: dict[int, Operation] = {}
        # Descriptions of the host's calls for them, by row of `host`: all there is for operations issued as a batch.
        self.calls: dict[int, Operation] = {}
        self.marks: list[int] = []  # when the profiler starts and ends recording
        # What no table holds: complete and instant events by category, and those of other phases by kind and category.
        self.unknown: Counter[str] = Counter()
        self.left_out: Counter[tuple[str, str]] = Counter()
        self.events = 0  # seen
        self.negative = 0  # left out because they end before they start
        self.untimed = 0  # left out because a time is invalid, or a duration is missing
        self.lost_device = 0  # device events among the last three
        self.impossible = 0  # sizes and ranks that no training has, which are null
        self.undated: list[int] = []  # correlations of device events left out because the profiler recorded no time of them
        self._categories = Codes()
        self._meaning_of: list[int] = []
        self._usual = {kind: MEANINGS.index(meaning) for kind, meaning in usual_types(exact=exact).items()}
        self._identifiers = Identifiers()

    def add_all(self, reader: EventReader) -> None:
        """Read a file. No event outlives this call: those of one piece are as large as a fifth of the tables.

        Raises:
            InexactTimes: read the file again, with `exact=True`.
        """
        for events in reader.pieces():
            self._add(events)

    def _add(self, events: list[AnyEvent]) -> None:
        self.events += len(events)
        if events and type(events[0]) in self._usual:
            complete = events
            meanings = np.fromiter(map(self._usual.__getitem__, map(type, events)), np.int8, len(events))
        else:
            complete = [event for event in events if event.dur is not None and event.ph in _COMPLETE]
            if len(complete) < len(events):
                self._add_others([event for event in events if event.dur is None or event.ph not in _COMPLETE])
            meanings = self._meanings(complete)
        device = (meanings >= len(HOST)) & (meanings < len(HOST) + len(DEVICE))
        self._add_device(*_chosen(complete, meanings, device))
        self._add_host(*_chosen(complete, meanings, meanings < len(HOST)))
        self._add_synchronizations(_chosen(complete, meanings, meanings == MEANINGS.index("synchronization"))[0])
        for event in _chosen(complete, meanings, meanings == MEANINGS.index("span"))[0]:
            good, start, end = self._times([event])
            self.marks += [int(start[0]), int(end[0])] if good[0] else []
        # torch 2.13's exporter in Python gives them a duration.
        self._add_instants(_chosen(complete, meanings, meanings == MEANINGS.index("instant"))[0])

    def _meanings(self, events: Sequence[AnyEvent]) -> NDArray[np.int8]:
        codes = self._categories.encode([event.cat for event in events])
        known = list(self._categories.values)
        for name in known[len(self._meaning_of) :]:
            self._meaning_of.append(MEANINGS.index(CATEGORIES.get(str(name or "").lower(), "unknown")))
        meanings = np.array(self._meaning_of, np.int8)[codes]
        strange = codes[meanings == MEANINGS.index("unknown")]
        if len(strange):
            for code, count in enumerate(np.bincount(strange).tolist()):
                if count:
                    self.unknown[str(known[code])[:_SHOWN]] += count
        return meanings

    def _times(self, events: Sequence[AnyEvent]) -> tuple[NDArray[np.bool_], Integers, Integers]:
        """Which events have usable times, and all starts and ends."""
        duration = durations_ns([event.dur for event in events])
        start = starts_ns([event.ts for event in events], exact=self._exact)
        timed = (start != NULL) & (duration != NULL)
        good = timed & (duration >= 0)
        self.untimed += int(len(events) - timed.sum())
        self.negative += int(timed.sum() - good.sum())
        return good, start, start + duration

    def _usable(self, events: list[AnyEvent]) -> tuple[list[AnyEvent], NDArray[np.bool_], dict[str, NDArray[Any]]]:
        """Events with usable times, which ones these are, and the columns that all kinds of events have."""
        good, start, end = self._times(events)
        if not good.all():
            events, start, end = [events[row] for row in np.flatnonzero(good).tolist()], start[good], end[good]
        return events, good, {"name": self.names.encode([event.name for event in events]), "start_ns": start, "end_ns": end}

    def _add_host(self, events: list[AnyEvent], meanings: NDArray[np.int8]) -> None:
        events, good, columns = self._usable(events)
        args = [event.args or _NO_ARGS for event in events]
        if _CALL in self.names.values:
            for place in np.flatnonzero(columns["name"] == self.names.values[_CALL]).tolist():
                if args[place].collective is not None and args[place].collective not in _NO_TRANSFER:
                    self.calls[len(self.host) + place] = self._operation(args[place])
        self.host.add(
            **columns,
            category=meanings[good],
            process=self._identifiers.of([event.pid for event in events]),
            thread=self._identifiers.of([event.tid for event in events]),
            **_numbers(args, "correlation", "sequence"),
            operator=_operators(args),
            shapes=self.shapes.encode(_texts([arg.input_dims or arg.old_input_dims for arg in args])),
            stack=self.stacks.encode([arg.call_stack for arg in args]),
        )

    def _add_device(self, events: list[AnyEvent], meanings: NDArray[np.int8]) -> None:
        recorded = len(events)
        events, good, columns = self._usable(events)
        self.lost_device += recorded - len(events)
        meanings = meanings[good]
        # CUPTI's word for times that it could not collect.
        dated = (columns["start_ns"] != 0) | (columns["end_ns"] != 0)
        if not dated.all():
            undated = [events[row].args or _NO_ARGS for row in np.flatnonzero(~dated).tolist()]
            self.undated += _numbers(undated, "correlation")["correlation"].tolist()
            events = [events[row] for row in np.flatnonzero(dated).tolist()]
            meanings, columns = meanings[dated], {name: values[dated] for name, values in columns.items()}
        args = [event.args or _NO_ARGS for event in events]
        for place, arg in enumerate(args):
            if arg.collective is not None:
                self.collectives[len(self.device) + place] = self._operation(arg)
        numbers = _numbers(args, "stream", "device", "original_stream", "correlation", "graph")
        moved = numbers.pop("original_stream")
        numbers["stream"] = np.where(moved == NULL, numbers["stream"], moved)
        # Kineto's rows on a device's track: the process is the device, the thread is the stream.
        for name, track in (("stream", "tid"), ("device", "pid")):
            if (numbers[name] == NULL).any():
                of_track = self._identifiers.of(list(map(attrgetter(track), events)))
                numbers[name] = np.where(numbers[name] == NULL, of_track, numbers[name])
        self.device.add(
            **columns,
            **numbers,
            category=meanings,
            operator=_operators(args),
            bytes=self._sizes([arg.bytes for arg in args]),
            configuration=self.configurations.encode(
                [b"\0".join((arg.grid, arg.block, arg.registers, arg.shared_memory)) for arg in args]
            ),
        )

    def _add_synchronizations(self, events: list[AnyEvent]) -> None:
        events, _, columns = self._usable(events)
        args = [event.args or _NO_ARGS for event in events]
        names = ("device", "stream", "correlation", "producer_stream", "producer_correlation")
        self.synchronizations.add(**columns, **_numbers(args, *names))

    def _add_others(self, events: list[AnyEvent]) -> None:
        """Take the instants among events that are not complete, and count what is not read."""
        instants = []
        # Nearly all of them are arrows.
        for event in [event for event in events if event.ph not in _NO_EVENT]:
            of_device = CATEGORIES.get(str(event.cat or "").lower()) in DEVICE
            if event.ph in _COMPLETE and (of_device or event.ph not in _INSTANT):
                self.untimed += 1
                self.lost_device += of_device
            elif event.ph in _INSTANT:
                instants.append(event)
            else:
                # No table holds these.
                kind = texts("bridge_profiling.traces", "caveats.toml")["phases"].get(event.ph)
                self.left_out[kind or f"events of the phase {event.ph[:_SHOWN]!r}", str(event.cat or "")[:_SHOWN]] += 1
                self.lost_device += of_device and event.ph != "E"  # an end has a beginning
        # The profiler's own marks have no category. Of the others, those are counted whose category is not known.
        self._meanings([event for event in instants if event.cat])
        self._add_instants(instants)

    def _add_instants(self, instants: list[AnyEvent]) -> None:
        marks = starts_ns([event.ts for event in instants if event.name.startswith(_MARKS)], exact=self._exact)
        self.marks += marks[marks != NULL].tolist()
        found = [event for event in instants if event.name == _MEMORY and event.args is not None]
        if not found:
            return
        args: list[Args] = [event.args for event in found if event.args is not None]
        time_ns = starts_ns([event.ts for event in found], exact=self._exact)
        good = time_ns != NULL
        self.untimed += int(len(good) - good.sum())
        self.memory.add(
            time_ns=time_ns[good],
            thread=self._identifiers.of([event.tid for event in found])[good],
            address=np.fromiter((_address(arg.address) for arg in args), np.uint64, len(args))[good],
            device_type=integers([arg.device_type for arg in args])[good],
            device=integers([arg.device_id for arg in args])[good],
            bytes=self._sizes([arg.memory_bytes for arg in args])[good],
            total_allocated_bytes=self._sizes([arg.total_allocated for arg in args])[good],
            total_reserved_bytes=self._sizes([arg.total_reserved for arg in args])[good],
        )

    def _operation(self, arg: Args) -> Operation:
        operation = torch_operation(arg.collective or "")
        peer = {"send": arg.destination_rank, "recv": arg.source_rank}.get(operation)
        ranks = _ranks_of(arg.group_ranks)
        if ranks is None and (text := arg.group_ranks or "") and "..." not in text:  # else shortened by the profiler
            self.impossible += any(map(str.isdigit, text))
        return Operation(
            operation=operation,
            group_name=None if arg.group_name is None else str(arg.group_name),
            group=arg.group_description or None,
            group_ranks=ranks,
            group_size=self._known(arg.group_size, MAX_RANKS),
            in_elements=self._known(arg.in_elements, MAX_SIZE),
            out_elements=self._known(arg.out_elements, MAX_SIZE),
            dtype=arg.dtype,
            peer=self._known(peer, MAX_RANKS - 1),
        )

    def _known(self, value: Number, most: int) -> int | None:
        number = integer(value)
        self.impossible += number > most or (number == NULL and value not in (None, ABSENT))
        return number if 0 <= number <= most else None

    def _sizes(self, values: list[Any]) -> Integers:
        found = integers(values)
        beyond = (found != NULL) & ((found > MAX_SIZE) | (found < -MAX_SIZE))
        self.impossible += int(beyond.sum())
        return np.where(beyond, NULL, found)


def _chosen(
    events: list[AnyEvent], meanings: NDArray[np.int8], which: NDArray[np.bool_]
) -> tuple[list[AnyEvent], NDArray[np.int8]]:
    if which.all():
        return events, meanings
    rows = np.flatnonzero(which)
    return [events[row] for row in rows.tolist()], meanings[rows]


def _texts(raw: Sequence[msgspec.Raw]) -> list[bytes]:
    """JSON as bytes. Together they are copied in a third of the time that `bytes` takes for each; JSON holds no zero."""
    texts = b"\0".join(raw).split(b"\0")
    return texts if len(texts) == len(raw) else [bytes(each) for each in raw]


def _numbers(args: Sequence[Args], *names: str) -> dict[str, Integers]:
    """Columns of arguments."""
    return {name: integers(list(map(attrgetter(name), args))) for name in names}


def _operators(args: Sequence[Args]) -> Integers:
    """External ids; NULL for none, which CUPTI writes as 0."""
    found = integers([arg.external_id for arg in args])
    without = np.flatnonzero(found == NULL)
    found[without] = integers([args[row].old_external_id for row in without.tolist()])
    return np.where(found == 0, NULL, found)


def _address(value: object) -> int:
    if isinstance(value, str):
        try:
            value = int(value, 0)
        except ValueError:
            return 0
    return value if isinstance(value, int) and 0 <= value < 1 << 64 and value != ABSENT else 0
