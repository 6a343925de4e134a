"""How evidence is drawn: an event that stands for many is as long as the mean of them, where the longest of them begins."""

from __future__ import annotations

from bridge_profiling.analysis.findings import Event


def length_ns(event: Event) -> int:
    """How long one of the things is that an event stands for; 0 when that is not known.

    Args:
        event: of a finding.
    """
    return int((event.duration_us or 0.0) * 1e3 / max(event.count, 1))
