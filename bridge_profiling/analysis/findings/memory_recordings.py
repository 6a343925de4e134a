"""What the findings about memory have in common: how large a device is, and allocation sites as events."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from bridge_profiling.analysis.findings.finding import Event
from bridge_profiling.traces.types import RankInfo

#: Sites that a finding shows.
_SITES = 5


def device_bytes(infos: Sequence[RankInfo], rank: int, device: int) -> int | None:
    """The memory of a rank's device; None when no trace of that rank tells it.

    Args:
        infos: what is known of the traces.
        rank: global rank.
        device: its number in the process.
    """
    for info in infos:
        if info.rank == rank and info.device_bytes:
            found = info.device_bytes.get(device)
            # A process that sees one device calls it 0, while nsys can number it as the machine does.
            alike = set(info.device_bytes.values())
            return found or (alike.pop() if len(alike) == 1 else None)
    return None


def largest_sites(sites: pa.Table, rank: int, device: int, column: str) -> list[Event]:
    """The allocation sites of a device with the most bytes in a column, largest first; those with none are left out.

    Args:
        sites: `Run.memory_sites`.
        rank: global rank.
        device: its number in the process.
        column: bytes_at_peak, end_bytes or growth_bytes_per_iteration.
    """
    rows = [row for row in sites.to_pylist() if row["rank"] == rank and row["device"] == device and (row[column] or 0) > 0]
    rows.sort(key=lambda row: (-row[column], row["site"]))
    return [Event(rank, f"{row['site']}: {megabytes(row[column])}", count=row["allocations"]) for row in rows[:_SITES]]


def gigabytes(size: float) -> str:
    """Bytes as a sentence names large amounts."""
    return f"{size / 1e9:.1f} GB"


def megabytes(size: float) -> str:
    """Bytes as a sentence names an iteration's."""
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else gigabytes(size)
