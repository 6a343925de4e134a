"""Above or below what a number becomes a finding."""

from __future__ import annotations

from dataclasses import dataclass

from bridge_profiling.analysis.attribution.host import CHECKPOINT, DATA_LOADING


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Shares are of a typical iteration's duration, unless they say otherwise. Each can be set."""

    device_busy: float = 0.80
    """A device busy for less of an iteration is a finding."""

    device_busy_severe: float = 0.50
    """And for less than this, a severe one."""

    data_loading: float = 0.10
    """Share of an iteration that waits for data."""

    communication: float = 0.20
    """Share of an iteration in exposed communication, waiting for other ranks not counted."""

    dominant_kernel: float = 0.30
    """Share of a rank's compute in one kernel."""

    memory_headroom: float = 0.10
    """Share of the device's memory left at the peak."""

    memory_growth_bytes: int = 1_000_000
    """Growth of allocated memory in an iteration."""

    memory_fragmentation: float = 0.20
    """Share of the reserved memory that was reserved while as much was free, in holes too small."""

    cause: float = 0.03
    """Share of an iteration that any other cause must cost to be a finding."""

    synchronizations: int = 10
    """Times that a host waits for its device in an iteration: so many are a finding at a fifth of `cause`, since they keep the
    host from ever getting ahead."""

    slow_iteration: float = 1.5
    """How much longer than the median one an iteration is that counts as slow."""

    profiler: float = 0.10
    """Share of an unprofiled iteration that the profiler adds to it."""

    data_loading_ranges: str = DATA_LOADING
    """Regular expression for names of ranges in which the program waits for data: annotations, NVTX ranges, Python frames."""

    checkpoint_ranges: str = CHECKPOINT
    """Regular expression for names of ranges in which it saves a checkpoint."""

    def range_names(self) -> dict[str, str]:
        """What of these the ranks' workers must know; nothing where it is the default."""
        chosen = {"data_loading": (self.data_loading_ranges, DATA_LOADING), "checkpoint": (self.checkpoint_ranges, CHECKPOINT)}
        return {name: expression for name, (expression, default) in chosen.items() if expression != default}
