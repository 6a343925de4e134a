"""The parallel layout of a job.

Computed from sizes and order alone, with the same result as megatron-core's parallel_state: the layout is needed before
`initialize_model_parallel` runs, and on hosts without megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bridge_profiling.common.errors import require

#: More runs of consecutive numbers than this are counted, not listed.
_MOST_RUNS = 12

_DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel dimensions of a job and the order in which ranks fill them.

    Args:
        world_size: number of ranks.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: expert tensor-parallel size; megatron-core takes `tp` when it is not given.
        order: fastest-varying dimension first, as in megatron-core's `initialize_model_parallel(order=…)`.

    Raises:
        ProfilingConfigError: the world cannot be divided into these sizes.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "cp", "ep"):
            size = getattr(self, name)
            require(size >= 1, f"{name}={size} is not a size", instead=f"Type {name}=1 or more")
        unknown = set(self.order.split("-")) - set(_DIMENSIONS)
        require(
            not unknown,
            f"the rank order {self.order!r} names {', '.join(sorted(unknown))}",
            why="the dimensions are tp, cp, ep, dp and pp",
            instead="Type tp-cp-ep-dp-pp, megatron-core's own order",
        )
        for what, size in (
            ("tensor * pipeline * context", self.tp * self.pp * self.cp),
            ("expert tensor * expert * pipeline", self._expert_tp * self.ep * self.pp),
        ):
            require(
                self.world_size % size == 0,
                f"a world of {self.world_size} cannot be split by {what} parallel size {size}",
                why="every rank needs a place in the layout",
                instead=f"Start a multiple of {size} ranks, or choose smaller parallel sizes",
            )

    @property
    def _expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Data-parallel size without context parallelism."""
        return self.world_size // (self.tp * self.pp * self.cp)

    def coordinates(self, rank: int) -> dict[str, tuple[int, int]]:
        """`{dimension: (index of the rank, size)}` for tp, cp, dp, pp and ep."""
        dense = self._place(rank, {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})
        # megatron-core has a second layout for expert layers: expert tp and ep, and the remaining ranks as their dp.
        expert_dp = self.world_size // (self._expert_tp * self.ep * self.pp)
        expert = self._place(rank, {"tp": self._expert_tp, "cp": 1, "ep": self.ep, "dp": expert_dp, "pp": self.pp})
        return {name: dense[name] for name in ("tp", "cp", "dp", "pp")} | {"ep": expert["ep"]}

    def _place(self, rank: int, sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
        order = self.order.split("-")
        order += [name for name in _DIMENSIONS if name not in order]
        place = {}
        for name in order:
            place[name] = (rank % sizes[name], sizes[name])
            rank //= sizes[name]
        return place

    def pipeline_ranks(self) -> list[int]:
        """One rank per pipeline stage: the one at tp=0, cp=0, dp=0, ep=0 of each."""
        places = {rank: self.coordinates(rank) for rank in range(self.world_size)}
        return [rank for rank, place in places.items() if all(place[name][0] == 0 for name in ("tp", "cp", "dp", "ep"))]


def number_ranges(numbers: Iterable[int]) -> str:
    """Numbers as `0-5, 7`; of many scattered ones the first: `1, 3, 5 and 509 more`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MOST_RUNS])
    left = sum(last - first + 1 for first, last in runs[_MOST_RUNS:])
    return f"{text} and {left:,} more" if left else text


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0-5, 7`."""
    found = set(ranks)
    return f"{'rank' if len(found) == 1 else 'ranks'} {number_ranges(found)}"
