"""A run compared with what its links and its data loader reach alone, as `bridge-profiling bench` measured.

Communication is compared per operation and size: the time of the run's transfers, without waiting for other ranks, with the
time of the same transfers alone. Between measured sizes, time is interpolated over size, which is exact for a link with a
latency and a bandwidth; other sizes are not compared. Results from another device, number of ranks or kind of link are not
compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from bridge_profiling.bench.results import BenchDocument, bus_factor
from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.types import declared
from bridge_profiling.traces.types import RankInfo

#: Captured operations that are compared with a measured operation of another name.
_MEASURED_AS = {"recv": "send"}

#: Operations between two ranks: the size of the group does not matter.
_PAIRWISE = ("send", "send_recv")

_GROUP = ("operation", "group", "group_name", "group_ranks")


@dataclass(frozen=True)
class AgainstBench:
    """A run compared with benchmarks."""

    file: str  # of results
    found_beside_captures: bool  # whether it was found next to the captures instead of named
    communication: pa.Table  # rows of `ComparedCommunication`
    data_loader: dict[str, Any] | None  # the loader alone and a captured iteration; None without such a result


def with_alone(facts: RunFacts) -> pa.Table:
    """Rows of `communication_by_size` with `alone_bus_bandwidth_gbs`: of the same operation and size alone, null if unknown."""
    sizes, document, infos = facts.communication_by_size, facts.captures.bench, facts.infos
    results = [] if document is None else document.of_kind("collectives")
    found = []
    for row in sizes.to_pylist() if results else ():
        points, _ = _measured(row, results, infos)
        size = row["message_bytes"]
        one_ns = interpolated(points, size) if size else None
        found.append(bus_factor(row["operation"], row["group_size"] or 2) * size / one_ns if one_ns else None)
    return sizes.append_column("alone_bus_bandwidth_gbs", pa.array(found or [None] * len(sizes), pa.float64()))


def against_bench(facts: RunFacts) -> AgainstBench | None:
    """Compare a run with results of benchmarks; None without any."""
    document = facts.captures.bench
    if document is None:
        return None
    unprofiled = [time for manifest in facts.manifests for time in manifest.durations_ns(profiled=False)]
    times = unprofiled or facts.iterations["duration_ns"].to_pylist()
    iteration = {
        "iteration_ns": median(times) if times else None,
        "of": "iterations that were not profiled" if unprofiled else "captured iterations",
        "reason": None if times else "no iteration is marked",
    }
    return AgainstBench(
        file=str(document.path),
        found_beside_captures=facts.captures.bench_found,
        communication=pa.Table.from_pylist(list(_communication(document, facts)), declared("ComparedCommunication").schema()),
        data_loader=_data_loader(document, iteration),
    )


def interpolated(points: Sequence[tuple[int, float]], size: int) -> float | None:
    """Nanoseconds at a size in bytes, linear between the two measured sizes around it; None outside of them.

    Args:
        points: sizes in bytes with bandwidths in 1e9 bytes/s, in any order.
        size: in bytes.
    """
    times_ns = dict(sorted((measured, measured / gbs) for measured, gbs in points if gbs > 0))
    if not times_ns or not min(times_ns) <= size <= max(times_ns):
        return None
    return float(np.interp(size, list(times_ns), list(times_ns.values())))


def _communication(document: BenchDocument, facts: RunFacts) -> Iterator[dict[str, Any]]:
    results = document.of_kind("collectives")
    if not results:
        return
    by_group = grouped((row for row in facts.communication_by_size.to_pylist() if row["matched_count"]), *_GROUP)
    for row in facts.communication.to_pylist():
        transfers = sorted(by_group.get(tuple(row[name] for name in _GROUP), []), key=itemgetter("message_bytes"))
        points, reason = _measured(row, results, facts.infos)
        if not row["matched_count"]:
            points, reason = [], "waiting cannot be separated from transfer: fewer than two participants are captured"
        measured = [(each["message_bytes"], each["matched_count"], each["transfer_ns"]) for each in transfers]
        unknown = row["matched_count"] - sum(count for _, count, _ in measured)
        factor = bus_factor(row["operation"], row["group_size"] or 2)
        yield {name: row[name] for name in (*_GROUP, "group_size", "count")} | _compared(
            measured, points, reason, factor=factor, unknown=unknown
        )


def _measured(
    row: Mapping[str, Any], results: Sequence[Mapping[str, Any]], infos: Sequence[RankInfo]
) -> tuple[list[tuple[int, float]], str | None]:
    """Sizes and algorithm bandwidths of the result that fits an operation best, or the reason why none fits."""
    operation = _MEASURED_AS.get(row["operation"], row["operation"])
    hosts, device = _hosts(infos, row["group_ranks"]), _device(infos)
    reasons: list[tuple[int, str]] = []
    # Of several that fit, for example of other element types, the newest, which is last.
    for result in reversed(results):
        points = [
            (each["message_bytes"], each["algorithm_bandwidth_gbs"])
            for each in result["rows"]
            if each["operation"] == operation and each["correct"]
        ]
        checks = (
            *_differences(result, row["group_size"], hosts, device, pairwise=operation in _PAIRWISE),
            None if points else f"{operation} was not measured",
        )
        wrong = next(((place, reason) for place, reason in enumerate(checks) if reason is not None), None)
        if wrong is None:
            return points, None
        reasons.append(wrong)
    # The reason of the result that fits best.
    return [], max(reasons)[1]


def _differences(
    result: Mapping[str, Any], size: int | None, hosts: int | None, device: str | None, *, pairwise: bool
) -> Iterator[str | None]:
    """Reasons against comparing a result with a group, or None: the most important differences first."""
    measured = result["world_size"], result["hosts"]
    yield None if result["backend"] == "nccl" else f"{result['backend']} was measured, but nccl captured"
    yield None if device in (None, result["device"]) else f"{result['device']} was measured, but {device} captured"
    same_size = pairwise or size in (None, measured[0])
    yield None if same_size else f"{measured[0]} ranks were measured, but the group has {size}"
    same_hosts = hosts is None or (measured[1] == 1) == (hosts == 1) if pairwise else hosts in (None, measured[1])
    mine, theirs = ("one host" if count == 1 else f"{count} hosts" for count in (measured[1], hosts or 1))
    yield None if same_hosts else f"ranks on {mine} were measured, but the group is on {theirs}"


def _hosts(infos: Sequence[RankInfo], group_ranks: str | None) -> int | None:
    """Number of hosts of a group; None unless the hosts of all its ranks are known."""
    members = json.loads(group_ranks) if group_ranks else None
    by_rank = {info.rank: info.host for info in infos}
    hosts = {by_rank.get(rank) for rank in members} if members else {None}
    return None if None in hosts else len(hosts)


def _device(infos: Sequence[RankInfo]) -> str | None:
    return next((name for info in infos for name in info.devices.values()), None)


def _compared(
    sizes: Sequence[tuple[int, int, float]],
    points: Sequence[tuple[int, float]],
    reason: str | None,
    *,
    factor: float,
    unknown: int,
) -> dict[str, Any]:
    """Columns of the comparison of transfers with bandwidths by size, and the reason why some are not compared.

    Args:
        sizes: message bytes, number, and sum of nanoseconds.
        points: measured sizes and bandwidths; none if nothing fits.
        reason: why nothing fits.
        factor: bus over algorithm bandwidth.
        unknown: number of transfers whose size is unknown.
    """
    count = amount = 0
    taken_ns = alone_ns = 0.0
    outside: list[int] = []
    for size, transfers, time_ns in sizes:
        one_ns = interpolated(points, size)
        if one_ns is None:
            outside.append(size)
        else:
            count, amount = count + transfers, amount + size * transfers
            taken_ns, alone_ns = taken_ns + time_ns, alone_ns + transfers * one_ns
    reasons = []
    if outside and points:
        span = f"{min(points)[0]:,} to {max(points)[0]:,} bytes"
        which = f"{min(outside):,}" if min(outside) == max(outside) else f"{min(outside):,} to {max(outside):,}"
        reasons.append(f"messages of {which} bytes were sent, but {span} were measured")
    if unknown:
        reasons.append(f"the size of {unknown} is unknown")
    return {
        "compared_count": count,
        "transfer_ns": round(taken_ns) if count else None,
        "alone_ns": round(alone_ns) if count else None,
        "reached_share": alone_ns / taken_ns if taken_ns else None,
        "bus_bandwidth_gbs": factor * amount / taken_ns if taken_ns else None,
        "alone_bus_bandwidth_gbs": factor * amount / alone_ns if alone_ns else None,
        "reason": reason or "; ".join(reasons) or None,
    }


def _data_loader(document: BenchDocument, iteration: dict[str, Any]) -> dict[str, Any] | None:
    results = document.of_kind("data_loader")
    if not results:
        return None
    rates = [rate for row in results[-1]["rows"] if (rate := (row["batches_per_s"] or {}).get("mean"))]
    batch_ns = 1e9 / max(rates) if rates else None
    reason = iteration["reason"] if rates else "no rate was measured"
    return {"subject": results[-1]["subject"], "batch_ns": batch_ns, **iteration, "reason": reason}
