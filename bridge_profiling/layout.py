"""Which ranks are profiled, and where a rank stands in the parallel layout.

Computed from the sizes and the order alone, as megatron-core's parallel_state lays ranks out: it is needed before
`initialize_model_parallel` has run, and on hosts that have no megatron-core.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge_profiling.config import normalize_ranks
from bridge_profiling.errors import ProfilingConfigError

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
            if getattr(self, name) < 1:
                raise ProfilingConfigError(f"{name}={getattr(self, name)} is not a size", instead=f"Type {name}=1 or more")
        unknown = set(self.order.split("-")) - set(_DIMENSIONS)
        if unknown:
            raise ProfilingConfigError(
                f"the rank order {self.order!r} names {', '.join(sorted(unknown))}",
                why="the dimensions are tp, cp, ep, dp and pp",
                instead="Type tp-cp-ep-dp-pp, megatron-core's own order",
            )
        self._check_divisible("tensor * pipeline * context", self.tp * self.pp * self.cp)
        self._check_divisible("expert tensor * expert * pipeline", self._expert_tp * self.ep * self.pp)

    def _check_divisible(self, what: str, size: int) -> None:
        if self.world_size % size:
            raise ProfilingConfigError(
                f"a world of {self.world_size} cannot be split by {what} parallel size {size}",
                why="every rank needs a place in the layout",
                instead=f"Start a multiple of {size} ranks, or choose smaller parallel sizes",
            )

    @property
    def _expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Data-parallel size, context parallelism not counted in."""
        return self.world_size // (self.tp * self.pp * self.cp)

    def coordinates(self, rank: int) -> dict[str, tuple[int, int]]:
        """Where `rank` stands: `{dimension: (rank in it, its size)}` for tp, cp, dp, pp and ep."""
        dense = self._place(rank, {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})
        # megatron-core lays the expert layers out a second time: expert tp and ep, with what remains as their dp.
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
        chosen = []
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            if all(place[name][0] == 0 for name in ("tp", "cp", "dp", "ep")):
                chosen.append(rank)
        return chosen


def select_ranks(ranks: object, layout: ParallelLayout) -> list[int]:
    """The global ranks that `profile_ranks` means in this layout.

    Args:
        ranks: a list of ranks, `all` or `pp`.
        layout: the job's layout; `pp` needs its sizes, `all` its world size.

    Raises:
        ProfilingConfigError: as `normalize_ranks`.
    """
    chosen = normalize_ranks(ranks)
    if chosen == "all":
        return list(range(layout.world_size))
    if chosen == "pp":
        return layout.pipeline_ranks()
    assert isinstance(chosen, list)
    return chosen
