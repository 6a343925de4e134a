"""Findings about communication that nothing hides. Waiting for other ranks does not count: it is a finding of the late rank."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge_profiling.facts.idle import Cause
from bridge_profiling.facts.intervals import summed
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.rule import Evidence
from bridge_profiling.findings.types import Confidence, Event, Grid, Thresholds, text

#: Names of groups in Megatron and other frameworks; the first match counts.
_DIMENSIONS = (
    ("pp", r"pipeline|\bpp\b|embedding"),
    ("dp", r"data.?parallel|distributed_optimizer|\bd?dp\b|fsdp|replicate"),
    ("ep", r"expert|\bep\b|moe"),
    ("cp", r"context|\bcp\b"),
    ("tp", r"tensor|model.?parallel|\btp\b"),
)

#: NCCL takes about 20 µs for the smallest message, in which NVLink moves megabytes: below the first size, size hardly matters.
#: From the second on, bandwidth decides on NVLink too.
LATENCY_BOUND_BYTES, BANDWIDTH_BOUND_BYTES = 1 << 20, 1 << 21

#: A link below this bus bandwidth in GB/s is slow: between hosts the rate of a 200 Gbit/s card or PCIe 4.0; within a host the
#: best rate of PCIe 5.0, which means that NVLink is not used.
_SLOW_GBS, _SLOW_IN_ONE_HOST_GBS = 25.0, 60.0

#: From this share of the benchmark's bandwidth on, other load on the link is not the cause.
_AS_FAST_AS_ALONE = 0.85

#: Overlapped to this share, overlapping is on and works: only the first and the last bucket are left.
_MOSTLY_HIDDEN = 0.5

#: Operations of data parallelism that can overlap. Smaller messages are norms, flags and losses, which depend on all of
#: the backward pass.
_OVERLAPPING, _SMALLEST_BYTES = ("all_reduce", "reduce_scatter", "all_gather"), 1 << 20

_UNMATCHED = Confidence.low, "transfers_estimated"


@dataclass(frozen=True)
class Transfer:
    """One operation of one group on one rank, per captured iteration; None for unknown values."""

    rank: int
    dimension: str | None  # tp, dp, pp, ep or cp
    group: str | None  # its name in the program
    operation: str
    count: float
    message_bytes: float | None  # mean
    exposed_ns: float  # of the transfer, without waiting
    overlapped_ns: float
    matched: bool  # measured between ranks, not estimated
    members: frozenset[int]  # ranks of the group; empty if unknown
    bus_bandwidth_gbs: float | None
    slow_gbs: float  # a link with less bus bandwidth is slow
    reached_share: float | None  # of the benchmark's bandwidth

    @property
    def limited_by(self) -> str | None:
        """`latency`: many small messages; `link`: large messages over a slow link."""
        if self.message_bytes is None:
            return None
        if self.message_bytes < LATENCY_BOUND_BYTES:
            return "latency"
        slow = self.bus_bandwidth_gbs is not None and self.bus_bandwidth_gbs < self.slow_gbs
        return "link" if slow and self.message_bytes >= BANDWIDTH_BOUND_BYTES else None

    @property
    def slow_link_ns(self) -> float:
        """Exposed time that a link at `slow_gbs` would save at least; 0 for links that are not slow."""
        if self.limited_by != "link" or self.bus_bandwidth_gbs is None:
            return 0.0
        return self.exposed_ns * (1 - self.bus_bandwidth_gbs / self.slow_gbs)


def exposed_communication(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Data is transferred while the next kernel is already launched and waits for it.

    A slow link can be fixed: it is reported from the threshold of other causes on, with the time that a faster one would save.
    """
    every, known = transfers(grids), grids.waiting_is_known
    exposed = ledger.left_ns(Cause.blocked_by_communication)
    if known:
        exposed = np.maximum(exposed - grids.waiting_ns, 0.0)
    # A kernel that another process interrupts, or one behind others that wait for a late rank, ends later than its transfer
    # would, and does not wait for a rank either.
    exposed = np.minimum(exposed, by_captured_rank(grids, ((each.rank, each.exposed_ns) for each in every)))
    typical = grids.typical_ns(exposed)
    ranks = [rank for rank in grids.ranks if grids.share(typical.get(rank, 0.0)) > thresholds.communication]
    if not ranks:
        exposed = np.minimum(exposed, by_captured_rank(grids, ((each.rank, each.slow_link_ns) for each in every)))
        saved = grids.typical_ns(exposed)
        ranks = [rank for rank in grids.ranks if grids.share(saved.get(rank, 0.0)) > thresholds.cause]
    if not ranks:
        return
    groups = _by_group(each for each in every if each.rank in ranks)
    share = grids.share(max(typical[rank] for rank in ranks))
    yield Evidence(
        ranks=ranks,
        measures={
            "exposed_transfer_ns": {str(rank): typical[rank] for rank in ranks},
            "estimated": not known,
            "groups": groups,
        },
        saving_ns=ledger.attribute(exposed, (Cause.blocked_by_communication,), waited=not known),
        sure=grids.confidence() if known else _UNMATCHED,
        events=_events(groups),
        severe=share > 2 * thresholds.communication,
        **_of_links(groups),
    )


def low_overlap(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Reductions of gradients and gathers of parameters do not overlap compute.

    Each depends on one layer only, so the exposed time can be hidden as far as there is compute that overlaps nothing yet.
    """
    chosen = [each for each in transfers(grids) if _can_overlap(each)]
    compute = grids.typical_ns(grids.compute_ns)
    exposed_ns = summed((each.rank, each.exposed_ns) for each in chosen)
    overlapped_ns = summed((each.rank, each.overlapped_ns) for each in chosen)
    # Communication that runs while the device waits for its host is exposed too, and hiding it saves nothing.
    blocked = (Cause.blocked_by_communication,)
    blocked_ns = grids.typical_ns(grids.idle_ns(*blocked))
    hideable, hidden = {}, {}
    for rank in grids.ranks:
        exposed, overlapped = exposed_ns[rank], overlapped_ns[rank]
        hideable[rank] = min(exposed, max(compute.get(rank, 0.0) - overlapped, 0.0), blocked_ns.get(rank, 0.0))
        hidden[rank] = overlapped / (exposed + overlapped) if exposed else 1.0
    # All members of a group go on together: hiding a transfer saves what the member loses that it blocks least.
    members = {rank: {rank}.union(*(each.members for each in chosen if each.rank == rank)) for rank in grids.ranks}
    hideable = {rank: min(hideable[each] for each in members[rank] if each in hideable) for rank in grids.ranks}
    ranks = [rank for rank in grids.ranks if hidden[rank] < _MOSTLY_HIDDEN and grids.share(hideable[rank]) > thresholds.cause]
    if not ranks:
        return
    lost = np.minimum(ledger.left_ns(*blocked), grids.captured_row(hideable))
    worst = max(ranks, key=lambda rank: hideable[rank])
    groups = _by_group(each for each in chosen if each.rank in ranks)
    yield Evidence(
        ranks=ranks,
        measures={
            "could_hide_ns": {str(rank): hideable[rank] for rank in ranks},
            "hidden_share": {str(rank): hidden[rank] for rank in ranks},
            "groups": groups,
        },
        saving_ns=ledger.attribute(lost, blocked, waited=not grids.waiting_is_known),
        values={"hidden": hidden[worst]},
        sure=grids.confidence() if all(each.matched for each in chosen) else _UNMATCHED,
        events=_events(groups),
    )


def unmatched_communication(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Communication takes much of an iteration, and captures of other ranks would show how much of it is waiting for them."""
    world_size = max((info.world_size or 0 for info in grids.facts.infos), default=0)
    if grids.waiting_is_known or not grids.ranks or 0 < world_size <= len(grids.facts.infos):
        return
    blocked = ledger.left_ns(Cause.blocked_by_communication)
    mean = grids.mean_ns(blocked)
    ranks = [rank for rank in grids.ranks if grids.share(mean.get(rank, 0.0)) > thresholds.communication]
    if not ranks:
        return
    rows = [
        row for row in grids.facts.communication_by_rank.to_pylist() if row["rank"] in ranks and (row["exposed_ns"] or 0) > 0
    ]
    events = []
    for row in sorted(rows, key=lambda row: -row["exposed_ns"])[:5]:
        iterations = grids.captured_iterations.get(row["rank"], 1)
        exposed_ns, count = row["exposed_ns"] / iterations, row["count"] / iterations
        events.append(operation_event(row["rank"], row["operation"], row["group"], exposed_ns, count))
    yield Evidence(
        ranks=ranks,
        measures={
            "exposed_ns": {str(rank): mean[rank] for rank in ranks},
            "ranks_captured": len(grids.facts.infos),
            "world_size": world_size or None,
        },
        saving_ns=ledger.attribute(blocked, (Cause.blocked_by_communication,), waited=True),
        sure=(Confidence.low, "late_or_slow"),
        events=events,
    )


def transfers(grids: Grids) -> list[Transfer]:
    """Every operation of every rank whose transfer is known apart from waiting, or can be estimated.

    A matched transfer takes as long as the last participant needs, any other as long as the shortest one of its size.
    """

    def key(row: dict[str, Any]) -> tuple[str, str | None, str | None]:
        return row["operation"], row["group_name"], row["group_ranks"]

    bandwidths = {key(row): row["bus_bandwidth_gbs"] for row in grids.facts.communication.to_pylist()}
    reached = {key(row): row["reached_share"] for row in (() if grids.facts.alone is None else grids.facts.alone.to_pylist())}
    groups: dict[tuple[str | None, str | None], tuple[str | None, float]] = {}
    found = []
    for row in grids.facts.communication_by_rank.to_pylist():
        group = row["group"], row["group_ranks"]
        if group not in groups:
            groups[group] = _group(grids, *group)
        matched = bool(row["matched_count"])
        transfer = row["transfer_ns"] if matched else row["shortest_ns"]
        if transfer is None or row["exposed_ns"] is None:
            continue
        iterations = grids.captured_iterations.get(row["rank"], 1)
        exposed = max(row["exposed_ns"] - (row["wait_ns"] if matched else 0.0), 0.0)
        dimension, slow_gbs = groups[group]
        found.append(
            Transfer(
                rank=row["rank"],
                dimension=dimension,
                group=row["group"],
                operation=row["operation"],
                count=row["count"] / iterations,
                message_bytes=None if row["bytes"] is None else row["bytes"] / row["count"],
                exposed_ns=min(exposed, transfer) / iterations,
                overlapped_ns=row["overlapped_ns"] / iterations,
                matched=matched,
                members=frozenset(json.loads(row["group_ranks"] or "[]")),
                bus_bandwidth_gbs=bandwidths.get(key(row)),
                slow_gbs=slow_gbs,
                reached_share=reached.get(key(row)),
            )
        )
    return found


def _group(grids: Grids, group: str | None, group_ranks: str | None) -> tuple[str | None, float]:
    """The parallel dimension of a group, by its name or else by its ranks' coordinates, and its slow bandwidth."""
    members = set(json.loads(group_ranks)) if group_ranks else set()
    infos = [info for info in grids.facts.infos if info.rank in members]
    hosts = {info.host for info in infos}
    if None in hosts:  # the job is on one host if it is not larger than the host
        in_one_host = any(info.world_size is not None and info.world_size <= len(info.device_bytes) for info in infos)
    else:
        in_one_host = len(hosts) == 1
    slow_gbs = _SLOW_IN_ONE_HOST_GBS if in_one_host else _SLOW_GBS
    for name, pattern in _DIMENSIONS:
        if group and re.search(pattern, group, re.IGNORECASE):
            return name, slow_gbs
    places = [info.coordinates for info in infos if info.coordinates]
    if len(places) < 2:
        return None, slow_gbs
    differ = [name for name in places[0] if len({place[name] for place in places if name in place}) > 1]
    return differ[0] if len(differ) == 1 else None, slow_gbs


def _can_overlap(each: Transfer) -> bool:
    large = each.message_bytes is not None and each.message_bytes >= _SMALLEST_BYTES
    return large and each.dimension == "dp" and each.operation in _OVERLAPPING


def by_captured_rank(grids: Grids, times_ns: Iterable[tuple[int, float]]) -> Grid:
    """Times added up by rank, in each captured iteration."""
    return grids.captured_row(summed(times_ns))


def _by_group(chosen: Iterable[Transfer]) -> list[dict[str, Any]]:
    """Operations by group as evidence, most exposed first, each of the rank with the most exposed time."""
    worst: dict[tuple[str, str | None], Transfer] = {}
    for each in chosen:
        kept = worst.setdefault((each.operation, each.group), each)
        if each.exposed_ns > kept.exposed_ns:
            worst[each.operation, each.group] = each
    return [
        {
            "group": each.group,
            "dimension": each.dimension,
            "operation": each.operation,
            "rank": each.rank,
            "exposed_ns": each.exposed_ns,
            "overlapped_ns": each.overlapped_ns,
            "operations": each.count,
            "mean_message_bytes": each.message_bytes,
            "bus_bandwidth_gbs": each.bus_bandwidth_gbs,
            "limited_by": each.limited_by,
            **({} if each.reached_share is None else {"reached_share_of_alone": each.reached_share}),
        }
        for each in sorted(worst.values(), key=lambda each: -each.exposed_ns)
    ]


def _events(groups: Sequence[dict[str, Any]]) -> list[Event]:
    names = ("rank", "operation", "group", "exposed_ns", "operations")
    return [operation_event(*(row[name] for name in names)) for row in groups[:5]]


def operation_event(rank: int, operation: str, group: str | None, exposed_ns: float, count: float) -> Event:
    """The operations of a group on a rank, in an iteration."""
    name = text("events", "operation" if group else "of_unnamed_group", operation=operation, group=group)
    return Event(rank, name, duration_ns=exposed_ns, count=max(round(count), 1))


def _of_links(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Title and advice: for the group with the most exposed time, before that for a slow link of any group."""
    first = groups[0] if groups else {}
    slow, dimension = [row for row in groups if row["limited_by"] == "link"], first.get("dimension")
    share = next((row["reached_share_of_alone"] for row in slow if "reached_share_of_alone" in row), None)
    alone = "" if share is None else "slow_alone" if share >= _AS_FAST_AS_ALONE else "slow_here"
    latency = "latency" if first.get("limited_by") == "latency" else ""
    return {
        "title": ["title", "slow_link" if slow else ""],
        "advice": ["link" if slow else "", alone, latency, dimension if dimension in dict(_DIMENSIONS) else "unknown"],
        "values": {"slowest_gbs": min((row["bus_bandwidth_gbs"] for row in slow), default=None), "reached": share},
    }
