"""Jobs of many ranks whose kernels and groups have names: what findings across ranks are told from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Find, Finding, Thresholds
from bridge_profiling.analysis.workers import Outcome
from bridge_profiling.traces import cache
from bridge_profiling.traces.types import RankInfo, RankTables
from tests.analysis.findings.simulated_hosts import MS, US, SimulatedHosts
from tests.analysis.ranks_in_hand import table

__all__ = ["MS", "US", "Here", "SimulatedJob", "found_by"]

_TABLES = ("device_events", "host_events", "collectives", "iterations")

#: The stream of communication that runs beside compute.
_BESIDE = 20


def found_by(run: Run, *finds: Find, thresholds: Thresholds | None = None) -> list[Finding]:
    """What some findings find in a run, without those that come before them."""
    evidence, found = run.evidence(thresholds), []
    ledger = evidence.ledger()
    for find in finds:
        findings, ledger = find(evidence, thresholds or Thresholds(), ledger)
        found += findings
    return found


class Here:
    """Does the work on each rank in this process: starting others takes longer than so small a rank."""

    def map(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Outcome[Any]]:
        """Every task's outcome."""
        for number, task in enumerate(tasks):
            yield Outcome(number, function(task))


class SimulatedJob(SimulatedHosts):
    """Hosts and devices as in `SimulatedHosts`, with named kernels, and groups that send messages of a size."""

    def compute(self, rank: int, took_ns: int, *, name: str = "gemm", count: int = 1) -> None:
        """The host launches kernels of a name."""
        for _ in range(count):
            self._enqueue(rank, "compute", took_ns, "aten::mm", name=name)

    def transfer(
        self,
        took_ns: int,
        members: Sequence[int],
        *,
        group: str = "TENSOR_MODEL_PARALLEL_GROUP",
        operation: str = "all_reduce",
        size: int = 1 << 23,
        beside: bool = False,
    ) -> None:
        """A collective that what is launched after it waits for, or that runs beside it on a stream of its own."""
        free = {rank: self.free_ns[rank] for rank in members}
        if beside:  # It begins when it is launched, whatever the other stream does.
            self.free_ns |= dict.fromkeys(members, 0)
        self.meet(took_ns, members)
        for rank in members:
            event, collective = self.rows[rank]["device_events"][-1], self.rows[rank]["collectives"][-1]
            stream = _BESIDE if beside else 7
            event["stream"] = collective["stream"] = stream
            collective |= {"operation": operation, "group": group, "message_bytes": size}
            collective["group_name"] = f"{group}-{min(members)}-{operation}"
        if beside:
            self.free_ns |= free

    def without_groups(self) -> None:
        """Communication as an nsys report without NCCL's payloads has it: whose it is, and how much, is unknown."""
        for rank in range(self.ranks):
            for row in self.rows[rank]["collectives"]:
                row |= {"group": None, "group_name": None, "group_ranks": None, "group_size": None, "message_bytes": None}

    def even_step(self, *, kernels: int = 40, took_ns: int = 500 * US, transfer_ns: int = 200 * US) -> None:
        """All ranks compute the same, launched well in time, and meet."""
        for rank in range(self.ranks):
            self.compute(rank, took_ns, count=kernels)
        self.transfer(transfer_ns, range(self.ranks))

    def write(self, folder: Path, **info: Any) -> Path:
        """Write the captures as the cache keeps them, each row with its rank, and give the folder, for `Run`."""
        for rank in range(self.ranks):
            tables = {}
            for name in _TABLES:
                rows = table(name, sorted(self.rows[rank][name], key=lambda row: row["start_ns"]))
                ranks = pa.repeat(pa.scalar(rank, pa.int32()), rows.num_rows)
                tables[name] = rows.set_column(rows.column_names.index("rank"), "rank", ranks)
            known = RankInfo(rank=rank, rank_source="trace", source="kineto", files=[f"rank-{rank}.json"], clock="unix", **info)
            cache.write(RankTables(known, tables), folder / f"{rank:05d}")
        return folder
