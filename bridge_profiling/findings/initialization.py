"""The finding about captures of a program's start, whose times say nothing about the iterations that follow."""

from __future__ import annotations

import numpy as np

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings.evidence import Evidence
from bridge_profiling.findings.ledger import Found, Ledger
from bridge_profiling.findings.losses import responsible
from bridge_profiling.findings.types import Confidence, Finding, Thresholds, advice, by_rank, ms, ranks_in_words

#: From this share of a typical iteration on, nothing else is judged: what follows the setting up is as slow as first calls are.
_MOSTLY = 0.5


def initialization(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """The driver and libraries are set up within the capture. Later iterations do not have that, so nothing can be saved."""
    lost_us = evidence.idle_us(Cause.initialization)
    mean_us = evidence.mean_us(lost_us)
    share = max(mean_us.values(), default=0.0) / (evidence.captured_iteration_us or np.inf)
    if share < thresholds.cause or not evidence.has_device:
        return [], ledger
    ranks = responsible(mean_us)
    typical = np.nan_to_num(lost_us / evidence.duration_us).max(axis=1)
    mostly = float(np.median(typical)) >= _MOSTLY
    what = f"is mostly initialization ({share:.0%})" if mostly else f"contains initialization ({share:.0%})"
    finding = Finding(
        id=str(Cause.initialization),
        title=f"The capture {what}: the host of {ranks_in_words(ranks, evidence.ranks)} sets up the driver and libraries for "
        f"{ms(max(mean_us.values()))}" + (" of each iteration" if evidence.per == "iteration" else ""),
        ranks=ranks,
        evidence={"share_of_iteration": round(share, 4), "idle_us": by_rank(mean_us)},
        confidence=Confidence.high,
        action=advice("initialization"),
        events=evidence.events(Cause.initialization, ranks=ranks),
        severe=mostly,
    )
    return [finding], ledger
