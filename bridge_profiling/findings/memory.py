"""Findings about device memory: nearly full, fragmented, growing. None of them saves time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.words import written
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.rule import Evidence
from bridge_profiling.findings.types import Confidence, Event, Thresholds, text
from bridge_profiling.traces.types import RankInfo

#: The allocator takes up to 10 MiB in pieces of 20 MiB: one piece now and then is rounding, and so are a few per stream.
_PIECE_BYTES = 20 * 1024 * 1024
_ROUNDING_BYTES = 10 * _PIECE_BYTES

#: With fewer changes, growth and set-up look alike; with this many similar ones, growth is certain.
_ENOUGH_CHANGES, _MANY_CHANGES = 2, 5

#: Share of the changes that must be growth.
_MOST = 2 / 3

#: Allocation sites that a finding shows.
_SITES = 5


def free_at_peak(memory: pa.Table, infos: Sequence[RankInfo]) -> dict[int, float]:
    """The share of memory that is free at the peak on the fullest device of each rank, as far as sizes are recorded."""
    sizes = {(info.rank, device): size for info in infos for device, size in info.device_bytes.items()}
    found: dict[int, float] = {}
    for row in memory.to_pylist():
        rank, size, peak = row["rank"], sizes.get((row["rank"], row["device"])), row["peak_reserved_bytes"] or row["peak_bytes"]
        if size and peak:
            found[rank] = min(found.get(rank, 1.0), max(1 - peak / size, 0.0))
    return found


def memory_headroom(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Devices that are nearly full at the peak of reserved memory, or that ran out of memory.

    Devices of unknown size count only if they ran out.
    """
    failed = {(row["rank"], row["device"]): row for row in grids.facts.out_of_memory.to_pylist()}
    rows = []
    for row in grids.facts.memory.to_pylist():
        key = row["rank"], row["device"]
        capacity, peak, error = _device_bytes(grids, *key), row["peak_reserved_bytes"] or row["peak_bytes"], failed.get(key)
        left = max(1 - peak / capacity, 0.0) if capacity and peak else None
        if error or (left is not None and left < thresholds.memory_headroom):
            rows.append(row | {"capacity": capacity, "peak": peak, "left": left, "error": error})
    if not rows:
        return
    rows.sort(key=lambda row: (row["error"] is None, row["left"] or 0.0, row["rank"]))
    fullest, ranks = rows[0], sorted({row["rank"] for row in rows})
    error = fullest["error"]
    # Memory without tensors is freed before a request fails, at the price of stalls.
    held = bool(error) or fullest["peak_bytes"] / fullest["capacity"] > 1 - thresholds.memory_headroom
    events = []
    if error:
        events.append(Event(fullest["rank"], text("events", "out_of_memory", site=error["site"]), start_ns=error["time_ns"]))
    if fullest["peak_ns"] is not None:
        events.append(Event(fullest["rank"], text("events", "peak"), start_ns=fullest["peak_ns"]))
    yield Evidence(
        ranks=ranks,
        measures={
            "devices": [
                {
                    "rank": row["rank"],
                    "device": row["device"],
                    "device_bytes": row["capacity"],
                    "peak_allocated_bytes": row["peak_bytes"],
                    "peak_reserved_bytes": row["peak_reserved_bytes"],
                    "left_share": row["left"],
                    "failed_request_bytes": row["error"]["requested_bytes"] if row["error"] else None,
                }
                for row in rows
            ]
        },
        title=["failed" if error else "title"],
        advice=["" if held else "cached", "default"],
        values={**fullest, "requested": (error or {}).get("requested_bytes") or 0},
        sure=(Confidence.high, "") if held else (Confidence.medium, "cached"),
        events=[*events, *_largest_sites(grids, fullest["rank"], fullest["device"], "bytes_at_peak")],
        severe=bool(error) or (held and fullest["left"] < thresholds.memory_headroom / 2),
    )


def memory_fragmentation(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """The allocator holds memory that it cannot use.

    Each of three signs is enough: much was reserved while as much was free in holes; each iteration reserves more than it
    leaves allocated; a request failed that the free memory together could have held. Inactive split blocks are only shown.
    """
    growth, failed = _needless_growth(grids), _failed_requests(grids)
    rows = []
    for row in grids.facts.memory.to_pylist():
        key = row["rank"], row["device"]
        needless = row["needlessly_reserved_bytes"] or 0
        row |= {"growth": growth.get(key, 0.0), "failed": failed.get(key, 0)}
        share = needless / row["peak_reserved_bytes"] if needless > _ROUNDING_BYTES else 0.0
        if row["growth"] or row["failed"] or share > thresholds.memory_fragmentation:
            rows.append(row)
    if not rows:
        return
    rows.sort(key=lambda row: (-row["failed"], -row["growth"], -(row["needlessly_reserved_bytes"] or 0), row["rank"]))
    worst, ranks = rows[0], sorted({row["rank"] for row in rows})
    split = worst["inactive_split_bytes"]
    certain = worst["failed"] or (split is not None and split > thresholds.memory_fragmentation * worst["end_reserved_bytes"])
    yield Evidence(
        ranks=ranks,
        measures={
            "devices": [
                {
                    "rank": row["rank"],
                    "device": row["device"],
                    "needlessly_reserved_bytes": row["needlessly_reserved_bytes"],
                    "needless_growth_bytes_per_iteration": row["growth"],
                    "failed_request_bytes": row["failed"] or None,
                    "peak_reserved_bytes": row["peak_reserved_bytes"],
                    "peak_allocated_bytes": row["peak_bytes"],
                    "share_of_reserved": (row["needlessly_reserved_bytes"] or 0) / row["peak_reserved_bytes"],
                    "inactive_split_bytes": (split := row["inactive_split_bytes"]),
                    "inactive_split_share": None if split is None else split / row["end_reserved_bytes"],
                }
                for row in rows
            ]
        },
        title=["failed_request" if worst["failed"] else "growing" if worst["growth"] else "title"],
        values={**worst, "free": (worst["end_reserved_bytes"] or 0) - worst["end_bytes"]},
        sure=(Confidence.high, "") if certain else (Confidence.medium, "no_holes"),
        # Tensors in use at the end lie between the holes.
        events=_largest_sites(grids, worst["rank"], worst["device"], "end_bytes"),
        severe=bool(worst["failed"]),
    )


def memory_growth(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Memory allocated at the end of iterations keeps growing, beyond the set-up of the first ones."""
    recorded: dict[tuple[int, int], list[dict[str, Any]]] = grouped(grids.facts.memory_growth.to_pylist(), "rank", "device")
    changes = {key: [row["change_bytes"] for row in rows if row["change_bytes"] is not None] for key, rows in recorded.items()}
    grown = {key: size for key, each in changes.items() if (size := _steady_growth(each, thresholds.memory_growth_bytes))}
    if not grown:
        return
    keys = sorted(grown, key=lambda key: (-grown[key], key))
    ranks, most = sorted({rank for rank, _ in keys}), keys[0]
    events = _largest_sites(grids, most[0], most[1], "growth_bytes_per_iteration")
    count, reason = len(changes[most]), ""
    if count < _MANY_CHANGES:
        reason = "few_recorded"
    if not events and count + 1 >= 2 * _ENOUGH_CHANGES:
        reason = "site_unknown"
    devices = []
    for key in keys:
        capacity, held = _device_bytes(grids, *key), [row["allocated_bytes"] for row in recorded[key]]
        # Managed memory can hold more than the device does.
        left = max(capacity - held[-1], 0) / grown[key] if capacity else None
        devices.append(
            {
                "rank": key[0],
                "device": key[1],
                "growth_bytes_per_iteration": grown[key],
                "iterations": len(held),
                "first_bytes": held[0],
                "last_bytes": held[-1],
                "iterations_until_full": None if left is None else int(left),
                **_leak_severity(recorded[key], left),
            }
        )
    yield Evidence(
        ranks=ranks,
        measures={"devices": devices, "sites": [event.name for event in events]},
        title=["title", "full" if devices[0]["severity"] else ""],
        values={"most": grown[most], "lasting": _lasting(devices[0]), "recorded": count + 1},
        sure=(Confidence.medium if reason else Confidence.high, reason),
        events=events,
        severe=any(device["severity"] == "high" for device in devices),
    )


def _lasting(device: dict[str, Any]) -> str:
    """How long a device's memory lasts, in words."""
    seconds, left = device["seconds_until_full"] or 0.0, device["iterations_until_full"] or 0
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "s"))
    length, unit = next((each for each in units if seconds >= 2 * each[0]), units[-1])
    return f"{left:,} iterations, {seconds / length:.0f} {unit} at this rate"


def _leak_severity(recorded: Sequence[dict[str, Any]], iterations_left: float | None) -> dict[str, Any]:
    """How soon a device is full at this rate: `high` within an hour, `medium` within a day, else `low`; None if unknown."""
    times = np.array([row["end_ns"] for row in recorded if row["end_ns"] is not None])
    if iterations_left is None or len(times) < 2:
        return {"severity": None, "seconds_until_full": None}
    seconds = iterations_left * float(np.median(np.diff(times))) / 1e9
    return {"severity": "high" if seconds < 3600 else "medium" if seconds < 86400 else "low", "seconds_until_full": seconds}


def _steady_growth(changes: Sequence[int], threshold: int) -> float:
    """The median change per iteration; 0 unless most changes, and the last one, are above a threshold."""
    if len(changes) < _ENOUGH_CHANGES or changes[-1] <= threshold:
        return 0.0
    # The lower of two middle values: set-up in one of two changes is not growth.
    middle = float(np.sort(changes)[(len(changes) - 1) // 2])
    growing = sum(change > threshold for change in changes) >= _MOST * len(changes)
    return middle if growing and middle > threshold else 0.0


def _needless_growth(grids: Grids) -> dict[tuple[int, int], float]:
    """Growth per iteration of each device's reserved memory beyond its allocated memory, where it continues."""
    found = {}
    for key, rows in grouped(grids.facts.memory_growth.to_pylist(), "rank", "device").items():
        known = [row for row in rows if row["reserved_bytes"] is not None]
        # Both must grow: freed tensors add to free memory too, without taking more of the device.
        both = [row["reserved_bytes"] for row in known], [row["reserved_bytes"] - row["allocated_bytes"] for row in known]
        found[key] = min(_steady_growth(np.diff(amounts).tolist(), _PIECE_BYTES) for amounts in both)
    return found


def _failed_requests(grids: Grids) -> dict[tuple[int, int], int]:
    """Each device's largest request that failed although as much memory was reserved and free."""
    free = {
        (row["rank"], row["device"]): row["end_reserved_bytes"] - row["end_bytes"]
        for row in grids.facts.memory.to_pylist()
        if row["end_reserved_bytes"] is not None
    }
    failed: dict[tuple[int, int], int] = {}
    for row in grids.facts.out_of_memory.to_pylist():
        key, size = (row["rank"], row["device"]), row["requested_bytes"] or 0
        if 0 < size <= free.get(key, 0):
            failed[key] = max(size, failed.get(key, 0))
    return failed


def _device_bytes(grids: Grids, rank: int, device: int) -> int | None:
    """The size of a device's memory; None when no trace of the rank records it."""
    for info in grids.facts.every_info:
        if info.rank == rank and info.device_bytes:
            # A process that sees one device calls it 0, while nsys can number it as the host does.
            sizes = set(info.device_bytes.values())
            return info.device_bytes.get(device) or (sizes.pop() if len(sizes) == 1 else None)
    return None


def _largest_sites(grids: Grids, rank: int, device: int, column: str) -> list[Event]:
    """The allocation sites of a device with most bytes in a column, as events."""
    rows = [
        row
        for row in grids.facts.memory_sites.to_pylist()
        if row["rank"] == rank and row["device"] == device and (row[column] or 0) > 0
    ]
    rows.sort(key=lambda row: (-row[column], row["site"]))
    return [Event(rank, f"{row['site']}: {written('MB', row[column])}", count=row["allocations"]) for row in rows[:_SITES]]
