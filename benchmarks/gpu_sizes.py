"""How large a training the GPU benchmarks run. Imports no torch: those who only ask for a training need none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """What makes an iteration long.

    Attributes:
        layers: transformer layers.
        micro_batches: of one sequence each.
        recompute: whether the backward runs each layer's forward again.
    """

    layers: int = 3
    micro_batches: int = 2
    recompute: bool = False

    def __str__(self) -> str:
        return f"{self.layers}x{self.micro_batches}" + ("-recompute" if self.recompute else "")
