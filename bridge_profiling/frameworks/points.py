"""Measurements at named points of a loop, without a capture: `PerformanceCounter` for time, `MemoryProfiler` for memory."""

from __future__ import annotations

import threading
from itertools import pairwise
from statistics import fmean, median
from time import perf_counter
from typing import Any

from bridge_profiling.common.errors import require
from bridge_profiling.common.plain import whole_text
from bridge_profiling.monitor.training import device_memory

#: Fewer points show no trend.
_ENOUGH_POINTS = 10

#: Growth from point to point that counts as a leak, in GB.
_LEAK_GB = 1e-3

_UNKNOWN = "log_memory_stats has recorded no memory yet"


class PerformanceCounter:
    """Adds up the time between pairs of calls, by name:

        counter = PerformanceCounter()
        counter.start_counter("tokenize")
        ...
        counter.end_counter("tokenize")
        print(counter.get_all_stats())

    Any thread may call, and each has its own open pairs. `phase(name)` does the same for a block and names it in a capture.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[tuple[int, str], float] = {}
        self._times: dict[str, list[float]] = {}

    def start_counter(self, name: str) -> None:
        """Begin a measurement; begun twice, it counts from the second time."""
        name = whole_text(name)
        with self._lock:
            self._started[threading.get_ident(), name] = perf_counter()

    def end_counter(self, name: str) -> None:
        """End a measurement; does nothing if this thread has not begun it."""
        now, name = perf_counter(), whole_text(name)
        with self._lock:
            started = self._started.pop((threading.get_ident(), name), None)
            if started is not None:
                # Count, and seconds.
                totals = self._times.setdefault(name, [0, 0.0])
                totals[0] += 1
                totals[1] += now - started

    def get_counter_stats(self, name: str) -> dict[str, float] | None:
        """`total_time` and `avg_time` in seconds, and `count`; None if nothing of this name has ended."""
        return self.get_all_stats().get(whole_text(name))

    def get_all_stats(self) -> dict[str, dict[str, float]]:
        """`get_counter_stats` of every name."""
        with self._lock:
            return {
                name: {"total_time": total, "count": count, "avg_time": total / count}
                for name, (count, total) in self._times.items()
            }


class MemoryProfiler:
    """Device memory of this process at labelled points of a loop, from torch's caching allocator.

    For what holds the memory, record a snapshot: `bridge-profiling run --profiler memory train.py`.

    Attributes:
        memory_stats: every recorded point, as `log_memory_stats` returns it.
    """

    def __init__(self) -> None:
        self.memory_stats: list[dict[str, Any]] = []

    def log_memory_stats(self, step: int, description: str = "") -> dict[str, Any]:
        """Record a point and print it on one line.

        Returns:
            `step`, `description`, and in GB (1e9 bytes) over all devices of the process `allocated`, `cached` (reserved by the
            allocator), `max_allocated`, `max_cached`; None without CUDA.
        """
        memory = device_memory()
        numbers = {name: None if isinstance(read := memory[metric], str) else read / 1e9 for name, metric in _POINT.items()}
        description = whole_text(description)
        point = {"step": step, "description": description, **numbers}
        self.memory_stats.append(point)
        where = f"Step {whole_text(step)}{f' ({description})' if description else ''}"
        if point["allocated"] is None:
            print(f"{where}: device memory is unavailable: {memory['allocated_bytes']}")
        else:
            print(f"{where}: {point['allocated']:.2f} GB allocated, {point['cached']:.2f} GB cached")
        return point

    def analyze_memory_patterns(self) -> dict[str, float]:
        """`peak_allocated`, `peak_cached`, `avg_allocated`, `avg_cached` in GB, and `memory_efficiency`: allocated of cached.

        Raises:
            ProfilingConfigError: no point with memory has been recorded.
        """
        known = [point for point in self.memory_stats if point["allocated"] is not None]
        require(known, _UNKNOWN, instead="Call it in a process that uses CUDA")
        allocated, cached = (fmean(point[name] for point in known) for name in ("allocated", "cached"))
        return {
            "peak_allocated": max(point["max_allocated"] for point in known),
            "peak_cached": max(point["max_cached"] for point in known),
            "avg_allocated": allocated,
            "avg_cached": cached,
            "memory_efficiency": allocated / cached if cached else 0.0,
        }

    def detect_memory_leaks(self) -> bool:
        """Whether the median change of allocated memory from point to point is growth of more than 1 MB.

        Points of one label are compared with each other, or all of them if no label has ten; fewer points show nothing.
        """
        known = [(point["description"], point["allocated"]) for point in self.memory_stats if point["allocated"] is not None]
        by_label = [[memory for label, memory in known if label == each] for each in dict.fromkeys(label for label, _ in known)]
        enough = [memory for memory in by_label if len(memory) >= _ENOUGH_POINTS] or [[memory for _, memory in known]]
        return any(
            len(memory) >= _ENOUGH_POINTS and median(after - before for before, after in pairwise(memory)) > _LEAK_GB
            for memory in enough
        )


#: Numbers of a point, and the metrics of `device_memory`.
_POINT = {
    "allocated": "allocated_bytes",
    "cached": "reserved_bytes",
    "max_allocated": "allocated_peak_bytes",
    "max_cached": "reserved_peak_bytes",
}
