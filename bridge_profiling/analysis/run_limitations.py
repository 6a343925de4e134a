"""What a run cannot tell, in sentences that name the ranks: each thing is said once, not once a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from bridge_profiling.analysis.iterations import ENOUGH_ITERATIONS
from bridge_profiling.traces.types import RankInfo

#: More sets of neighbouring ranks than this are not listed.
_RUNS = 12


def of_ranks(limitations: pa.Table, iterations: pa.Table, snapshots: Sequence[RankInfo]) -> list[str]:
    """What single captures cannot tell.

    Args:
        limitations: of all traces: rank, source, limitation.
        iterations: of all traces.
        snapshots: what is known of memory snapshots.
    """
    said: dict[str, list[int]] = {}
    for row in limitations.to_pylist():
        said.setdefault(row["limitation"], []).append(row["rank"])
    for info in snapshots:
        for caveat in info.caveats:
            said.setdefault(caveat.text, []).append(info.rank)
    for rank, sentence in _medians(iterations):
        said.setdefault(sentence, []).append(rank)
    return [f"{named(ranks)}: {sentence}" for sentence, ranks in said.items()]


def named(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0-5, 7`; of many apart from one another the first, `ranks 1, 3, 5 and 509 more`."""
    found = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in found:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_RUNS])
    if len(runs) > _RUNS:
        words += f" and {sum(last - first + 1 for first, last in runs[_RUNS:]):,} more"
    return f"rank {words}" if len(found) == 1 else f"ranks {words}"


def _medians(iterations: pa.Table) -> Iterator[tuple[int, str]]:
    """Ranks of which medians are not of steady iterations only, and why."""
    boundaries: dict[tuple[int, str], list[bool]] = {}
    for row in iterations.to_pylist():
        boundaries.setdefault((row["rank"], row["source"]), []).append(row["boundary"])
    for (rank, _), boundary in boundaries.items():
        if len(boundary) < ENOUGH_ITERATIONS:
            captured = "one iteration was" if len(boundary) == 1 else f"{len(boundary)} iterations were"
            yield rank, f"only {captured} captured: all count, also any at the profiler's start or stop"
        elif all(boundary):
            yield rank, "all iterations are at the profiler's start, stop or flush: none is steady, and all count"
