"""Runs of many ranks whose truth is known: ranks compute, meet in collectives and exchange, each on a clock of its own."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.session import connect
from bridge_profiling.traces import cache
from bridge_profiling.traces.tables import SCHEMAS, build
from bridge_profiling.traces.types import RankInfo, RankTables

US = 1_000
MS = 1_000_000

#: A moment in the epoch: a double cannot hold nanoseconds of it exactly.
EPOCH_NS = 1_795_178_166_680_430_505


@dataclass
class SimulatedRun:
    """Ranks that work in real time; what a profiler would have recorded of each is kept, in the rank's own clock.

    Args:
        ranks: how many.
        offsets_ns: how much each rank's clock is ahead of real time.
        transfer_ns: what moving data takes, unless said otherwise.
        communication_stream: where communication runs; on stream 7 what is computed after it waits for it.
    """

    ranks: int
    offsets_ns: dict[int, int] = field(default_factory=dict)
    transfer_ns: int = 20 * US
    communication_stream: int = 20

    def __post_init__(self) -> None:
        self.now_ns = dict.fromkeys(range(self.ranks), EPOCH_NS)
        self.kernels: dict[int, list[int]] = {}
        self.iteration: int | None = None
        self.device: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.operations: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.iterations: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.happened = 0

    def compute(self, rank: int, duration_ns: int) -> None:
        """The rank computes, in as many kernels as it is told to, in the proportions given."""
        shares = self.kernels.get(rank, [1])
        for share in shares:
            begin = self.now_ns[rank]
            self.now_ns[rank] += duration_ns * share // sum(shares)
            self._device(rank, "compute", begin, self.now_ns[rank], None)

    def meet(
        self, members: Sequence[int], operation: str = "all_reduce", size: int = 1 << 20, group: str = "TP", **how: Any
    ) -> None:
        """A collective: all end it when the last of them has come and the data has moved."""
        end = max(self.now_ns[rank] for rank in members) + self.transfer_ns
        for rank in members:
            self._operation(rank, operation, members, size, group, self.now_ns[rank], end, None)
            self.now_ns[rank] = end
        self.happened += 1

    def send(
        self, source: int, target: int, members: Sequence[int], size: int = 1 << 23, *, ready_ns: int | None = None
    ) -> None:
        """Data goes from one rank to another: the sender goes on at once, the receiver waits from when it is ready."""
        size = 1 << 23
        begin = self.now_ns[source] if ready_ns is None else ready_ns
        came = max(begin, self.now_ns[target]) + self.transfer_ns
        self._operation(source, "send", members, size, "PIPELINE", begin, begin + self.transfer_ns, target)
        self._operation(target, "recv", members, size, "PIPELINE", self.now_ns[target], came, source)
        self.now_ns[target] = came
        self.happened += 1

    def exchange(self, one: int, other: int, members: Sequence[int]) -> None:
        """Two ranks send and receive in one kernel each."""
        size = 1 << 23
        end = max(self.now_ns[one], self.now_ns[other]) + self.transfer_ns
        for rank, peer in ((one, other), (other, one)):
            self._operation(rank, "send_recv", members, size, "PIPELINE", self.now_ns[rank], end, peer)
            self.now_ns[rank] = end
        self.happened += 1

    def iterate(self, count: int, step: Callable[[int], None], *, first: int = 10, boundary: Iterable[int] = ()) -> None:
        """Iterations, each of which every rank begins when it has ended the one before."""
        for number in range(first, first + count):
            self.iteration = number
            begins = dict(self.now_ns)
            step(number)
            for rank in range(self.ranks):
                clock = self.offsets_ns.get(rank, 0)
                self.iterations[rank].append(
                    {
                        "iteration": number,
                        "start_ns": begins[rank] + clock,
                        "end_ns": self.now_ns[rank] + clock,
                        "boundary": number in set(boundary),
                    }
                )
        self.iteration = None

    def write(
        self,
        folder: Path,
        *,
        ranks: Iterable[int] | None = None,
        skip: dict[int, int] | None = None,
        marked: bool = True,
        **info: Any,
    ) -> list[Path]:
        """Write the captures as the cache does; returns their folders.

        Args:
            folder: where to.
            ranks: those that are captured.
            skip: operations with which each rank's capture does not begin yet.
            marked: whether iterations are marked.
            info: more of every RankInfo.
        """
        entries = []
        for rank in sorted(range(self.ranks) if ranks is None else ranks):
            kept = _ordered(self.operations[rank])[(skip or {}).get(rank, 0) :]
            begin = kept[0]["start_ns"] if skip and skip.get(rank) and kept else 0
            device = [row for row in self.device[rank] if row["start_ns"] >= begin]
            tables = {
                "collectives": _table("collectives", rank, [_captured(row, place) for place, row in enumerate(kept)]),
                "device_events": _table("device_events", rank, _renumbered(device, kept)),
                "iterations": _table("iterations", rank, self.iterations[rank] if marked else []),
            }
            if not marked:
                tables = {name: _without_iterations(table) for name, table in tables.items()}
            known = RankInfo(
                rank=rank, rank_source="trace", source="kineto", files=[f"rank-{rank}.json"], **{"clock": "unix", **info}
            )
            cache.write(RankTables(known, tables), folder / f"{rank:05d}")
            entries.append(folder / f"{rank:05d}")
        return entries

    def connected(self, folder: Path, **how: Any) -> Any:
        """A database of the captures, written as by `write`."""
        return connect(self.write(folder, **how))

    def captured(self, folder: Path, **how: Any) -> Run:
        """The captures, written as by `write`."""
        self.write(folder, **how)
        return Run(folder)

    def truth(self, rank: int, skipped: int = 0) -> list[int]:
        """Of each operation a rank's capture holds, by its number there, which one it really was."""
        return [row["truth"] for row in _ordered(self.operations[rank])[skipped:]]

    def _device(self, rank: int, kind: str, begin: int, end: int, truth: int | None) -> None:
        clock = self.offsets_ns.get(rank, 0)
        row = {"kind": kind, "name": kind, "start_ns": begin + clock, "end_ns": end + clock, "iteration": self.iteration}
        self.device[rank].append(row | {"truth": truth, "stream": 7 if kind == "compute" else self.communication_stream})

    def _operation(
        self, rank: int, operation: str, members: Sequence[int], size: int, group: str, begin: int, end: int, peer: int | None
    ) -> None:
        clock = self.offsets_ns.get(rank, 0)
        self.operations[rank].append(
            {
                "truth": self.happened,
                "operation": operation,
                "group_name": f"{group}-{members[0]}",
                "group": group,
                "group_ranks": json.dumps(list(members), separators=(",", ":")),
                "group_size": len(members),
                "message_bytes": size,
                "peer": peer,
                "start_ns": begin + clock,
                "end_ns": end + clock,
                "iteration": self.iteration,
            }
        )
        self._device(rank, "communication", begin, end, self.happened)


def _ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["start_ns"])


def _captured(row: dict[str, Any], place: int) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "truth"} | {"collective": place}


def _renumbered(device: list[dict[str, Any]], operations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    numbers = {row["truth"]: place for place, row in enumerate(operations)}
    rows = [
        {name: value for name, value in row.items() if name != "truth"} | {"collective": numbers.get(row["truth"])}
        for row in device
        if row["truth"] is None or row["truth"] in numbers
    ]
    return _ordered(rows)


def _table(name: str, rank: int, rows: list[dict[str, Any]]) -> pa.Table:
    if not rows:
        return SCHEMAS[name].empty_table()
    if name == "collectives":
        counts: dict[str, int] = defaultdict(int)
        for row in rows:
            row["sequence"] = counts[row["group_name"]]
            counts[row["group_name"]] += 1
    names = [column.name for column in SCHEMAS[name] if column.name in rows[0]]
    kinds = {column.name: column.type for column in SCHEMAS[name]}
    columns = {
        each: pa.array(
            [row[each] for row in rows], kinds[each].value_type if pa.types.is_dictionary(kinds[each]) else kinds[each]
        )
        for each in names
    }
    return build(name, rank, columns)


def _without_iterations(table: pa.Table) -> pa.Table:
    if "iteration" not in table.column_names:
        return table
    place = table.column_names.index("iteration")
    return table.set_column(place, "iteration", pa.nulls(table.num_rows, pa.int32()))


def one_forward_one_backward(
    run: SimulatedRun, stages: Sequence[int], microbatches: int, forward_ns: Sequence[int], backward_ns: Sequence[int]
) -> None:
    """The forward and backward passes of an iteration in the 1F1B schedule.

    Args:
        run: whose ranks work.
        stages: the rank of each stage.
        microbatches: how many.
        forward_ns: what a forward pass takes on each stage.
        backward_ns: what a backward pass takes on each stage.
    """
    count = len(stages)
    waiting = []
    for stage in range(count):
        ahead = min(count - 1 - stage, microbatches)
        plan = [("F", number) for number in range(ahead)]
        for number in range(microbatches - ahead):
            plan += [("F", ahead + number), ("B", number)]
        plan += [("B", number) for number in range(microbatches - ahead, microbatches)]
        waiting.append(plan)
    done: dict[tuple[str, int, int], int] = {}
    while any(waiting):
        for stage, plan in enumerate(waiting):
            if not plan:
                continue
            kind, number = plan[0]
            source = stage - 1 if kind == "F" else stage + 1
            first = (kind == "F" and stage == 0) or (kind == "B" and stage == count - 1)
            if not first and (kind, source, number) not in done:
                continue
            if not first:
                run.send(stages[source], stages[stage], stages, ready_ns=done[kind, source, number])
            run.compute(stages[stage], (forward_ns if kind == "F" else backward_ns)[stage])
            done[kind, stage, number] = run.now_ns[stages[stage]]
            plan.pop(0)
