"""The table of captures with planted causes: `cases.json`, read. Needs no torch, and no capture to exist."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run that was captured.

    Args:
        name: also the folder of its captures.
        configuration: name of what is trained, and on how many ranks; a case and its twin share it.
        profiler: `torch` or `nsys`.
        window: first iteration captured, and the first one not captured any more.
        must_find: what an honest reader of the capture finds.
        must_not_find: what it must not find.
        twin: the clean case of the same configuration; None for a clean case.
        finding: id of the finding that the plant must lead to; None for a clean case.
        plant: its kind, and the numbers it takes; None for a clean case.
        overrides: settings over the configuration's.
        environment: variables of every rank.
        planted_ranks: ranks that do what was planted.
        late_ranks: ranks that the others wait for, because of it.
        captured_ranks: ranks that are captured; None for all.
        losses: whether the loss of each iteration is kept beside the capture.
        same_iterations_as: a case that computes the same, bit for bit.
        planted_host_ms_per_iteration: milliseconds that each planted rank's host is held up in an iteration.
        planted_kernels_per_iteration: kernels that it launches beyond those of the twin.
        planted_synchronizations_per_iteration: times that the host waits for the device beyond those of the twin.
        planted_bytes_per_iteration: bytes copied, or left allocated, by an iteration beyond the twin's.
        planted_reserved_bytes_per_iteration: bytes that the allocator takes in an iteration beyond the twin's.
        planted_between_iterations: the two iterations between which it happens.
    """

    name: str
    configuration: str
    profiler: str
    window: tuple[int, int]
    must_find: str
    must_not_find: str
    twin: str | None = None
    finding: str | None = None
    plant: dict[str, Any] | None = None
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    planted_ranks: list[int] = field(default_factory=list)
    late_ranks: list[int] = field(default_factory=list)
    captured_ranks: list[int] | None = None
    losses: bool = False
    same_iterations_as: str | None = None
    planted_host_ms_per_iteration: float | None = None
    planted_kernels_per_iteration: int | None = None
    planted_synchronizations_per_iteration: int | None = None
    planted_bytes_per_iteration: int | None = None
    planted_reserved_bytes_per_iteration: int | None = None
    planted_between_iterations: tuple[int, int] | None = None

    @property
    def folder(self) -> Path:
        """Where its captures lie."""
        return FOLDER / self.name

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return CONFIGURATIONS[self.configuration]["ranks"]

    @property
    def layout(self) -> dict[str, int]:
        """Sizes of its parallel dimensions: tp, pp, dp."""
        return CONFIGURATIONS[self.configuration]["layout"]

    @property
    def microbatches(self) -> int:
        """Micro-batches of a rank in an iteration."""
        return CONFIGURATIONS[self.configuration]["microbatches"]

    @property
    def captured(self) -> list[int]:
        """The ranks that are captured."""
        return list(range(self.ranks)) if self.captured_ranks is None else self.captured_ranks

    @property
    def iterations(self) -> list[int]:
        """The iterations that are captured."""
        return list(range(*self.window))

    @property
    def settings(self) -> list[str]:
        """Everything over the recipe, as one types it behind `launch/pretrain.py --recipe`."""
        first, end = self.window
        profiler = (
            ["profiling.use_pytorch_profiler=true"]
            if self.profiler == "torch"
            else ["profiling.use_nsys_profiler=true", "profiling.nsys_export_sqlite=true"]
        )
        ranks = "all" if self.captured_ranks is None else f"[{','.join(map(str, self.captured_ranks))}]"
        return [
            *_TABLE["overrides"],
            *CONFIGURATIONS[self.configuration]["overrides"],
            *profiler,
            f"profiling.profile_step_start={first}",
            f"profiling.profile_step_end={end}",
            f"profiling.profile_ranks={ranks}",
            *(["logger.loss_file=losses.jsonl"] if self.losses else []),
            *self.overrides,
        ]


_TABLE: dict[str, Any] = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))

#: The recipe that all of them change.
RECIPE: str = _TABLE["recipe"]

CONFIGURATIONS: dict[str, dict[str, Any]] = _TABLE["configurations"]

#: Every case by its name.
CASES: dict[str, Case] = {
    row["name"]: Case(
        **{name: tuple(value) if name in ("window", "planted_between_iterations") else value for name, value in row.items()}
    )
    for row in _TABLE["cases"]
}
