"""Findings: where time is lost or memory is short, which ranks are responsible, what to change, and how certain that is.

A finding is a function of the grids, the thresholds and the ledger of attributed time, and returns the new ledger. An empty
list is a good answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bridge_profiling.findings import (
    bounds,
    collectives,
    communication,
    device_work,
    idle,
    iterations,
    kernels,
    memory,
    peers,
    ranks,
)
from bridge_profiling.findings.grids import Grids, JudgedFacts
from bridge_profiling.findings.ledger import Find, Ledger
from bridge_profiling.findings.types import Confidence, Event, Finding, Occurrence, Thresholds
from bridge_profiling.layout import name_ranks

__all__ = ["ORDER", "Confidence", "Event", "Finding", "Grids", "JudgedFacts", "Ledger", "Occurrence", "Thresholds", "find_all"]

# Most specific cause first: time without compute is attributed to the first finding whose evidence covers it.
_FINDINGS: tuple[Find, ...] = (
    idle.initialization,
    idle.data_loading,
    idle.recompilation,
    idle.garbage_collection,
    idle.allocator_churn,
    idle.host_sync,
    idle.pageable_copy,
    idle.checkpoint_stall,
    device_work.layout_conversion,
    device_work.unfused_attention,
    device_work.unfused_optimizer,
    device_work.full_precision_matmul,
    collectives.accumulation_sync,
    collectives.small_collectives,
    peers.contended_device,
    peers.uneven_work,
    ranks.straggler_compute,
    ranks.straggler_host,
    ranks.pipeline_bubble,
    communication.exposed_communication,
    communication.low_overlap,
    communication.unmatched_communication,
    idle.copy_bound,
    idle.host_pause,
    device_work.recomputation,
    idle.small_kernels,
    idle.host_launch_bound,
    kernels.dominant_kernel,
    idle.low_device_busy,
    iterations.slow_iterations,
    memory.memory_headroom,
    memory.memory_fragmentation,
    memory.memory_growth,
    iterations.profiler_overhead,
)

# Of trainings on CPUs.
_ON_HOST: tuple[Find, ...] = (
    idle.data_loading,
    idle.recompilation,
    idle.garbage_collection,
    idle.checkpoint_stall,
    ranks.late_on_cpus,
    iterations.slow_iterations,
    iterations.profiler_overhead,
)

_OF_UNREAD_DEVICES: tuple[Find, ...] = (iterations.slow_iterations, iterations.profiler_overhead)

#: Ids of findings: the names of their functions.
ORDER = tuple(find.__name__ for find in _FINDINGS)

#: Those that can explain slow iterations, and of these the ones with compute: a compiler tries kernels.
_NOT_SLOW = tuple(name for name in ORDER if name != iterations.slow_iterations.__name__)
_OF_COMPUTE = (ranks.straggler_compute.__name__, idle.recompilation.__name__)


def _about(grids: Grids) -> tuple[Find, ...]:
    if grids.has_device or not grids.facts.host_iterations.num_rows:
        return _FINDINGS
    # What a host waits for is unknown where a device works that is not read.
    return _OF_UNREAD_DEVICES if any(info.has_unread_events for info in grids.facts.infos) else _ON_HOST


def find_all(grids: Grids, thresholds: Thresholds | None = None) -> list[Finding]:
    """Every finding about a run, largest potential saving first, findings without one last."""
    ledger, found = Ledger.of(grids), []
    for find in _about(grids):
        findings, ledger = find(grids, thresholds or Thresholds(), ledger)
        found += findings
    if any(each.id == idle.initialization.__name__ and each.severe for each in found):
        found = [each for each in found if each.id.startswith(("memory_", "initialization"))]
    found = sorted(_within(grids, [bounds.bounded(grids, each) for each in _once(grids, found)]), key=_by_saving)
    return [_doubted(each, grids) for each in found]


def _doubted(finding: Finding, grids: Grids) -> Finding:
    """A finding with less confidence where ranks that may be a part of it are not judged, and low where their times are wrong.

    Memory has captures of its own.
    """
    if finding.id.startswith("memory_"):
        return finding
    confidence, reasons = finding.confidence, [finding.confidence_reason]
    if grids.facts.unjudged:
        confidence = confidence.lowered
        reasons.append(f"{name_ranks(grids.facts.unjudged)} lost too many device events to be judged")
    for doubt, doubted in grids.doubts.items():
        confidence = Confidence.low
        reasons.append(f"{doubt} ({name_ranks(doubted)})")
    return replace(finding, confidence=confidence, confidence_reason="; ".join(filter(None, reasons)))


def _once(grids: Grids, found: list[Finding]) -> list[Finding]:
    """The findings without slow iterations that others explain: all of them are iterations that these strike.

    Those that count in means compute more than the others, which few findings explain.
    """
    slow, counted = iterations.slow_iterations.__name__, set(grids.numbers)

    def explained(one: Finding) -> bool:
        if one.id != slow or not one.occurrence:
            return False
        numbers = set(one.occurrence.iterations)
        ids = _OF_COMPUTE if numbers <= counted else _NOT_SLOW
        return numbers <= {
            number for each in found if each.occurrence and each.id in ids for number in each.occurrence.iterations
        }

    return [each for each in found if not explained(each)]


def _within(grids: Grids, found: list[Finding]) -> Iterator[Finding]:
    """The findings, with savings that together are at most an iteration without the profiler.

    Slow iterations, and others that do not count, are longer than that: what they save comes on top.
    """
    left_us, counted = grids.iteration_us, set(grids.numbers)
    for finding in found:
        saving_us = finding.recoverable_us_per_iteration
        beyond = finding.occurrence is not None and not counted.issuperset(finding.occurrence.iterations)
        if saving_us is None or beyond or finding.id == iterations.slow_iterations.__name__:
            yield finding
        else:
            yield replace(finding, recoverable_us_per_iteration=min(saving_us, left_us))
            left_us = max(left_us - saving_us, 0.0)


def _by_saving(finding: Finding) -> tuple[bool, float, int]:
    saving_us = finding.recoverable_us_per_iteration
    return saving_us is None, -(saving_us or 0.0), ORDER.index(finding.id)
