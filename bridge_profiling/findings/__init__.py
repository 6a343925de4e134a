"""Findings: where time is lost or memory is short, which ranks are responsible, what to change, and how certain that is.

A rule detects evidence in the grids, the thresholds and the time that earlier rules left; `diagnose` bounds and caps what it
saves, and puts it into words last. An empty list is a good answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
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
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.rule import About, Evidence, Rule
from bridge_profiling.findings.types import Confidence, Event, Finding, Occurrence, Thresholds, text
from bridge_profiling.findings.unprofiled import Unprofiled, usual_cost_ns
from bridge_profiling.layout import name_ranks

__all__ = [
    "ORDER",
    "RULES",
    "About",
    "Confidence",
    "Event",
    "Evidence",
    "Finding",
    "Grids",
    "JudgedFacts",
    "Ledger",
    "Occurrence",
    "Rule",
    "Thresholds",
    "bounds",
    "diagnose",
    "without_profiler",
]

_HOSTS = About.devices | About.cpus
_ALL = _HOSTS | About.unread_devices
_NO_TIME = "it costs no time of an iteration"

#: Most specific cause first: time without compute is attributed to the first rule whose evidence covers it.
RULES: tuple[Rule, ...] = (
    Rule("initialization", idle.initialization, "later iterations do not have it"),
    Rule("data_loading", idle.data_loading, bounds.ranges, _HOSTS),
    Rule("recompilation", idle.recompilation, bounds.ranges, _HOSTS),
    Rule("garbage_collection", idle.garbage_collection, bounds.ranges, _HOSTS),
    Rule("allocator_churn", idle.allocator_churn, bounds.calls),
    Rule("host_sync", idle.host_sync, bounds.calls),
    Rule("pageable_copy", idle.pageable_copy, bounds.calls),
    Rule("checkpoint_stall", idle.checkpoint_stall, bounds.calls, _HOSTS),
    Rule("layout_conversion", device_work.layout_conversion, bounds.kernels),
    Rule("unfused_attention", device_work.unfused_attention, bounds.kernels),
    Rule("unfused_optimizer", device_work.unfused_optimizer, bounds.kernels),
    Rule("full_precision_matmul", device_work.full_precision_matmul, bounds.kernels),
    Rule("accumulation_sync", collectives.accumulation_sync, bounds.collectives),
    Rule("small_collectives", collectives.small_collectives, bounds.collectives),
    Rule("contended_device", peers.contended_device, bounds.device),
    Rule("uneven_work", peers.uneven_work, bounds.uneven),
    Rule("straggler_compute", ranks.straggler_compute, bounds.slow_ranks),
    Rule("straggler_host", ranks.straggler_host, bounds.slow_ranks),
    Rule("straggler_host", ranks.late_on_cpus, bounds.slow_ranks, About.cpus),
    Rule("pipeline_bubble", ranks.pipeline_bubble, bounds.stages),
    Rule("exposed_communication", communication.exposed_communication, bounds.communication),
    Rule("low_overlap", communication.low_overlap, bounds.communication),
    Rule("unmatched_communication", communication.unmatched_communication, bounds.communication),
    Rule("copy_bound", idle.copy_bound, bounds.launching),
    Rule("host_pause", idle.host_pause, bounds.launching),
    Rule("recomputation", device_work.recomputation, bounds.kernels),
    Rule("small_kernels", idle.small_kernels, bounds.launching),
    Rule("host_launch_bound", idle.host_launch_bound, bounds.launching),
    Rule("dominant_kernel", kernels.dominant_kernel, "whether the kernel can be faster is unknown"),
    Rule("low_device_busy", idle.low_device_busy, bounds.launching),
    Rule("slow_iterations", iterations.slow_iterations, bounds.slow_iterations, _ALL),
    Rule("memory_headroom", memory.memory_headroom, _NO_TIME),
    Rule("memory_fragmentation", memory.memory_fragmentation, _NO_TIME),
    Rule("memory_growth", memory.memory_growth, _NO_TIME),
    Rule("profiler_overhead", iterations.profiler_overhead, "it costs nothing outside the window", _ALL),
)

#: Ids of findings.
ORDER = tuple(dict.fromkeys(rule.id for rule in RULES))


def _about(grids: Grids) -> About:
    if grids.has_device or not grids.facts.host_iterations.num_rows:
        return About.devices
    return About.unread_devices if any(info.has_unread_events for info in grids.facts.infos) else About.cpus


def diagnose(grids: Grids, thresholds: Thresholds | None = None, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Every finding about a run, largest potential saving first, findings without one last."""
    ledger, about, found = Ledger.of(grids), _about(grids), list[Evidence]()
    for rule in rules:
        trial = copy(ledger)
        detected = list(rule.detect(grids, thresholds or Thresholds(), trial)) if about in rule.about else []
        if detected:
            ledger = trial
        found += [replace(each, id=rule.id, texts=rule.texts, bound=rule.bound) for each in detected]
    if any(each.id == "initialization" and each.severe for each in found):
        found = [each for each in found if each.id.startswith(("memory_", "initialization"))]
    found = _once(grids, found)
    limits = [bounds.at_most_ns(grids, each) for each in found]
    found = list(_within(grids, found))
    iteration_ns = _mean_iteration_ns(grids, ((each.id, each.saving_ns, each.occurrence) for each in found))
    findings = [each.finding(grids, iteration_ns, limit) for each, limit in zip(found, limits, strict=True)]
    order = [rule.id for rule in rules]
    return [_doubted(each, grids) for each in sorted(findings, key=lambda each: _by_saving(each, order))]


def _mean_iteration_ns(grids: Grids, found: Iterable[tuple[str, float | None, Occurrence | None]]) -> float:
    """A mean iteration of the job without the profiler, slow ones included: what every share refers to.

    Args:
        found: id, saving and occurrence of each finding. The grids' mean lacks slow iterations that manifests time, and those
            captured ones that do not count.
    """
    return grids.iteration_ns + sum(
        saving_ns or 0.0 for id, saving_ns, struck in found if (_beyond(grids, struck) if struck else id == "slow_iterations")
    )


def _beyond(grids: Grids, struck: Occurrence) -> bool:
    """Whether a cause strikes iterations that do not count."""
    return not set(grids.numbers).issuperset(struck.iterations)


def without_profiler(grids: Grids, findings: Sequence[Finding]) -> Unprofiled | None:
    """The mean iteration without the profiler, which shares of savings refer to; None without iterations."""
    if not grids.numbers or grids.per == "capture":
        return None
    profiler, measured_ns = grids.profiler, usual_cost_ns(grids.timed_iterations)
    iteration_ns = _mean_iteration_ns(
        grids, ((each.id, each.recoverable_ns_per_iteration, each.occurrence) for each in findings)
    )
    return Unprofiled(iteration_ns, profiler.source, measured_ns, profiler.estimated_ns)


def _doubted(finding: Finding, grids: Grids) -> Finding:
    """A finding with less confidence where ranks that may be a part of it are not judged, and low where their times are wrong.

    Memory has captures of its own.
    """
    if finding.id.startswith("memory_"):
        return finding
    confidence, reasons = finding.confidence, [finding.confidence_reason]
    if grids.facts.unjudged:
        confidence = confidence.lowered
        reasons.append(text("reasons", "unjudged", which=name_ranks(grids.facts.unjudged)))
    for doubt, doubted in grids.doubts.items():
        confidence = Confidence.low
        reasons.append(text("reasons", "doubted", doubt=doubt, which=name_ranks(doubted)))
    return replace(finding, confidence=confidence, confidence_reason="; ".join(filter(None, reasons)))


def _once(grids: Grids, found: list[Evidence]) -> list[Evidence]:
    """The findings without slow iterations that others explain: all of them are iterations that these strike.

    Those that count in means compute more than the others, which only a compiler explains that tries kernels.
    """
    counted = set(grids.numbers)

    def explained(one: Evidence) -> bool:
        if one.id != "slow_iterations" or not one.occurrence:
            return False
        numbers = set(one.occurrence.iterations)
        of_compute = numbers <= counted
        others = [each for each in found if (each.id == "recompilation" if of_compute else each.id != one.id)]
        return numbers <= {number for each in others if each.occurrence for number in each.occurrence.iterations}

    return [each for each in found if not explained(each)]


def _within(grids: Grids, found: list[Evidence]) -> Iterator[Evidence]:
    """What was found, with savings that together are at most an iteration without the profiler.

    Slow iterations, and others that do not count, are longer than that: what they save comes on top.
    """
    left_ns = grids.iteration_ns
    for each in found:
        beyond = each.occurrence is not None and _beyond(grids, each.occurrence)
        if each.saving_ns is None or beyond or each.id == "slow_iterations":
            yield each
        else:
            yield replace(each, saving_ns=min(each.saving_ns, left_ns))
            left_ns = max(left_ns - each.saving_ns, 0.0)


def _by_saving(finding: Finding, order: Sequence[str]) -> tuple[bool, float, int]:
    saving_ns = finding.recoverable_ns_per_iteration
    return saving_ns is None, -(saving_ns or 0.0), order.index(finding.id)
