"""Findings about trainings on CPUs that those about devices do not cover."""

from __future__ import annotations

import numpy as np

from bridge_profiling.facts.parts import ENOUGH_ITERATIONS
from bridge_profiling.findings import idle
from bridge_profiling.findings.evidence import Evidence
from bridge_profiling.findings.ledger import Found, Ledger
from bridge_profiling.findings.types import Confidence, Finding, Thresholds, advice, by_rank, ms

#: Parts of an iteration, in words. Data loading and saving have findings of their own.
_SPENT = {"operators_us": "in operators", "other_us": "in Python between operators", "communication_us": "in transfers"}

#: CPUs that other processes use too make a rank late by chance: it must be the latest this often, by this share.
_OFTEN, _LATE = 0.75, 0.2


def host_pause(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """The host of a training on one rank records nothing for long. Of several ranks, the one that is late matters."""
    return ([], ledger) if len(evidence.ranks) > 1 else idle.host_pause(evidence, thresholds, ledger)


def straggler_host(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """A rank that takes longer than the others, which wait for it in collectives, beyond its data loading and saving."""
    if len(evidence.ranks) < 2 or evidence.per == "capture":
        return [], ledger
    parts = {column: np.nan_to_num(evidence.grid(evidence.host_iterations, column)) for column in _SPENT}
    own = sum(parts.values(), np.zeros_like(evidence.duration_us))
    late = int(own.mean(axis=0).argmax())
    others = np.delete(own, late, axis=1).max(axis=1)
    excess_us = float(np.mean(own[:, late] - others))
    waiting_us = float(np.delete(np.nan_to_num(evidence.waiting_us), late, axis=1).min(axis=1).mean())
    # All of this is measured with the profiler, which makes every part longer.
    unprofiled = min(evidence.iteration_us / evidence.captured_iteration_us, 1.0) if evidence.captured_iteration_us else 1.0
    saving_us = unprofiled * min(excess_us, waiting_us)
    few = len(evidence.numbers) < ENOUGH_ITERATIONS
    if np.mean(own[:, late] > others) < _OFTEN or saving_us < _LATE * evidence.iteration_us:
        return [], ledger
    rank, rest = evidence.ranks[late], {name: np.delete(grid, late, axis=1).mean() for name, grid in parts.items()}
    longer = {name: float(grid[:, late].mean() - rest[name]) for name, grid in parts.items()}
    most = max(longer, key=lambda name: longer[name])
    finding = Finding(
        id="straggler_host",
        title=f"Rank {rank} takes {ms(excess_us)} longer per iteration than the other ranks, mostly {_SPENT[most]}",
        ranks=[rank],
        evidence={
            "own_us": by_rank(dict(zip(evidence.ranks, own.mean(axis=0).tolist(), strict=True))),
            "waiting_us": by_rank(evidence.mean_us(evidence.waiting_us)),
            "beyond_other_ranks_us": {name.removesuffix("_us"): round(time_us, 3) for name, time_us in longer.items()},
        },
        confidence=Confidence.low if few else Confidence.medium,
        confidence_reason="the profiler slows the hosts of ranks differently",
        action=advice("straggler_host", "on_host"),
        recoverable_us_per_iteration=saving_us,
    )
    return [finding], ledger
