"""The table of communication by size of message, from rows of `Run.communication(by_size=True)`; groups of a kind together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bridge_profiling.bench.results import BUS_OPERATIONS, bus_factor
from bridge_profiling.report import words
from bridge_profiling.report.figures import group_label
from bridge_profiling.report.tables import most
from bridge_profiling.report.views import Row, TableView, ms, of, table

#: Added up over the groups of one kind.
_SUMS = ("count", "matched_count", "captured_ranks", "duration_us", "transfer_us", "wait_us", "exposed_us", "overlapped_us")


def communication_by_size(rows: Sequence[Row], iterations: int, count: int) -> TableView:
    """One row per operation, kind of group, its size and that of the message; times are of a rank in an iteration."""
    kinds: dict[tuple[str | None, str, int | None, int | None], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row["operation"], group_label(row), row["group_size"], row["message_bytes"]].append(row)
    merged = [_merged(mine, group, iterations) for (_, group, _, _), mine in kinds.items()]
    shown, note = most(sorted(merged, key=lambda row: -row["duration_us"]), count)
    shares = {"of_alone": "of the same alone", "of_link": "of NVLink"}
    columns = {
        "operation": lambda row: row["operation"],
        "message": of("message_bytes", words.size),
        "calls": of("calls"),
        "total": ms("duration_us"),
        "waiting": ms("wait_us"),
        "exposed": ms("exposed_us"),
        "hidden": of("hidden", words.percent),
        "algorithm GB/s": of("algorithm_gbs", words.bandwidth),
        "bus GB/s": of("bus_gbs", words.bandwidth),
        **{heading: of(name, words.percent) for name, heading in shares.items() if any(row[name] for row in shown)},
        "group": lambda row: row["group"],
    }
    operations = sorted({row["operation"] for row in shown})
    title = "Communication by size of message, ms of a rank in an iteration"
    return table("message-sizes", title, shown, columns, name_last=True, filters=operations, sorted_by=3, note=note)


def _merged(rows: Sequence[Row], group: str, iterations: int) -> dict[str, Any]:
    operation, size, message_bytes = (rows[0][name] for name in ("operation", "group_size", "message_bytes"))
    sums = {name: sum(row[name] or 0 for row in rows) for name in _SUMS}
    # Of each group, the captured ranks have a kernel of each operation.
    by = max(sums["captured_ranks"], 1) * iterations
    speed = None
    if sums["transfer_us"] and message_bytes:
        speed = sums["matched_count"] * message_bytes / sums["transfer_us"] / 1e3
    hidden = sums["overlapped_us"] / sums["duration_us"] if sums["duration_us"] else None
    bus_gbs = speed * bus_factor(operation, size) if speed and size and operation in BUS_OPERATIONS else None
    alone, link = ({row[name] for row in rows} for name in ("alone_bus_bandwidth_gbs", "link_gbs"))
    return {
        "operation": operation or "?",
        "group": f"{group} of {size or '?'}" + (f", {len(rows)} groups" if len(rows) > 1 else ""),
        "message_bytes": message_bytes,
        "calls": sums["count"] / len(rows) / iterations,
        "duration_us": sums["duration_us"] / by,
        "wait_us": sums["wait_us"] / by if sums["matched_count"] else None,
        "exposed_us": sums["exposed_us"] / by,
        "hidden": hidden,
        "algorithm_gbs": speed,
        "bus_gbs": bus_gbs,
        "of_alone": _share(bus_gbs, alone),
        "of_link": _share(bus_gbs, link),
    }


def _share(bus_gbs: float | None, of_gbs: set[float | None]) -> float | None:
    """A bandwidth as a share of another one that all groups have in common."""
    (one,) = of_gbs if len(of_gbs) == 1 else (None,)
    return bus_gbs / one if bus_gbs and one else None
