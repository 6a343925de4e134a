"""Named counters that any thread of a training may add to."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from threading import Lock

from bridge_profiling.errors import ProfilingConfigError


class Counters:
    """Counts what a loop wants counted: tokens skipped, samples dropped, retries.

        counters = Counters()
        counters.add("skipped_batches")
        counters.add("padding_tokens", 128)

    They only grow, as Prometheus' counters do. Every call may come from any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter; the first addition creates it.

        Args:
            name: what is counted.
            amount: how much, at least 0; 0 creates the counter. Of a tensor the number is taken, which waits for its GPU.

        Raises:
            ProfilingConfigError: `amount` is negative, infinite or no number.
        """
        item = getattr(amount, "item", None)
        if item is not None:
            # Of a tensor, or a number of NumPy's, which JSON does not know.
            with suppress(RuntimeError, ValueError):
                amount = item()
        if not isinstance(amount, int | float) or not 0 <= amount < inf:
            raise ProfilingConfigError(
                f"counter {name!r} cannot be changed by {amount!r}",
                why="a counter only grows",
                instead="Add a positive number, or count the opposite under a name of its own",
            )
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def __getitem__(self, name: str) -> float:
        """How far a counter has come, 0 where nothing was added to it."""
        with self._lock:
            return self._counts.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """All counters at one moment, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))
