"""Sizes of the GPU benchmarks' training. Imports no torch, which a process that only requests a training does not need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine an iteration's duration.

    Attributes:
        layers: transformer layers.
        micro_batches: of one sequence each.
        recompute: whether the backward runs each layer's forward again; the recipe's only.
        megatron: whether to train the project's recipe, where megatron-core is installed.
    """

    layers: int = 3
    micro_batches: int = 2
    recompute: bool = False
    megatron: bool = True

    def __str__(self) -> str:
        return f"{self.layers}x{self.micro_batches}" + ("-recompute" if self.recompute else "")
