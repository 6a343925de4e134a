"""Host events and device work of a Kineto file by start, with what their names say and the launches of the work."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.consistency import DeviceTimes, waits_for_all
from bridge_profiling.traces.iterations import Iterations
from bridge_profiling.traces.joins import launch_of, launches_one, start_order, taken
from bridge_profiling.traces.kinds import (
    COMMUNICATION,
    COMPUTE,
    MEMCPY,
    MEMSET,
    configuration,
    copy_kind,
    kernel_kind,
    synchronization_kind,
)
from bridge_profiling.traces.kineto.collect import MEANINGS, Collector
from bridge_profiling.traces.periods import find_periods
from bridge_profiling.traces.tables import NULL, Integers, coded_column
from bridge_profiling.traces.types import Caveat

_KINDS = (COMPUTE, COMMUNICATION, MEMCPY, MEMSET)

#: Columns of `device_events`: what the names of copies say, and those that are attributes of `Device`.
_OF_COPIES = ("direction", "from_memory", "to_memory")
_OF_LAUNCHES = ("launch_start_ns", "launch_end_ns", "launch_thread")
_AS_THEY_ARE = ("device", "stream", "start_ns", "end_ns", "correlation", "operator", "graph", "bytes", *_OF_LAUNCHES)


class Names:
    """The file's names, and what each says, determined once per name."""

    def __init__(self, names: list[str]) -> None:
        self.all = names

    def say(self, codes: NDArray[np.int32], what: Callable[[str], Any]) -> tuple[list[Any], NDArray[np.int32]]:
        """`what` of the names that a column uses, and each row's place among them."""
        used = np.flatnonzero(np.bincount(codes, minlength=len(self.all))) if len(codes) else np.empty(0, np.int64)
        place = np.zeros(len(self.all), np.int32)
        place[used] = np.arange(len(used))
        return [what(self.all[code]) for code in used.tolist()], place[codes]

    def which(self, codes: NDArray[np.int32], what: Callable[[str], bool]) -> NDArray[np.bool_]:
        """The rows of a column for whose name `what` is true."""
        said, place = self.say(codes, what)
        return np.array(said, bool)[place]


class Host:
    """Host events by start, the longer one first."""

    def __init__(self, collected: Collector, names: Names, base_ns: int) -> None:
        columns = collected.host
        start, end = columns.take("start_ns"), columns.take("end_ns")
        self.order = start_order(start, end).astype(np.int32)
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
        waits = names.which(name[order], lambda name: synchronization_kind(name) is not None)
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
        self.launch = launch_of(
            self.correlation,
            self.start_ns,
            kernel=self._category == MEANINGS.index("kernel"),
            calls=host.correlation[calls],
            call_start_ns=host.start_ns[calls],
            launches_one=names.which(host.name[calls], launches_one),
        )
        self.launch_start_ns, self.launch_end_ns, self.launch_thread = (
            taken(each[calls], self.launch.row) for each in (host.start_ns, host.end_ns, host.thread)
        )
        self._classify(collected, names)

    def _classify(self, collected: Collector, names: Names) -> None:
        """Each row's kind (index of _KINDS) and backend, and the operation in a communication kernel's name.

        A kernel that Kineto describes as a collective is one, whatever its name.
        """
        said, place = names.say(self._name, lambda name: kernel_kind(name, rocm=self._rocm))
        kernel = self._category == MEANINGS.index("kernel")
        named = np.array([each.kind == COMMUNICATION for each in said], bool)[place] & kernel
        communication = named | (np.isin(self.order, list(collected.collectives)) & kernel)
        copies, sets = (self._category == MEANINGS.index(each) for each in ("memcpy", "memset"))
        kinds = [_KINDS.index(each) for each in (COMMUNICATION, MEMCPY, MEMSET)]
        self._kind = np.select([communication, copies, sets], kinds).astype(np.int8)
        self._backend = coded_column(np.where(communication, place, -1), [each.backend or "other" for each in said])
        self.communication = np.flatnonzero(communication)
        self.operation = [said[place[row]].operation for row in self.communication.tolist()]

    def times(self, host: Host, names: Names) -> DeviceTimes:
        """Its times, and the host's that they have to agree with."""
        calls = host.of_category("runtime")
        return DeviceTimes(
            start_ns=self.start_ns,
            duration_ns=self.end_ns - self.start_ns,
            device=self.device,
            stream=self.stream,
            computes=self._kind != _KINDS.index(COMMUNICATION),
            launches=self.launch,
            call_start_ns=host.start_ns[calls],
            call_duration_ns=host.end_ns[calls] - host.start_ns[calls],
            waits=names.which(host.name[calls], waits_for_all),
            host_ns=(host.start_ns[:1], host.end_ns),
        )

    def periods(self, names: Names, waits_ns: Integers, begin_ns: int) -> tuple[Iterations, list[Caveat]]:
        """Iterations in which its kernels repeat. The host waited for the device at `waits_ns`."""
        of_host = names.which(self._name, lambda name: "H" in copy_kind(name).direction)
        copied_ns = self.launch_start_ns[of_host & (self._category == MEANINGS.index("memcpy"))]
        return find_periods(
            names.all,
            self._name,
            (self.device, self.stream),
            self._kind == _KINDS.index(COMPUTE),
            self.launch,
            np.where(self.launch.row >= 0, self.launch_end_ns, self.end_ns),
            np.concatenate((waits_ns, copied_ns)),
            begin_ns,
        )

    def columns(self, names: Names, iterations: Iterations) -> dict[str, Any]:
        """The columns of device_events."""
        copies, place = names.say(self._name, copy_kind)
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
        return configuration(grid, block, registers, shared_bytes)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _without_correlations(operator: Integers, correlation: Integers) -> Integers:
    """Operators' ids; NULL where torch 1.10 to 1.13 wrote the correlation of a runtime call or kernel as its operator's id."""
    known = (operator != NULL) & (correlation != NULL)
    same = known & (operator == correlation)
    return np.where(same, NULL, operator) if same.sum() * 2 > known.sum() else operator
