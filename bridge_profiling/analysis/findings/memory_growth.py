"""Memory that grows from iteration to iteration: something is kept that should have been let go.

Judged by what is allocated at the end of iterations. Set-up in the first ones (optimizer states, workspaces) is no growth: it
has to go on, in the last change too, and in most of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.memory_recordings import device_bytes, largest_sites, megabytes

#: Fewer changes than this cannot tell growth from set-up.
_ENOUGH_CHANGES = 2

#: With as many changes and all alike, growth is certain.
_MANY_CHANGES = 5

#: Part of the changes that must be growth.
_MOST = 2 / 3

_ACTION = (
    "Something keeps a reference across iterations, at the allocation sites named: losses or metrics kept with their graph "
    "(keep loss.detach() or .item()), outputs appended to a list, a cache without a bound, hooks that hold activations. "
    "With train.manual_gc on, reference cycles wait for the next collection: lower train.manual_gc_interval."
)


def find(context: Context) -> list[Finding]:
    """One finding for all devices whose allocated memory grows by more than the threshold in a typical iteration.

    Args:
        context: of one run.
    """
    changes: dict[tuple[int, int], list[int]] = {}
    held: dict[tuple[int, int], list[int]] = {}
    for row in context.run.memory_growth().to_pylist():
        key = row["rank"], row["device"]
        held.setdefault(key, []).append(row["allocated_bytes"])
        if row["change_bytes"] is not None:
            changes.setdefault(key, []).append(row["change_bytes"])
    grown = {
        key: size for key, each in changes.items() if (size := steady_growth(each, context.thresholds.memory_growth_bytes))
    }
    if not grown:
        return []
    keys = sorted(grown, key=lambda key: (-grown[key], key))
    ranks = sorted({rank for rank, _ in keys})
    most = keys[0]
    events, known = _sites(context, *most)
    count = len(changes[most])
    confidence, reason = _confidence(count, known)
    return [
        Finding(
            id="memory_growth",
            title=f"Memory of {ranks_in_words(ranks, context.ranks)} grows by {megabytes(grown[most])} in each iteration",
            ranks=ranks,
            evidence={
                "devices": [_evidence(context, key, grown[key], held[key]) for key in keys],
                "sites": [event.name for event in events],
            },
            recoverable_us_per_iteration=None,
            confidence=confidence,
            confidence_reason=reason,
            action=_ACTION,
            events=events,
        )
    ]


def steady_growth(changes: list[int], threshold: int) -> float:
    """What an amount grows by from one iteration to the next; 0 when it does not keep growing by more than a threshold.

    Args:
        changes: from the end of each iteration to that of the next.
        threshold: bytes.
    """
    if len(changes) < _ENOUGH_CHANGES or changes[-1] <= threshold:
        return 0.0
    # The lower of two middle ones: set-up in one of two changes is no growth.
    middle = float(np.sort(changes)[(len(changes) - 1) // 2])
    growing = sum(change > threshold for change in changes) >= _MOST * len(changes)
    return middle if growing and middle > threshold else 0.0


def _evidence(context: Context, key: tuple[int, int], growth: float, held: list[int]) -> dict[str, Any]:
    capacity = device_bytes(context.run.infos, *key)
    return {
        "rank": key[0],
        "device": key[1],
        "growth_bytes_per_iteration": growth,
        "iterations": len(held),
        "first_bytes": held[0],
        "last_bytes": held[-1],
        "iterations_until_full": int((capacity - held[-1]) / growth) if capacity else None,
    }


def _sites(context: Context, rank: int, device: int) -> tuple[list[Event], bool]:
    events = largest_sites(context.run.memory_sites(), rank, device, "growth_bytes_per_iteration")
    return events, bool(events)


def _confidence(changes: int, sites: bool) -> tuple[Confidence, str]:
    if changes + 1 < 2 * _ENOUGH_CHANGES:
        return Confidence.medium, f"only {changes + 1} iterations are recorded"
    if not sites:
        return Confidence.medium, "which place allocates it is unknown: record a memory snapshot with stacks"
    if changes < _MANY_CHANGES:
        return Confidence.medium, f"only {changes + 1} iterations are recorded"
    return Confidence.high, ""
