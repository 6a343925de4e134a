"""Iterations far longer than usual, from the manifests alone: they time every iteration of the run, most of them unprofiled.

They need not be in a capture, so the finding says when they occur, on which ranks and how regularly, and what to capture next.
"""

from __future__ import annotations

import numpy as np

from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.losses import ms
from bridge_profiling.slow_iterations import slow_threshold

#: Fewer iterations tell no usual one.
_ENOUGH = 10

#: Slow iterations so far apart, all of them, come at an interval that somebody set.
_REGULAR = 3


def find(context: Context) -> list[Finding]:
    """One finding for the iterations that are slow on any rank.

    Args:
        context: of one run.
    """
    slow: dict[int, dict[int, float]] = {}
    lost, typical, ranks = [], [], []
    for manifest in context.manifests:
        durations = {number: time_ns / 1e3 for number, time_ns in manifest.durations_by_iteration(profiled=False).items()}
        threshold = slow_threshold(list(durations.values()), factor=context.thresholds.slow_iteration, at_least=_ENOUGH)
        if threshold is None:
            continue
        usual = threshold.median
        beyond = {number: time - usual for number, time in durations.items() if time > threshold.above}
        if beyond:
            ranks.append(manifest.rank)
        for number, time in beyond.items():
            slow.setdefault(number, {})[manifest.rank] = time
        lost.append(sum(beyond.values()) / len(durations))
        typical.append(usual)
    if not slow:
        return []
    # All ranks have the same iterations: who is not slow itself waits, so the ranks agree on how long they are.
    recoverable, usual = float(np.median(lost)), float(np.median(typical))
    if recoverable < context.thresholds.cause * usual:
        return []
    numbers = sorted(slow)
    every = _interval(numbers)
    worst = max(numbers, key=lambda number: max(slow[number].values()))
    return [
        Finding(
            id="slow_iterations",
            title=f"{len(numbers)} iterations are up to {ms(max(slow[worst].values()))} longer than the usual {ms(usual)}"
            + (f": every {every}" if every else ""),
            ranks=sorted(ranks),
            evidence={
                "iterations": numbers[:50],
                "usual_us": round(usual, 3),
                "beyond_usual_us": {str(number): round(max(slow[number].values()), 3) for number in numbers[:50]},
                "every": every,
            },
            recoverable_us_per_iteration=recoverable,
            confidence=Confidence.high if len(numbers) >= _REGULAR else Confidence.medium,
            confidence_reason="" if len(numbers) >= _REGULAR else f"only {len(numbers)} such iterations: it may be chance",
            action=_action(every, worst, ranks_in_words(sorted(ranks), [manifest.rank for manifest in context.manifests])),
            events=[
                Event(rank, f"iteration {number}", number, None, time)
                for number, times in sorted(slow.items(), key=lambda each: -max(each[1].values()))[:5]
                for rank, time in [max(times.items(), key=lambda each: each[1])]
            ],
        )
    ]


def _interval(numbers: list[int]) -> int | None:
    """The distance between slow iterations, if it is always the same."""
    apart = set(np.diff(numbers).tolist())
    return apart.pop() if len(numbers) >= _REGULAR and len(apart) == 1 and 1 not in apart else None


def _action(every: int | None, worst: int, ranks: str) -> str:
    look = (
        f"Capture one of them on {ranks}: profiling.profile_step_start={worst} profiling.profile_step_end={worst + 1}, or "
        "bridge-profiling trigger while the job runs. "
    )
    if every:
        return look + (
            f"What happens every {every} iterations? Compare with checkpoint.save_interval, train.eval_interval, "
            "train.manual_gc_interval and logger.log_interval."
        )
    return look + (
        "Irregular ones are often Python's garbage collection (train.manual_gc=true), a data loader that starts its workers "
        "anew or waits for storage (dataset.num_workers, dataset.prefetch_factor), or other jobs on the same nodes and network."
    )
