"""How long data moves while nothing is computed, by group and operation, waiting for other ranks left out.

Where operations are matched, moving data takes what the last participant to arrive needs. Where they are not, as of a rank
that is captured alone, each is taken to move data as long as the shortest of its size: an estimate, and too much if all waited.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge_profiling.analysis.findings.context import Context

#: What Megatron calls its groups, and others theirs; the first that fits counts.
_DIMENSIONS = (
    ("pp", r"pipeline|\bpp\b|embedding"),
    ("dp", r"data.?parallel|distributed_optimizer|\bd?dp\b|fsdp|replicate"),
    ("ep", r"expert|\bep\b|moe"),
    ("cp", r"context|\bcp\b"),
    ("tp", r"tensor|model.?parallel|\btp\b"),
)

#: NCCL takes some 20 us for the smallest message, in which an NVLink moves megabytes: below this, size hardly matters.
LATENCY_BOUND_BYTES = 1 << 20

#: From this on bandwidth decides, on NVLink too.
BANDWIDTH_BOUND_BYTES = 1 << 21

#: Bus bandwidth in GB/s that says "slow": between hosts what a card of 200 Gbit/s or PCIe 4.0 carries; within one host what
#: PCIe 5.0 carries at best: no NVLink is used.
_SLOW_GBS, _SLOW_IN_ONE_HOST_GBS = 25.0, 60.0


@dataclass(frozen=True)
class Transfer:
    """One kind of communication on one rank, microseconds of a captured iteration in the mean.

    Args:
        rank: global rank.
        dimension: tp, dp, pp, ep or cp; None when neither its name nor its ranks tell.
        group: what the program calls the group.
        group_ranks: its ranks as JSON text; None when unknown.
        operation: as in `Run.communication`.
        count: operations.
        message_bytes: of the mean one; None when unknown.
        exposed_us: data moved and nothing else ran.
        overlapped_us: communication beside compute.
        transfer_us: data moved.
        matched: against other ranks'; otherwise estimated.
        bus_bandwidth_gbs: of its group's transfers; None when unknown.
        slow_gbs: the bus bandwidth below which its link is slow.
        reached_share: of what the link gives alone, by a benchmark; None without one that fits.
    """

    rank: int
    dimension: str | None
    group: str | None
    group_ranks: str | None
    operation: str
    count: float
    message_bytes: float | None
    exposed_us: float
    overlapped_us: float
    transfer_us: float
    matched: bool
    bus_bandwidth_gbs: float | None
    slow_gbs: float
    reached_share: float | None = None

    @property
    def limited_by(self) -> str | None:
        """`latency`: messages so small that their number counts; `link`: large ones that move slowly; None for neither."""
        if self.message_bytes is None:
            return None
        if self.message_bytes < LATENCY_BOUND_BYTES:
            return "latency"
        large = self.message_bytes >= BANDWIDTH_BOUND_BYTES
        slow = self.bus_bandwidth_gbs is not None and self.bus_bandwidth_gbs < self.slow_gbs
        return "link" if large and slow else None

    @property
    def slow_link_us(self) -> float:
        """What of the exposed time a link that is not slow would save, at the least; 0 for links that are not."""
        if self.limited_by != "link" or self.bus_bandwidth_gbs is None:
            return 0.0
        return self.exposed_us * (1 - self.bus_bandwidth_gbs / self.slow_gbs)


def transfers(context: Context) -> list[Transfer]:
    """Every kind of communication of which transfer can be told from waiting, or estimated, of every rank.

    Args:
        context: of one run.
    """
    captured: dict[int, int] = defaultdict(int)
    for rank in context.iterations["rank"].to_pylist() if context.iterations.num_rows else ():
        captured[rank] += 1
    bandwidths = {
        (row["operation"], row["group_name"], row["group_ranks"]): row["bus_bandwidth_gbs"]
        for row in context.run.communication().to_pylist()
    }
    reached = _reached(context)
    found = []
    dimensions: dict[tuple[str | None, str | None], str | None] = {}
    for row in context.run.communication(by_rank=True).to_pylist():
        group = row["group"], row["group_ranks"]
        if group not in dimensions:
            dimensions[group] = dimension(context, *group)
        matched = bool(row["matched_count"])
        transfer = row["transfer_us"] if matched else row["shortest_us"]
        if transfer is None:
            continue
        iterations = captured.get(row["rank"], 1)
        exposed = max(row["exposed_us"] - (row["wait_us"] if matched else 0.0), 0.0)
        found.append(
            Transfer(
                rank=row["rank"],
                dimension=dimensions[group],
                group=row["group"],
                group_ranks=row["group_ranks"],
                operation=row["operation"],
                count=row["count"] / iterations,
                message_bytes=None if row["bytes"] is None else row["bytes"] / row["count"],
                exposed_us=min(exposed, transfer) / iterations,
                overlapped_us=row["overlapped_us"] / iterations,
                transfer_us=transfer / iterations,
                matched=matched,
                bus_bandwidth_gbs=bandwidths.get((row["operation"], row["group_name"], row["group_ranks"])),
                slow_gbs=_SLOW_IN_ONE_HOST_GBS if _in_one_host(context, row["group_ranks"]) else _SLOW_GBS,
                reached_share=reached.get((row["operation"], row["group_name"], row["group_ranks"])),
            )
        )
    return found


def dimension(context: Context, group: str | None, group_ranks: str | None) -> str | None:
    """Which parallel dimension a group belongs to, by its name, else by the coordinates of its ranks.

    Args:
        context: of one run.
        group: what the program calls it.
        group_ranks: its ranks as JSON text.
    """
    for name, pattern in _DIMENSIONS:
        if group and re.search(pattern, group, re.IGNORECASE):
            return name
    members = set(json.loads(group_ranks)) if group_ranks else set()
    places = [info.coordinates for info in context.infos if info.rank in members and info.coordinates]
    if len(places) < 2:
        return None
    differ = [name for name in places[0] if len({place[name] for place in places if name in place}) > 1]
    return differ[0] if len(differ) == 1 else None


def by_group(chosen: Sequence[Transfer]) -> list[dict[str, Any]]:
    """Kinds of communication by group and operation as evidence, the most exposed first; times are the worst rank's.

    Args:
        chosen: of `transfers`.
    """
    worst: dict[tuple[str, str | None], Transfer] = {}
    for each in chosen:
        kept = worst.setdefault((each.operation, each.group), each)
        if each.exposed_us > kept.exposed_us:
            worst[each.operation, each.group] = each
    return [
        {
            "group": each.group,
            "dimension": each.dimension,
            "operation": each.operation,
            "rank": each.rank,
            "exposed_us": each.exposed_us,
            "overlapped_us": each.overlapped_us,
            "operations": each.count,
            "mean_message_bytes": each.message_bytes,
            "bus_bandwidth_gbs": each.bus_bandwidth_gbs,
            "limited_by": each.limited_by,
            **({} if each.reached_share is None else {"reached_share_of_alone": each.reached_share}),
        }
        for each in sorted(worst.values(), key=lambda each: -each.exposed_us)
    ]


def _reached(context: Context) -> dict[tuple[str, str | None, str | None], float | None]:
    """Shares of what links give alone, by operation and group; empty where no benchmark was given."""
    bench = context.run.against_bench
    rows = [] if bench is None else bench.communication.to_pylist()
    return {(row["operation"], row["group_name"], row["group_ranks"]): row["reached_share"] for row in rows}


def _in_one_host(context: Context, group_ranks: str | None) -> bool:
    """Whether a group's ranks are known to be on one host: they say so, or the whole job is no larger than the host is."""
    members = set(json.loads(group_ranks)) if group_ranks else set()
    infos = [info for info in context.infos if info.rank in members]
    hosts = {info.host for info in infos}
    if None not in hosts:
        return len(hosts) == 1
    return any(info.world_size is not None and info.world_size <= len(info.device_bytes) for info in infos)
