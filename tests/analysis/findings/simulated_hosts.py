"""Ranks whose hosts launch, load, wait and save, and whose devices do what was launched: runs whose causes are known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bridge_profiling.analysis.workers import Outcome
from bridge_profiling.traces import cache
from bridge_profiling.traces.types import RankInfo, RankTables
from tests.analysis.ranks_in_hand import table

US = 1_000
MS = 1_000_000

#: What a launching call takes a host that is not slow.
LAUNCH_NS = 5 * US


class SimulatedHosts:
    """Hosts and devices in real time. Each host launches into one stream; what is launched runs in order.

    Args:
        ranks: how many.
        pause_ns: what a host does between two launches, besides launching.
    """

    def __init__(self, ranks: int = 1, pause_ns: int = 0) -> None:
        self.ranks = ranks
        self.pause_ns = dict.fromkeys(range(ranks), pause_ns)
        self.host_ns = dict.fromkeys(range(ranks), 1_000 * MS)
        self.free_ns = dict.fromkeys(range(ranks), 0)
        self.rows: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        self.iteration: int | None = None
        self.calls = 0

    def launch(self, rank: int, took_ns: int, operator: str = "aten::mm", *, count: int = 1) -> None:
        """The host launches kernels; the device runs each when it is free."""
        for _ in range(count):
            self._enqueue(rank, "compute", took_ns, operator)

    def meet(self, took_ns: int, ranks: Sequence[int] | None = None) -> None:
        """All hosts launch a collective; it ends everywhere when the last device has come to it and the data has moved."""
        members = list(range(self.ranks)) if ranks is None else list(ranks)
        began = {rank: self._enqueue(rank, "communication", 0, "nccl:all_reduce") for rank in members}
        end = max(began.values()) + took_ns
        group = "[" + ",".join(map(str, members)) + "]"
        for rank in members:
            row = self.rows[rank]["device_events"][-1]
            number = len(self.rows[rank]["collectives"])
            row |= {"end_ns": end, "collective": number}
            self.free_ns[rank] = end
            self.rows[rank]["collectives"].append(
                {"collective": number, "operation": "all_reduce", "group_name": "1", "group": "DP", "group_ranks": group}
                | {"group_size": len(members), "sequence": number, "message_bytes": 1 << 20, "stream": 7}
                | {name: row[name] for name in ("start_ns", "end_ns", "launch_start_ns", "iteration")}
            )

    def be_in(self, rank: int, name: str, took_ns: int, *, thread: int = 1, category: str = "annotation") -> None:
        """The host is in a range, and launches nothing meanwhile; on another thread, beside what it does."""
        begin = self.host_ns[rank]
        self._host(rank, category, name, begin, begin + took_ns, thread=thread)
        if thread == 1:
            self.host_ns[rank] += took_ns

    def wait(self, rank: int, call: str = "cudaStreamSynchronize", operator: str | None = None) -> None:
        """The host waits for its device."""
        begin = self.host_ns[rank]
        end = max(begin, self.free_ns[rank]) + 2 * US
        self._call(rank, call, begin, end, operator)
        self.host_ns[rank] = end

    def copy(self, rank: int, took_ns: int, *, memory: str = "pageable", size: int = 1 << 24) -> None:
        """A copy to the device; of pageable memory it holds the host until it is through."""
        where = {"direction": "HtoD", "from_memory": memory, "to_memory": "device", "bytes": size}
        self._enqueue(rank, "memcpy", took_ns, "aten::copy_", **where)
        if memory == "pageable":
            row = self.rows[rank]["device_events"][-1]
            row["launch_end_ns"] = self.host_ns[rank] = row["end_ns"]

    def iterate(self, count: int, step: Callable[[int], None], *, first: int = 10) -> None:
        """Iterations, each with a synchronisation at its end, as a loop has that logs its loss."""
        for number in range(first, first + count):
            self.iteration = number
            begins = dict(self.host_ns)
            step(number)
            for rank in range(self.ranks):
                self.wait(rank)
                row = {"iteration": number, "start_ns": begins[rank], "end_ns": self.host_ns[rank], "boundary": False}
                self.rows[rank]["iterations"].append(row)
        self.iteration = None

    def write(self, folder: Path, **info: Any) -> Path:
        """Write the captures as the cache keeps them, and give the folder, for `Run`."""
        for rank in range(self.ranks):
            if (folder / f"{rank:05d}").is_dir():
                continue  # written before
            tables = {
                name: table(name, sorted(self.rows[rank][name], key=lambda row: row["start_ns"]))
                for name in ("device_events", "host_events", "collectives", "iterations")
            }
            known = RankInfo(rank=rank, rank_source="trace", source="kineto", files=[f"rank-{rank}.json"], clock="unix", **info)
            cache.write(RankTables(known, tables), folder / f"{rank:05d}")
        return folder

    def _enqueue(self, rank: int, kind: str, took_ns: int, operator: str, **known: Any) -> int:
        """The host launches something; when the device begins it."""
        begin = self.host_ns[rank] + self.pause_ns[rank]
        self.host_ns[rank] = begin + LAUNCH_NS
        start = max(begin + LAUNCH_NS, self.free_ns[rank])
        self.free_ns[rank] = start + took_ns
        number = self._call(rank, "cudaLaunchKernel", begin, begin + LAUNCH_NS, operator)
        self.rows[rank]["device_events"].append(
            {"kind": kind, "name": kind, "start_ns": start, "end_ns": start + took_ns, "correlation": self.calls}
            | {"launch_start_ns": begin, "launch_end_ns": begin + LAUNCH_NS, "launch_thread": 1, "operator": number}
            | {"iteration": self.iteration, **known}
        )
        return start

    def _call(self, rank: int, name: str, begin: int, end: int, operator: str | None) -> int | None:
        self.calls += 1
        number = None
        if operator is not None:
            number = self.calls
            self._host(rank, "operator", operator, begin, end, operator=number)
        self._host(rank, "runtime", name, begin, end, correlation=self.calls, operator=number)
        return number

    def _host(self, rank: int, category: str, name: str, begin: int, end: int, **known: Any) -> None:
        row = {"category": category, "name": name, "start_ns": begin, "end_ns": end, **known}
        self.rows[rank]["host_events"].append(row)


class InThisProcess:
    """An engine that starts no processes: small ranks are read faster than an interpreter starts."""

    def map(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Outcome[Any]]:
        """Every task's outcome, in order."""
        for place, task in enumerate(tasks):
            yield Outcome(place, function(task))
