"""Of many ranks those that are worth a place on the page: to blame, slow, fast, one of each pipeline stage. All of a few."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bridge_profiling.analysis.findings import Finding
from bridge_profiling.traces.types import RankInfo

#: Up to so many ranks, each has a row wherever ranks have rows. Beyond, they are aggregated.
EVERY_RANK = 64

#: Ranks with a row of their own where the others are aggregated.
NAMED_RANKS = 16

#: Ranks whose memory is drawn.
MEMORY_RANKS = 4


def worth_showing(
    infos: Sequence[RankInfo],
    findings: Iterable[Finding],
    stragglers: Sequence[Mapping[str, Any]],
    most: int = NAMED_RANKS,
    every: int = EVERY_RANK,
) -> list[int]:
    """The ranks that have a place of their own, ascending: all of a few.

    Args:
        infos: what is known of the ranks.
        findings: their ranks come first.
        stragglers: rows of `Run.straggler`, the slowest first.
        most: how many where not all can be shown.
        every: up to so many, all are shown.
    """
    everyone = [info.rank for info in infos]
    if len(everyone) <= every:
        return everyone
    known = set(everyone)
    # Of findings that blame one rank to a few: whoever blames all of them singles nobody out.
    blamed = [rank for finding in findings if len(finding.ranks) <= most // 2 for rank in finding.ranks[:4]]
    order = [row["rank"] for row in stragglers]
    wanted = [*blamed, *order[: most // 4], *order[-2:], *first_of_stages(infos)[: most // 2], *order[most // 4 :], *everyone]
    return sorted(list(dict.fromkeys(rank for rank in wanted if rank in known))[:most])


def first_of_stages(infos: Sequence[RankInfo]) -> list[int]:
    """The first rank of each pipeline stage, where the manifests tell stages."""
    found: dict[int, int] = {}
    for info in infos:
        if info.coordinates and "pp" in info.coordinates:
            found.setdefault(info.coordinates["pp"][0], info.rank)
    return [found[stage] for stage in sorted(found)]


def stages(infos: Sequence[RankInfo]) -> dict[str, list[int]]:
    """Ranks by pipeline stage; all of them as one where there is one stage, or none is known."""
    found: dict[str, list[int]] = {}
    for info in infos:
        coordinates = info.coordinates or {}
        stage = coordinates["pp"][0] if "pp" in coordinates and coordinates["pp"][1] > 1 else None
        found.setdefault("all ranks" if stage is None else f"pipeline stage {stage}", []).append(info.rank)
    return found


def of_memory(memory: Sequence[Mapping[str, Any]], held: Sequence[int]) -> list[int]:
    """Ranks whose memory is drawn: those with the highest peaks, and those that grow fastest.

    Args:
        memory: rows of `Run.memory`.
        held: ranks whose memory was recorded.
    """
    if len(held) <= MEMORY_RANKS:
        return list(held)
    peaks = [row["rank"] for row in sorted(memory, key=lambda row: -(row["peak_bytes"] or 0))]
    growing = [row["rank"] for row in sorted(memory, key=lambda row: -(row["growth_bytes_per_iteration"] or 0))]
    return sorted(list(dict.fromkeys([*peaks[:2], *growing[:2], *peaks]))[:MEMORY_RANKS])
