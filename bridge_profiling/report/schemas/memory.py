"""The document of `memory --json`, which `report.memory_view.dumps` makes."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from bridge_profiling.report.schemas.comparison import SiteChange
from bridge_profiling.report.schemas.run import DeviceMemory
from bridge_profiling.report.schemas.units import Bytes, Count, MeanBytes, Nanoseconds, Rank, doc


class Site(TypedDict):
    """Memory of one allocation site on one device."""

    rank: Annotated[Rank, doc("Global rank")]
    device: Annotated[int, doc("Number of the device in the process")]
    site: Annotated[str, doc("The allocation site")]
    allocations: Annotated[Count, doc("Number of allocations")]
    allocated_bytes: Annotated[Bytes, doc("Sum of all allocations")]
    peak_bytes: Annotated[Bytes, doc("Most memory at a time")]
    bytes_at_peak: Annotated[Bytes, doc("Memory at the device's peak")]
    end_bytes: Annotated[Bytes, doc("Memory at the end")]
    growth_bytes_per_iteration: Annotated[
        MeanBytes | None, doc("Median growth between the ends of two iterations; null with fewer than two iterations")
    ]


class IterationEnd(TypedDict):
    """Memory of a device at the end of an iteration."""

    rank: Annotated[Rank, doc("Global rank")]
    device: Annotated[int, doc("Number of the device in the process")]
    iteration: Annotated[int | None, doc("Number of the iteration; null if its end is inferred")]
    end_ns: Annotated[Nanoseconds, doc("Time on the rank's clock")]
    allocated_bytes: Annotated[Bytes, doc("Memory allocated")]
    change_bytes: Annotated[Bytes | None, doc("Change since the iteration before; null for the first")]
    reserved_bytes: Annotated[Bytes | None, doc("Memory reserved by the allocator; null if unknown")]


class RunMemory(TypedDict):
    """Device memory of one run."""

    path: Annotated[str, doc("Path of the run")]
    devices: Annotated[list[DeviceMemory], doc("By rank and device")]
    sites: Annotated[list[Site], doc("By allocation site, the largest at the peak first; empty without a snapshot")]
    growth: Annotated[list[IterationEnd], doc("At the end of each iteration")]
    limitations: Annotated[list[str], doc("Sentences: what these captures cannot show")]


class MemoryDocument(TypedDict):
    """Device memory of one run, or of two, as `bridge-profiling memory A [B] --json` prints it."""

    schema_version: Annotated[Literal[1], doc("Keys may be added; within a version none changes its meaning")]
    runs: Annotated[list[RunMemory], doc("One or two runs")]
    difference: Annotated[list[SiteChange], doc("By allocation site, the largest change first; empty for one run")]
