"""Findings about devices that do not compute: each takes what earlier findings left of one cause of non-compute time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from bridge_profiling.facts.host_ranges import COPIES, NOTHING_RECORDED
from bridge_profiling.facts.idle import SEVERAL, Cause
from bridge_profiling.facts.kernels import LAUNCH_NS
from bridge_profiling.findings import device_work
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.rule import Evidence, Loss, attributed, evidence_of, of_cause, pauses_are_short, responsible
from bridge_profiling.findings.types import Confidence, Thresholds, by_rank, text

#: From this share of a typical iteration in initialization on, nothing else is judged: what follows the setting up is as slow
#: as first calls are.
_MOSTLY = 0.5

#: Ranks that launch this share fewer kernels do less.
_AS_MANY = 0.1

#: Fewer synchronizations than `SEVERAL` are a finding at twice the threshold.
_OF_FEW = 2.0

#: Advice for certain calls: a part of the event's name, and the entry in text.toml.
_CALLS = {"cudaDeviceSynchronize": "cudaDeviceSynchronize", "aten::nonzero": "nonzero"}

#: Causes of idle time that are not of the rank's own host.
_OF_OTHERS = (
    *(Cause.profiler, Cause.starved_beside_communication, Cause.blocked_by_communication),
    *(Cause.blocked_by_copy, Cause.blocked_by_device_copy),
)
_OWN = tuple(cause for cause in Cause if cause not in _OF_OTHERS)


def initialization(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """The driver and libraries are set up within the capture. Later iterations do not have that, so nothing can be saved."""
    lost_ns = grids.idle_ns(Cause.initialization)
    mean_ns = grids.mean_ns(lost_ns)
    share = max(mean_ns.values(), default=0.0) / (grids.captured_iteration_ns or np.inf)
    if share < thresholds.cause or not grids.has_device:
        return
    ranks = responsible(mean_ns)
    typical = np.nan_to_num(lost_ns / grids.duration_ns).max(axis=1)
    mostly = float(np.median(typical)) >= _MOSTLY
    yield Evidence(
        ranks=ranks,
        measures={"share_of_capture": round(share, 4), "idle_ns": by_rank(mean_ns)},
        title=["mostly" if mostly else "partly", "title", "of_each" if grids.per == "iteration" else ""],
        values={"longest": max(mean_ns.values())},
        sure=(Confidence.high, ""),
        events=grids.events(Cause.initialization, ranks=ranks),
        severe=mostly,
    )


@of_cause(Cause.data_loading, at_least="data_loading", in_ranges=True)
def data_loading(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence:
    """The launching thread waits for its next batch. Loading while the device computes costs nothing and does not count."""
    measures = {"in_data_loading_ns": by_rank(loss.host_ns)}
    return evidence_of(grids, loss, measures, severe=3 * thresholds.data_loading)


def host_sync(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Hosts wait for their device and then launch too late: the device's idle time afterwards counts, not the wait."""
    cause = Cause.host_sync
    calls = grids.mean_ns(grids.of_cause(cause, "calls"))
    number = max(calls.values(), default=0.0)
    factor = _OF_FEW if number < SEVERAL else 1.0
    lost_ns, causes = ledger.left_ns(cause), [cause]
    if number < SEVERAL:
        lost_ns = lost_ns - device_work.after_waits_in_sweeps_ns(grids, thresholds, ledger)
    if number >= thresholds.synchronizations:
        # A host that waits so often starts again each time. Where it takes longer than in its fastest iteration to launch the
        # same, it would have been ahead without the waits.
        launching_ns = ledger.left_ns(Cause.host_launch)
        fastest_ns = np.nan_to_num(launching_ns, nan=np.inf).min(axis=0)
        lost_ns = lost_ns + launching_ns - fastest_ns
        causes += [Cause.host_launch, Cause.small_kernels, Cause.dependency_stalled]
    loss = attributed(grids, ledger, lost_ns, causes, thresholds.cause * factor)
    if loss is None:
        return
    # Ranks that synchronize as often are as responsible, also those that lose less because they wait for others.
    # How many of a rank's waits stall its device is partly chance.
    alike = {rank: time_ns for rank, time_ns in loss.lost_ns.items() if calls.get(rank, 0.0) > 0}
    ranks = sorted({*responsible(calls), *responsible(alike)}) or loss.ranks
    names = {event.name for event in grids.events(cause, ranks=ranks)}
    yield evidence_of(
        grids,
        loss,
        {
            "host_waits_ns": by_rank(grids.mean_ns(grids.of_cause(cause, "host_ns"))),
            "synchronizations": by_rank(calls, 2),
        },
        lost="idle_after_ns",
        ranks=ranks,
        title=["title" if round(number) != 1 else "once"],
        advice=["few" if number < SEVERAL else "", "default"]
        + [entry for call, entry in _CALLS.items() if any(call in name for name in names)],
        severe=0.25,
    )


@of_cause(Cause.pageable_copy)
def pageable_copy(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence:
    """Copies of pageable host memory: they block the host until staged, and reach a fraction of the link's bandwidth."""
    measures = {
        "host_held_ns": by_rank(grids.mean_ns(grids.of_cause(Cause.pageable_copy, "host_ns"))),
        "copies": _copies(grids, loss.ranks, pageable=True),
    }
    return evidence_of(grids, loss, measures, lost="lost_ns")


@of_cause(Cause.checkpoint_stall, in_ranges=True, left_out=True)
def checkpoint_stall(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence:
    """Devices idle while a checkpoint is saved, within iterations or between them."""
    saving = np.nanmax(grids.in_ranges_ns(Cause.checkpoint_stall), axis=1)
    measures = {
        "in_checkpoint_ns": by_rank(loss.host_ns),
        "iterations": [number for number, time_ns in zip(grids.numbers, saving.tolist(), strict=True) if time_ns > 0],
        "iterations_captured": len(grids.numbers),
    }
    found = evidence_of(grids, loss, measures, doubts=["save_interval"])
    if found.events and all(event.name == COPIES for event in found.events):
        found = replace(
            found, sure=(Confidence.low, "saving_inferred"), doubts=[grids.confidence(of_host=True)[1], *found.doubts]
        )
    return found


@of_cause(Cause.garbage_collection, in_ranges=True, left_out=True)
def garbage_collection(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence:
    """Python collects garbage on the launching thread, and the device runs out of work."""
    measures = {
        "in_garbage_collection_ns": by_rank(loss.host_ns),
        "collections": by_rank(grids.mean_ns(grids.of_cause(loss.cause, "calls")), 2),
    }
    return evidence_of(grids, loss, measures)


@of_cause(Cause.recompilation, in_ranges=True, left_out=True)
def recompilation(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence:
    """torch.compile compiles within the window, because shapes, types or guarded values change."""
    measures = {
        "in_compilation_ns": by_rank(loss.host_ns),
        "compilations": by_rank(grids.mean_ns(grids.of_cause(loss.cause, "calls")), 2),
    }
    return evidence_of(grids, loss, measures, severe=0.25)


@of_cause(Cause.allocator_churn)
def allocator_churn(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence:
    """The allocator gets memory from the driver and gives it back, which holds the host and waits for the device."""
    host, calls = (grids.mean_ns(grids.of_cause(loss.cause, name)) for name in ("host_ns", "calls"))
    # Ranks that call as often are as responsible, also those that lose less because they wait for others.
    ranks = responsible(calls)
    names = {event.name for event in grids.events(loss.cause, ranks=ranks)}
    pinned = any("Host" in name for name in names) and not any("cudaMalloc" in name or "cudaFree " in name for name in names)
    measures = {"in_calls_ns": by_rank(host), "calls": by_rank(calls, 2)}
    return evidence_of(grids, loss, measures, ranks=ranks, advice=["pinned" if pinned else "default"])


@of_cause(Cause.host_pause)
def host_pause(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence | None:
    """The host launches and calls nothing for a while: only stacks, or the program's own ranges, show what it does instead."""
    if not grids.has_device:
        return None
    by_name = grids.by_range(loss.cause)
    where, spent_ns = max(by_name.items(), key=itemgetter(1), default=("", 0.0))
    if 2 * spent_ns > sum(by_name.values()) and where != NOTHING_RECORDED:
        return evidence_of(grids, loss, {}, title=["in_range"], advice=["named"], values={"where": where})
    return evidence_of(
        grids,
        loss,
        {},
        sure=(Confidence.low, grids.confidence(of_host=True)[1]),
        doubts=["unrecorded_pauses"],
        advice=["many" if pauses_are_short(grids, loss.ranks) else "", "default"],
    )


@of_cause(Cause.blocked_by_copy)
def copy_bound(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence:
    """Compute waits for copies of pinned memory."""
    measures = {"copies": _copies(grids, loss.ranks, pageable=False)}
    return evidence_of(grids, loss, measures, lost="blocked_ns", sure=grids.confidence())


@of_cause(Cause.small_kernels)
def small_kernels(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence:
    """Runs of kernels so short that the host cannot launch them as fast as the device finishes them."""
    ranks = _launching_as_many(grids, loss.ranks)
    return evidence_of(grids, loss, _launches(grids, ranks), ranks=ranks, values={"launch_us": LAUNCH_NS / 1e3})


@of_cause(Cause.host_launch)
def host_launch_bound(grids: Grids, thresholds: Thresholds, loss: Loss) -> Evidence | None:
    """Devices wait for launches for no more specific reason: Python, the framework, garbage collection, the CPU."""
    if not grids.has_device:
        return None
    starved = grids.mean_ns(grids.idle_ns(loss.cause))
    profiler_ns = max(grids.profiler_of_host_ns.values(), default=0.0)
    differ = max(starved.values()) - min(starved.values()) > profiler_ns
    late = responsible(starved) if differ else grids.ranks
    measures = {"idle_ns": by_rank(starved), "profiler_ns": by_rank(grids.profiler_ns), **_launches(grids, late)}
    besides = max(starved.values()) > max(loss.lost_ns.values()) + 1_000
    return evidence_of(grids, loss, measures, title=["title", "besides" if besides else ""], ranks=late, severe=0.30)


def low_device_busy(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Devices run no kernel, copy or memset for much of an iteration; saves time only when no finding names a cause."""
    busy = _busy(grids) if grids.has_device else {}
    low = sorted(rank for rank, share in busy.items() if share < thresholds.device_busy)
    if not low:
        return
    idle = {cause: grids.mean_ns(grids.idle_ns(cause)) for cause in _OWN}
    least = min(low, key=lambda rank: busy[rank])
    main, *others = sorted(_OWN, key=lambda cause: -idle[cause].get(least, 0.0))
    # In addition to findings about causes, the rest is many small losses, which no single change recovers.
    alone = ledger.is_empty
    loss = attributed(grids, ledger, ledger.left_ns(*_OWN), _OWN, 0.0) if alone else None
    yield Evidence(
        ranks=low,
        measures={
            "busy_share": by_rank(busy, 4),
            "idle_ns": {str(cause): by_rank({rank: idle[cause][rank] for rank in low}) for cause in (main, *others[:3])},
        },
        saving_ns=loss.saving_ns if loss else None,
        advice=["alone" if alone else "follow", "where"],
        values={
            "rank": least,
            "busy": busy[least],
            "lost": idle[main].get(least, 0.0),
            "waits_for": text("waits_for", main),
        },
        sure=grids.confidence(of_host=main is not Cause.dependency_stalled),
        events=grids.events(main, ranks=responsible({rank: idle[main].get(rank, 0.0) for rank in low})),
        severe=busy[least] < thresholds.device_busy_severe,
    )


def _busy(grids: Grids) -> dict[int, float]:
    """The share of an iteration without the profiler's cost in which each device is busy."""
    if grids.facts.iterations.num_rows:
        busy = grids.duration_ns - grids.grid("iterations", "idle_ns")
        return grids.typical_ns(busy / np.maximum(np.maximum(grids.duration_ns - grids.profiler.cost_ns, busy), 1e-9))
    return {row["rank"]: row["busy_ns"] / row["span_ns"] for row in grids.facts.breakdown.to_pylist() if row["span_ns"]}


def _copies(grids: Grids, ranks: Sequence[int], *, pageable: bool) -> list[dict[str, Any]]:
    """Kinds of copies over the whole capture, most time first."""
    rows = [
        row
        for row in grids.facts.copies.to_pylist()
        if row["kind"] == "memcpy" and row["rank"] in ranks and (row["host_memory"] == "pageable") == pageable
    ]
    rows.sort(key=lambda row: (-row["total_ns"], row["rank"]))
    names = ("rank", "direction", "host_memory", "count", "bytes", "total_ns", "bandwidth_gbs")
    return [{name: row[name] for name in names} for row in rows[:8]]


def _launching_as_many(grids: Grids, ranks: Sequence[int]) -> list[int]:
    """Some ranks, and those that launch as many kernels: which of them idles, and which waits for it, is chance."""
    count = grids.typical_ns(grids.grid("launch_statistics", "kernel_count"))
    least = (1 - _AS_MANY) * min((count.get(rank, 0.0) for rank in ranks), default=0.0)
    return sorted({*ranks, *(rank for rank in grids.ranks if count.get(rank, -1.0) >= least)})


def _launches(grids: Grids, ranks: Sequence[int]) -> dict[str, Any]:
    """Kernels of a typical iteration and the cost of launching them."""
    found = {}
    for name in ("kernel_count", "mean_kernel_ns", "launch_call_ns", "graph_kernel_count"):
        values = grids.typical_ns(grids.grid("launch_statistics", name))
        found[name] = by_rank({rank: values[rank] for rank in ranks if rank in values}, 3)
    return found
