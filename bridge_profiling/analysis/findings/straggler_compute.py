"""A rank that computes longer than the ranks that do the same work. They wait for it, and their waiting is its finding.

Compute is compared, never communication: whoever communicates longest is who waits. A kernel that runs beside communication is
slower for it, and a rank that waits has a communication kernel running all the while: half of the time that a rank overlaps
beyond its peers is not counted against it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge_profiling.analysis.findings.books import Grid
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.peers import beyond_peers, peers

#: At most this part of the time that compute runs beside communication is what the communication costs it.
_CONTENTION = 0.5

#: Kernels that a finding shows.
_KERNELS = 5

#: Slow ranks whose kernels it shows: those that are slow together mostly have the same cause.
_RANKS = 3

#: Part of what a rank has beyond its peers that a kernel must be to count: the rest is scatter.
_WORTH_SHOWING = 0.01

#: cuBLAS (nvjet, xmma, gemm), CUTLASS, cuDNN, Triton's and ROCm's matrix products.
_MATRIX_PRODUCT = re.compile(r"gemm|gemv|nvjet|xmma|cutlass|wgmma|matmul|\bmm_|_mm\b|splitk|Cijk_", re.IGNORECASE)

_MORE_WORK = (
    "Find why this rank has more to compute: sequences or packed batches of uneven length, experts that get more tokens "
    "(moe_aux_loss_coeff, moe_expert_capacity_factor), work done on one rank only (evaluation, logging, extra layers)."
)
_SLOWER = (
    "The same kernels take longer there: look at the GPU, not at the program. Compare clocks, power and temperature "
    "(nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE; bridge-profiling monitor), look for another process on it, and take the "
    "node out if it stays slow."
)


@dataclass(frozen=True)
class _Kernel:
    """What a rank has of a kernel beyond its peers, per iteration."""

    name: str
    extra_us: float
    extra_count: float
    of_count_us: float


def find(context: Context) -> list[Finding]:
    """One finding for all ranks whose compute exceeds their peers' by more than the threshold in a typical iteration.

    Args:
        context: of one run.
    """
    if len(context.ranks) < 2:
        return []
    sets = peers(context)
    excess = _excess(context, sets)
    typical = context.typical_us(excess)
    slow = [rank for rank in context.ranks if context.share(typical.get(rank, 0.0)) > context.thresholds.cause]
    if not slow:
        return []
    worst, *others = sorted(slow, key=lambda rank: -typical[rank])[:_RANKS]
    kernels = {rank: _kernels(context, sets, rank) for rank in (worst, *others)}
    chosen = np.array([rank in slow for rank in context.ranks])
    extra = sum(max(each.extra_us, 0.0) for each in kernels[worst])
    more = sum(max(each.of_count_us, 0.0) for each in kernels[worst])
    products = sum(each.extra_us for each in kernels[worst] if _MATRIX_PRODUCT.search(each.name))
    confidence, reason = _confidence(context, excess, slow)
    return [
        Finding(
            id="straggler_compute",
            title=_title(context, slow, typical[worst], products / extra if extra else 0.0),
            ranks=slow,
            evidence={
                "excess_compute_us": {str(rank): typical[rank] for rank in slow},
                "compute_us": {str(rank): value for rank, value in context.typical_us(context.compute_us).items()},
                "excess_compute_us_by_iteration": {str(rank): _column(context, excess, rank) for rank in slow},
                "of_matrix_products_us": products,
                "of_more_kernels_us": more,
                "of_slower_kernels_us": extra - more,
                "kernels": [_shown(each) for each in kernels[worst][:_KERNELS]],
            },
            recoverable_us_per_iteration=context.claim(np.where(chosen, excess, 0.0)),
            confidence=confidence,
            confidence_reason=reason,
            action=_MORE_WORK if more >= extra / 2 else _SLOWER,
            events=[
                Event(rank, each.name, duration_us=each.extra_us, count=max(round(each.extra_count), 1))
                for rank in kernels
                for each in kernels[rank][: max(_KERNELS // len(kernels), 1)]
            ],
        )
    ]


def _excess(context: Context, sets: list[list[int]]) -> Grid:
    """Compute beyond that of the peers, less what communication beside it can have cost."""
    excess = beyond_peers(context.compute_us, sets)
    if not context.iterations.num_rows:
        return excess
    overlapped = beyond_peers(context.grid(context.iterations, "overlapped_communication_us"), sets)
    return excess - _CONTENTION * np.nan_to_num(np.maximum(overlapped, 0.0))


def _kernels(context: Context, sets: list[list[int]], rank: int) -> list[_Kernel]:
    """Kernels of which a rank has more than its peers, the most first; of counts and times of whole captures."""
    mine = next(places for places in sets if context.ranks.index(rank) in places)
    others = [context.ranks[place] for place in mine if context.ranks[place] != rank]
    captured = _captured(context)
    by_name: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for row in context.run.kernels().to_pylist():
        if row["source"] == context.source and row["kind"] == "compute" and (row["rank"] == rank or row["rank"] in others):
            iterations = captured.get(row["rank"], 1)
            by_name[row["name"]][row["rank"]] = row["count"] / iterations, row["total_us"] / iterations
    found = []
    for name, ranks in by_name.items():
        count, total = ranks.get(rank, (0.0, 0.0))
        usual_count, usual = (float(np.median([ranks.get(other, (0.0, 0.0))[each] for other in others])) for each in (0, 1))
        each_us = usual / usual_count if usual_count else total / count if count else 0.0
        # More of them may be of other sizes: what the usual number of them would take is not theirs.
        more_us = total - usual if count > usual_count else (count - usual_count) * each_us
        found.append(_Kernel(name, total - usual, count - usual_count, more_us))
    found.sort(key=lambda each: (-each.extra_us, each.name))
    enough = _WORTH_SHOWING * sum(max(each.extra_us, 0.0) for each in found)
    return [each for each in found if each.extra_us > enough]


def _captured(context: Context) -> dict[int, int]:
    """Iterations in each rank's capture, boundary ones as well."""
    counts: dict[int, int] = defaultdict(int)
    for rank in context.iterations["rank"].to_pylist():
        counts[rank] += 1
    return counts


def _confidence(context: Context, excess: Grid, slow: list[int]) -> tuple[Confidence, str]:
    if context.numbers == [None]:
        return Confidence.low, "no iterations are marked: captures are compared as wholes, which can hold different work"
    confidence, reason = context.confidence()
    if confidence is not Confidence.high:
        return confidence, reason
    always = all(np.nanmin(excess[:, context.ranks.index(rank)]) > 0 for rank in slow)
    return (Confidence.high, "") if always else (Confidence.medium, "not in every captured iteration")


def _title(context: Context, slow: list[int], excess_us: float, products: float) -> str:
    longest = "up to " if len(slow) > 1 else ""
    mostly = ", most of it in matrix products" if products > 0.5 else ""
    computes = "compute" if len(slow) > 1 else "computes"
    who = ranks_in_words(slow, context.ranks).capitalize()
    return (
        f"{who} {computes} {longest}{excess_us / 1e3:.1f} ms longer than ranks with the same work in each {context.per}{mostly}"
    )


def _column(context: Context, grid: Grid, rank: int) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in grid[:, context.ranks.index(rank)]]


def _shown(kernel: _Kernel) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "extra_us_per_iteration": kernel.extra_us,
        "extra_count_per_iteration": kernel.extra_count,
        "matrix_product": bool(_MATRIX_PRODUCT.search(kernel.name)),
    }
