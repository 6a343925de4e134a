"""Findings: where the time went, who is to blame, what to change, and how sure that is. One module a finding.

A finding is a function from the analysis (`context.Context`) to evidence: `find(context) -> list[Finding]`, in the module named
for its id. Nothing found is a good answer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bridge_profiling.analysis.findings.context import Context
from bridge_profiling.analysis.findings.finding import PRECEDENCE, Confidence, Event, Finding
from bridge_profiling.analysis.findings.thresholds import Thresholds

if TYPE_CHECKING:
    from bridge_profiling.analysis.run import Run

__all__ = ["PRECEDENCE", "Confidence", "Context", "Event", "Finding", "Thresholds", "find_all"]


def find_all(run: Run, thresholds: Thresholds | None = None) -> list[Finding]:
    """Every finding about a run, the most time to get back first; without such a time last. None is a good answer.

    Args:
        run: whose captures are judged.
        thresholds: above or below what a number becomes a finding.
    """
    run.prefetch("idle_causes", "launch_statistics")
    context = Context(run, thresholds)
    found: list[Finding] = []
    # In the order of precedence, since each claims its time from what those before it left.
    for name in PRECEDENCE:
        found += importlib.import_module(f"{__name__}.{name}").find(context)
    return sorted(found, key=_most_to_get_back_first)


def _most_to_get_back_first(finding: Finding) -> tuple[bool, float, int]:
    recoverable = finding.recoverable_us_per_iteration
    return recoverable is None, -(recoverable or 0.0), PRECEDENCE.index(finding.id)
