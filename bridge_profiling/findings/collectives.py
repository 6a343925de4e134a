"""Findings about collectives that a training need not run: reductions of every micro-batch, and many small messages."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings import communication
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.peers import CONTENTION
from bridge_profiling.findings.rule import Evidence, responsible
from bridge_profiling.findings.types import Event, Grid, Thresholds, by_rank

#: Smaller messages take a fixed time for the most part.
_SMALL_BYTES = communication.BANDWIDTH_BOUND_BYTES

#: Operations that reduce gradients, and all that a data-parallel or sharded training runs.
_REDUCING, _SHARDED = ("all_reduce", "reduce_scatter"), ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

#: Smaller messages are norms, flags and losses, not gradients.
_GRADIENTS_BYTES = 1 << 16

#: Messages are fragments of what could be sent at once if their mean is below this: a third of DDP's bucket of 25 MiB.
_FRAGMENT_BYTES = 8 << 20

#: Groups of other dimensions reduce activations.
_OF_GRADIENTS = ("dp", None)

#: Causes of the time that launching a sharded model's collectives costs, in this order.
_HOST = (Cause.host_launch, Cause.small_kernels, Cause.host_pause)


def accumulation_sync(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Gradients are reduced after every micro-batch, where once for each step of the optimizer is enough."""
    passes, repeats = _passes(grids), _repeats(grids)
    repeated = {rank: times for rank, times in passes.items() if times > 1 and repeats.get(rank, 1) % times == 0}
    if not repeated:
        return
    mine = [each for each in communication.transfers(grids) if each.rank in repeated and _reduces(each)]
    needless = {rank: 1 - 1 / times for rank, times in repeated.items()}
    exposed = communication.by_captured_rank(grids, ((each.rank, each.exposed_ns * needless[each.rank]) for each in mine))
    exposed = np.minimum(exposed, np.nan_to_num(ledger.left_ns(Cause.blocked_by_communication)))
    overlapped = ((each.rank, each.overlapped_ns * needless[each.rank] * CONTENTION) for each in mine)
    slowed = communication.by_captured_rank(grids, overlapped)
    slowed_ns = float(np.nanmean(slowed)) if slowed.size else 0.0
    saving_ns = ledger.attribute(exposed, (Cause.blocked_by_communication,)) + slowed_ns
    if grids.share(saving_ns) < thresholds.cause:
        return
    ranks = sorted(repeated)
    of_first = [each for each in mine if each.rank == ranks[0]]
    yield Evidence(
        ranks=ranks,
        measures={
            "micro_batches": max(repeated.values()),
            "collectives": round(sum(each.count for each in of_first), 2),
            "bytes": round(sum(each.count * (each.message_bytes or 0.0) for each in of_first)),
            "exposed_ns": by_rank(grids.mean_ns(exposed)),
        },
        saving_ns=saving_ns,
        events=_events(mine),
    )


def small_collectives(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """A sharded or data-parallel training sends many small messages, each of which costs the host and the network a fixed time.

    Of the host's time, that in a sharded model's ranges counts, and that in operators which issue small ones elsewhere.
    """
    many = {
        rank: counted
        for rank, counted in _counted(grids).items()
        if counted.every >= thresholds.collectives
        and (counted.small >= thresholds.small_collectives * counted.every or counted.mean_bytes < _FRAGMENT_BYTES)
    }
    if not many:
        return
    mine = [each for each in communication.transfers(grids) if each.rank in many and _of_data_parallelism(each)]
    latency = [each for each in mine if (each.message_bytes or 0.0) < _SMALL_BYTES]
    exposed = communication.by_captured_rank(grids, ((each.rank, each.exposed_ns) for each in latency))
    exposed = np.minimum(exposed, np.nan_to_num(ledger.left_ns(Cause.blocked_by_communication)))
    # Of the host, in the ranges of a sharded model's communication.
    of_units = [
        (row["rank"], row["host_ns"] / grids.captured_iterations.get(row["rank"], 1))
        for row in grids.facts.units.to_pylist()
        if row["rank"] in grids.ranks
    ]
    host = communication.by_captured_rank(grids, (each for each in of_units if each[0] in many)) + _issuing_ns(grids, many)
    host = np.minimum(host, np.nan_to_num(ledger.left_ns(*_HOST)))
    of_transfers = ledger.attribute(exposed, (Cause.blocked_by_communication,))
    of_host = ledger.attribute(host, _HOST)
    if grids.share(of_transfers + of_host) < thresholds.cause:
        return
    worst = max(many.values(), key=lambda each: each.every)
    yield Evidence(
        ranks=sorted(many),
        measures={
            "collectives": by_rank({rank: each.every for rank, each in many.items()}, 1),
            "small_collectives": by_rank({rank: each.small for rank, each in many.items()}, 1),
            "mean_message_bytes": {f"{each.operation} on rank {each.rank}": each.message_bytes for each in mine},
            "exposed_ns": by_rank(grids.mean_ns(exposed)),
            "host_ns": by_rank(grids.mean_ns(host)),
        },
        saving_ns=of_transfers + of_host,
        title=["title", "sizes"],
        advice=["units" if of_units else "buckets"],
        values={"worst": worst, "small_mib": _SMALL_BYTES >> 20, "mean_mib": worst.mean_bytes / 2**20},
        sure=grids.confidence(of_host=of_host > of_transfers),
        events=_events(mine),
    )


def _passes(grids: Grids) -> dict[int, int]:
    """Forward passes of DDP for each step of the optimizer, by rank; ranks on which they vary are left out."""
    found: dict[int, set[int]] = defaultdict(set)
    for row in grids.facts.loop_counts.to_pylist():
        if row["iteration"] in grids.lines and row["rank"] in grids.ranks:
            found[row["rank"]].add(row["passes"] // max(row["steps"], 1))
    return {rank: next(iter(each)) for rank, each in found.items() if len(each) == 1 and each != {0}}


def _repeats(grids: Grids) -> dict[int, int]:
    """How often ranks run the same reductions in each iteration: the greatest common divisor of their counts by size."""
    found: dict[int, int] = {}
    for row in grids.facts.collective_sizes.to_pylist():
        large = row["operation"] in _REDUCING and (row["message_bytes"] or 0) >= _GRADIENTS_BYTES
        if large and row["iteration"] in grids.lines:
            found[row["rank"]] = math.gcd(found.get(row["rank"], 0), row["count"])
    return found


def _reduces(each: communication.Transfer) -> bool:
    large = each.message_bytes is None or each.message_bytes >= _GRADIENTS_BYTES
    return large and each.operation in _REDUCING and each.dimension in _OF_GRADIENTS


def _of_data_parallelism(each: communication.Transfer) -> bool:
    return each.operation in _SHARDED and each.dimension in _OF_GRADIENTS


@dataclass(frozen=True)
class _Counted:
    """Collectives of one rank's data parallelism in an iteration: the small ones, all of them, and their mean size."""

    small: float
    every: float
    mean_bytes: float
    share: float  # of the small ones in all collectives that the rank issues


def _counted(grids: Grids) -> dict[int, _Counted]:
    """By rank, as far as sizes are recorded."""
    groups = {(each.rank, each.group) for each in communication.transfers(grids) if _of_data_parallelism(each)}
    issued: Counter[int] = Counter()
    rows: dict[int, list[tuple[int, int]]] = {rank: [] for rank in grids.ranks}
    for row in grids.facts.collective_sizes.to_pylist():
        rank, count, size = row["rank"], row["count"], row["message_bytes"]
        if row["iteration"] in grids.lines:
            issued[rank] += count
            if rank in rows and size is not None and row["operation"] in _SHARDED and (rank, row["group"]) in groups:
                rows[rank].append((count, size))
    iterations, found = max(len(grids.numbers), 1), {}
    for rank, sized in rows.items():
        small, every = (sum(count for count, size in sized if size < below) for below in (_SMALL_BYTES, math.inf))
        mean_bytes = sum(count * size for count, size in sized) / max(every, 1)
        found[rank] = _Counted(small / iterations, every / iterations, mean_bytes, small / max(issued[rank], 1))
    return found


def _issuing_ns(grids: Grids, many: Mapping[int, _Counted]) -> Grid:
    """The host's time in issuing small collectives of data parallelism, without the profiler's part of it."""
    own_ns, cost_ns = (np.nan_to_num(grids.grid("profiler_cost", name)) for name in ("host_own_ns", "host_cost_ns"))
    of_host = np.maximum(own_ns, 0.0) / np.maximum(np.maximum(own_ns, 0.0) + cost_ns, 1_000)
    share = [many[rank].share if rank in many else 0.0 for rank in grids.ranks]
    issuing_ns = np.nan_to_num(grids.grid("loop_counts", "issuing_ns")) * of_host * share
    return grids.zero + issuing_ns


def _events(mine: Sequence[communication.Transfer]) -> list[Event]:
    worst = responsible({place: each.exposed_ns + each.overlapped_ns for place, each in enumerate(mine)})
    return [
        communication.operation_event(each.rank, each.operation, each.group, each.exposed_ns, each.count)
        for each in map(mine.__getitem__, worst[:5])
    ]
