"""Energy of a training per iteration and per token, from the GPUs' own counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from bridge_profiling.monitor.metrics import Readings

#: Samples after an iteration that a figure covers: a minute at the default interval if each iteration is shorter than that.
_SAMPLES = 60


class EnergyMeter:
    """Divides the energy of all monitored GPUs by the iterations and tokens of the same time.

    Work of other processes on these GPUs is included; a rank that monitors only its own GPU gets its own energy.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=_SAMPLES)

    def read(self, gpus: Sequence[Readings], totals: Mapping[str, float]) -> dict[str, float | str]:
        """`joules_per_iteration` and `joules_per_token`, or the reason why they are unknown.

        Args:
            gpus: readings of every monitored GPU.
            totals: iterations, and tokens if the loop reports them, since the training began.
        """
        metrics = {"joules_per_iteration": "iterations", "joules_per_token": "tokens"}
        # A part of a GPU counts no energy; the whole GPU does.
        gpus = [gpu for gpu in gpus if ":" not in str(gpu.identity.get("gpu"))]
        unknown = next((gpu.unavailable["energy_joules"] for gpu in gpus if "energy_joules" in gpu.unavailable), None)
        if unknown is not None or not gpus:
            self._kept.clear()
            return dict.fromkeys(metrics, unknown or "no GPU can be read")
        joules = sum(gpu.values["energy_joules"] for gpu in gpus)
        if self._kept and joules < self._kept[-1][0]:
            self._kept.clear()  # The driver was loaded again.
        # Only samples after an iteration has ended: the energy of a part of one belongs to no number of them.
        if not self._kept or totals["iterations"] > self._kept[-1][1]["iterations"]:
            self._kept.append((joules, dict(totals)))
        (before, since), (joules, totals) = self._kept[0], self._kept[-1]
        found: dict[str, float | str] = {}
        for metric, quantity in metrics.items():
            amount = totals.get(quantity, 0) - since.get(quantity, 0)
            reason = (
                f"the loop does not report {quantity}" if quantity not in totals else "needs an iteration between two samples"
            )
            found[metric] = (joules - before) / amount if amount > 0 else reason
        return found
