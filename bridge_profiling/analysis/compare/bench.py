"""A capture beside what the same links, copies, loader and step give alone, as `bridge-profiling bench` measured it.

Communication is compared operation by operation and size by size: the time that the transfers of the capture took, waiting
for other ranks left out, with the time that they take alone. Between measured sizes time is interpolated over size, which is
right for a link of any latency and bandwidth; outside of them nothing is said. Nothing is compared that ran elsewhere: on
another device, among another number of ranks, in one host instead of several.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge_profiling.analysis.ranks.waiting import measure_waiting
from bridge_profiling.bench.results import BenchDocument, bus_factor
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

    from bridge_profiling.analysis.run import Run

#: What a captured operation is compared with; others with what bears their name.
_MEASURED_AS = {"recv": "send"}

#: Operations between two ranks: how many others there are in the group does not matter.
_PAIRWISE = ("send", "send_recv")

_BY_SIZE = """
with per_match as (
    select group_id, operation, match, max(message_bytes) as message_bytes, any_value(transfer_ns) as transfer_ns
    from waiting group by all
), named as (
    select group_id, operation, any_value("group") as "group", any_value(group_name) as group_name,
        any_value(group_ranks) as group_ranks, max(group_size)::integer as group_size
    from operations group by group_id, operation
)
select operation, "group", group_name, group_ranks, group_size, message_bytes::bigint as message_bytes, count(*) as count,
    sum(transfer_ns) / 1e3 as transfer_us
from per_match join named using (group_id, operation) group by all
order by "group", group_name, group_ranks, operation, message_bytes
"""

_COPIES = """
select direction, if(direction = 'HtoD', from_memory, to_memory) as host_memory, bytes::bigint as bytes, count(*) as count,
    sum(end_ns - start_ns) / 1e3 as copy_us
from device_events where kind = 'memcpy' and direction in ('HtoD', 'DtoH') and bytes > 0
group by all order by direction, host_memory, bytes
"""

_KIND = ("operation", "group", "group_name", "group_ranks", "group_size")

_COMMUNICATION = pa.schema(
    [
        ("operation", pa.string()),
        ("group", pa.string()),
        ("group_name", pa.string()),
        ("group_ranks", pa.string()),
        ("group_size", pa.int32()),
        ("count", pa.int64()),
        ("compared_count", pa.int64()),
        ("transfer_us", pa.float64()),
        ("alone_us", pa.float64()),
        ("reached_share", pa.float64()),
        ("bus_bandwidth_gbs", pa.float64()),
        ("alone_bus_bandwidth_gbs", pa.float64()),
        ("reason", pa.string()),
    ]
)

_COPY = pa.schema(
    [
        ("direction", pa.string()),
        ("host_memory", pa.string()),
        ("count", pa.int64()),
        ("compared_count", pa.int64()),
        ("copy_us", pa.float64()),
        ("alone_us", pa.float64()),
        ("reached_share", pa.float64()),
        ("bandwidth_gbs", pa.float64()),
        ("alone_bandwidth_gbs", pa.float64()),
        ("reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class AgainstBench:
    """A capture beside benchmarks.

    Args:
        path: the file of results.
        found: it was not named, but lies beside the captures.
        communication: a row per operation and group: count, compared_count, transfer_us and alone_us (of those compared),
            reached_share (alone_us over transfer_us: 1 is as fast as alone), bus_bandwidth_gbs and alone_bus_bandwidth_gbs
            (1e9 bytes/s), and reason (why some or all are not compared, else null).
        copies: the same of copies, by direction and memory of the host.
        step: the step alone and a captured iteration; None without such a result.
        data_loader: the loader alone and a captured iteration; None without such a result.
    """

    path: str
    found: bool
    communication: pa.Table
    copies: pa.Table
    step: dict[str, Any] | None
    data_loader: dict[str, Any] | None

    def as_plain_data(self) -> dict[str, Any]:
        """As `analyze --json` holds it."""
        return {
            "file": self.path,
            "found_beside_captures": self.found,
            "communication": self.communication.to_pylist(),
            "copies": self.copies.to_pylist(),
            "step": self.step,
            "data_loader": self.data_loader,
        }


def transfers_by_size(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Matched operations by group and message size: how many, and how long their transfers took.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.
    """
    measure_waiting(connection, infos, limitations=limitations)
    return connection.sql(_BY_SIZE).to_arrow_table()


def copies_by_size(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Copies between host and device of all ranks by direction, memory and size.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: nothing is appended.
    """
    return connection.sql(_COPIES).to_arrow_table()


def against_bench(run: Run, document: BenchDocument, *, found: bool) -> AgainstBench:
    """Compare a run with results.

    Args:
        run: whose captures are asked.
        document: the results.
        found: they were not named, but lie beside the captures.
    """
    infos = [info for info in run.infos if info.source == run.main_source]
    device = next((name for info in infos for name in info.devices.values()), None)
    return AgainstBench(
        path=str(document.path),
        found=found,
        communication=pa.Table.from_pylist(list(_communication(run, infos, device, document)), _COMMUNICATION),
        copies=pa.Table.from_pylist(list(_copies(run, device, document)), _COPY),
        step=_step(run, device, document),
        data_loader=_data_loader(run, document),
    )


def interpolated(points: Sequence[tuple[int, float]], size: int) -> float | None:
    """The time at a size between those measured; None outside of them.

    Args:
        points: sizes in bytes with bandwidths in 1e9 bytes/s, in any order.
        size: in bytes.

    Returns:
        Microseconds, linear between the two sizes around: latency plus size over bandwidth is just that.
    """
    times = sorted((measured, measured / gbs / 1e3) for measured, gbs in points if gbs > 0)
    for measured, time_us in times:
        if measured == size:
            return time_us
    for (low, at_low), (high, at_high) in itertools.pairwise(times):
        if low < size < high:
            return at_low + (at_high - at_low) * (size - low) / (high - low)
    return None


def _communication(
    run: Run, infos: Sequence[RankInfo], device: str | None, document: BenchDocument
) -> Iterator[dict[str, Any]]:
    results = document.of_kind("collectives")
    if not results:
        return
    by_size: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in run.across(transfers_by_size).to_pylist():
        by_size.setdefault(tuple(row[name] for name in _KIND), []).append(row)
    for row in run.communication().to_pylist():
        key = tuple(row[name] for name in _KIND)
        sizes = by_size.get(key, [])
        points, reason = _measured(row, _hosts(infos, row["group_ranks"]), device, results)
        if not sizes:
            points, reason = [], "transfer cannot be told from waiting: it was not captured on two participants"
        factor = bus_factor(row["operation"], row["group_size"] or 2)
        compared = _compared([(each["message_bytes"], each["count"], each["transfer_us"]) for each in sizes], points)
        yield {
            **{name: row[name] for name in _KIND},
            "count": row["count"],
            "compared_count": compared.count,
            "transfer_us": compared.taken_us,
            "alone_us": compared.alone_us,
            "reached_share": compared.share,
            "bus_bandwidth_gbs": compared.gbs(compared.taken_us, factor),
            "alone_bus_bandwidth_gbs": compared.gbs(compared.alone_us, factor),
            "reason": reason or compared.left_out,
        }


def _measured(
    row: Mapping[str, Any], hosts: int | None, device: str | None, results: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[int, float]], str | None]:
    """Sizes and algorithm bandwidths of the result that fits an operation best; without one, why none does."""
    operation = _MEASURED_AS.get(row["operation"], row["operation"])
    reasons: list[tuple[int, str]] = []
    # Of several that fit, as of other element types, the newest, which comes last.
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
    # Of several results the reason why the one that fits best does not.
    return [], max(reasons)[1] if reasons else None


def _differences(
    result: Mapping[str, Any], size: int | None, hosts: int | None, device: str | None, *, pairwise: bool
) -> Iterator[str | None]:
    """What keeps a result from being compared with a group, each a reason or None: the most telling differences first."""
    measured = result["world_size"], result["hosts"]
    yield None if result["backend"] == "nccl" else f"{result['backend']} was measured, and nccl captured"
    yield None if device in (None, result["device"]) else f"{result['device']} was measured, and {device} captured"
    same_size = pairwise or size in (None, measured[0])
    yield None if same_size else f"{measured[0]} ranks were measured, and the group has {size}"
    same_hosts = hosts is None or (measured[1] == 1) == (hosts == 1) if pairwise else hosts in (None, measured[1])
    yield (
        None if same_hosts else f"ranks on {_on_hosts(measured[1])} were measured, and the group is on {_on_hosts(hosts or 1)}"
    )


def _on_hosts(hosts: int) -> str:
    return "one host" if hosts == 1 else f"{hosts} hosts"


def _hosts(infos: Sequence[RankInfo], group_ranks: str | None) -> int | None:
    """On how many hosts a group is; None where that is not known of all of its ranks."""
    members = json.loads(group_ranks) if group_ranks else None
    by_rank = {info.rank: info.host for info in infos}
    hosts = {by_rank.get(rank) for rank in members} if members else {None}
    return None if None in hosts else len(hosts)


def _copies(run: Run, device: str | None, document: BenchDocument) -> Iterator[dict[str, Any]]:
    results = document.of_kind("copies")
    if not results:
        return
    by_kind: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run.across(copies_by_size).to_pylist():
        by_kind.setdefault((row["direction"], row["host_memory"]), []).append(row)
    fitting = next((result for result in reversed(results) if device is None or result["device"] == device), None)
    for (direction, memory), rows in by_kind.items():
        points = [
            (each["bytes"], each["bandwidth_gbs"])
            for each in (fitting["rows"] if fitting else ())
            if (each["direction"], each["host_memory"]) == (direction, memory) and each["correct"]
        ]
        compared = _compared([(row["bytes"], row["count"], row["copy_us"]) for row in rows], points)
        reason = compared.left_out
        if fitting is None:
            reason = f"{results[-1]['device']} was measured, and {device} captured"
        elif not points:
            reason = f"{direction} of {memory} memory was not measured"
        yield {
            "direction": direction,
            "host_memory": memory,
            "count": sum(row["count"] for row in rows),
            "compared_count": compared.count,
            "copy_us": compared.taken_us,
            "alone_us": compared.alone_us,
            "reached_share": compared.share,
            "bandwidth_gbs": compared.gbs(compared.taken_us),
            "alone_bandwidth_gbs": compared.gbs(compared.alone_us),
            "reason": reason,
        }


@dataclass(frozen=True)
class _Compared:
    """What could be compared of some transfers, and what not."""

    count: int
    bytes: int
    taken_us: float | None
    alone_us: float | None
    left_out: str | None

    @property
    def share(self) -> float | None:
        return self.alone_us / self.taken_us if self.taken_us and self.alone_us is not None else None

    def gbs(self, time_us: float | None, factor: float = 1.0) -> float | None:
        return factor * self.bytes / time_us / 1e3 if time_us else None


def _compared(sizes: Sequence[tuple[int | None, int, float]], points: Sequence[tuple[int, float]]) -> _Compared:
    """Transfers of each size against bandwidths by size.

    Args:
        sizes: message bytes, how many, and microseconds that they took together.
        points: sizes and bandwidths measured; none when nothing fits.
    """
    count = amount = 0
    taken_us = alone_us = 0.0
    outside: list[int] = []
    unknown = 0
    for size, transfers, time_us in sizes:
        one_us = None if size is None else interpolated(points, size)
        if one_us is not None and size is not None:
            count, amount = count + transfers, amount + size * transfers
            taken_us, alone_us = taken_us + time_us, alone_us + transfers * one_us
        elif size is None:
            unknown += transfers
        else:
            outside.append(size)
    reasons = []
    if outside and points:
        span = f"{min(points)[0]:,} to {max(points)[0]:,} bytes"
        which = f"{min(outside):,}" if min(outside) == max(outside) else f"{min(outside):,} to {max(outside):,}"
        reasons.append(f"messages of {which} bytes were sent, and {span} were measured")
    if unknown:
        reasons.append(f"the size of {unknown} is not known")
    return _Compared(count, amount, taken_us if count else None, alone_us if count else None, "; ".join(reasons) or None)


def _step(run: Run, device: str | None, document: BenchDocument) -> dict[str, Any] | None:
    results = [result for result in document.of_kind("step") if result["rows"]]
    if not results:
        return None
    result = next((each for each in reversed(results) if device is None or each["device"] == device), None)
    iteration_us, of = _iteration_us(run)
    if result is None or iteration_us is None:
        reason = "no iteration is marked" if result else f"{results[-1]['device']} was measured, and {device} captured"
        return {"subject": results[-1]["subject"], "alone_us": None, "iteration_us": iteration_us, "of": of, "reason": reason}
    alone_us = result["rows"][0]["time_us"]["median"]
    return {"subject": result["subject"], "alone_us": alone_us, "iteration_us": iteration_us, "of": of, "reason": None}


def _data_loader(run: Run, document: BenchDocument) -> dict[str, Any] | None:
    results = document.of_kind("data_loader")
    if not results:
        return None
    result = results[-1]
    rates = [rate for row in result["rows"] if (rate := (row["batches_per_s"] or {}).get("mean"))]
    iteration_us, of = _iteration_us(run)
    batch_us = 1e6 / max(rates) if rates else None
    reason = None if rates and iteration_us is not None else "no iteration is marked" if rates else "no rate was measured"
    return {"subject": result["subject"], "batch_us": batch_us, "iteration_us": iteration_us, "of": of, "reason": reason}


def _iteration_us(run: Run) -> tuple[float | None, str]:
    """The median iteration: of those that no profiler touched where manifests have them, else of the captured ones."""
    unprofiled = [time for manifest in run.manifests for time in manifest.durations_ns(profiled=False)]
    if unprofiled:
        return median(unprofiled) / 1e3, "iterations that were not profiled"
    captured = run.iterations()
    times = captured["duration_us"].to_pylist() if captured.num_rows else []
    return (median(times), "captured iterations") if times else (None, "captured iterations")
