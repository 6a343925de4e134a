"""What a finding is: a judgement with its evidence, what to change, and what that could give back at the most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

#: Ids, from the most specific cause to the least: a millisecond without compute belongs to the first whose evidence covers it.
PRECEDENCE = (
    "data_loading",
    "host_sync",
    "pageable_copy",
    "checkpoint_stall",
    "straggler_compute",
    "straggler_host",
    "pipeline_bubble",
    "exposed_communication",
    "low_overlap",
    "copy_bound",
    "small_kernels",
    "host_launch_bound",
    "dominant_kernel",
    "low_device_busy",
    "slow_iterations",
    "memory_headroom",
    "memory_fragmentation",
    "memory_growth",
    "profiler_overhead",
)


class Confidence(StrEnum):
    """How sure a finding is."""

    high = "high"
    medium = "medium"
    low = "low"


@dataclass(frozen=True)
class Event:
    """One thing in the captures that shows a finding, so that a reader can go and look.

    Args:
        rank: whose capture holds it.
        name: of the kernel, operator, range or allocation site.
        iteration: in which it lies; None when in none, or in several.
        start_ns: on the rank's clock, of the longest where it stands for many; None where that is not known.
        duration_us: of one, or of all that it stands for.
        count: how many it stands for.
    """

    rank: int
    name: str
    iteration: int | None = None
    start_ns: int | None = None
    duration_us: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Finding:
    """A cause of lost time or of memory trouble.

    Args:
        id: one of `PRECEDENCE`.
        title: one sentence with the number that matters: "Data loading holds all 4 ranks for 121 ms of each iteration".
        ranks: to blame, ascending; not those that suffer from it.
        evidence: numbers by name, units in the names.
        events: what shows it, the most telling first; a few.
        recoverable_us_per_iteration: at the most, what an iteration of the whole job would be shorter without it: from
            critical-path time that no other finding claims, never from summed kernel time. None where it costs no time, or how
            much cannot be told.
        confidence: how sure it is.
        confidence_reason: why not surer; "" when high.
        action: what to change; for Megatron the settings by name.
        severe: past the threshold for trouble, not for attention alone.
    """

    id: str
    title: str
    ranks: list[int]
    evidence: Mapping[str, Any]
    recoverable_us_per_iteration: float | None
    confidence: Confidence
    action: str
    confidence_reason: str = ""
    events: list[Event] = field(default_factory=list)
    severe: bool = False
