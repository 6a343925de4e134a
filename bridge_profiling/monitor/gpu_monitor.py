"""GPU statistics of a block of code."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from threading import Lock
from time import monotonic
from typing import Any

from bridge_profiling.monitor.gpus import Gpus
from bridge_profiling.monitor.metrics import GPU_METRICS, Readings
from bridge_profiling.monitor.sampler import PeriodicThread

#: Samples kept: more than 40 minutes at the default interval. The summary covers all samples.
_KEPT = 10_000


class GPUMonitor:
    """Samples the GPUs from a background thread while the block runs.

        with GPUMonitor() as monitor:
            train()
        for gpu in monitor.summary()["gpus"] or []:
            print(gpu["gpu"], gpu["metrics"]["utilization_ratio"]["mean"])

    Without a GPU it does nothing, and `unavailable` says why.

    Args:
        gpus: indices as nvidia-smi shows them, or UUIDs; None selects all GPUs of the machine.
        interval: seconds between two samples.

    Attributes:
        unavailable: the reason why no GPU can be read; None if one can, and before the block.
    """

    def __init__(self, gpus: Sequence[int | str] | None = None, *, interval: float = 0.25) -> None:
        PeriodicThread.check_interval(interval)
        self._selected, self._interval = gpus, interval
        self._lock = Lock()
        self._gpus: Gpus | None = None
        self._thread: PeriodicThread | None = None
        self._kept: deque[tuple[float, tuple[Readings, ...]]] = deque(maxlen=_KEPT)
        self._summaries: dict[str | int | None, dict[str, Any]] = {}
        self._began = self._ended = 0.0
        self.unavailable: str | None = None

    def __enter__(self) -> GPUMonitor:
        self._kept.clear()
        self._summaries.clear()
        self._gpus = Gpus(self._selected)
        self.unavailable = self._gpus.unavailable
        self._began = self._ended = monotonic()
        if self.unavailable is None:
            self._thread = PeriodicThread(self._sample, self._interval, "bridge_profiling GPU monitor")
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        thread, self._thread = self._thread, None
        if self._gpus is not None and (thread is None or thread.finish()):
            self._gpus.close()
        self._ended = monotonic()

    @property
    def samples(self) -> list[tuple[float, tuple[Readings, ...]]]:
        """Seconds since the start of the block, and the readings of each GPU; the last 10,000 samples."""
        with self._lock:
            return list(self._kept)

    def summary(self) -> dict[str, Any]:
        """Mean, minimum and maximum of each metric of each GPU over the whole block.

        Returns:
            `seconds`, the duration of the block; `gpus`, None if none can be read, else for each one `gpu`, `uuid`, `name`,
            `metrics` (`mean`, `min`, `max`, `samples` of each) and `unavailable` (metrics without any value, with the
            reason); `unavailable`, the reason why no GPU can be read.
        """
        with self._lock:
            gpus = deepcopy(list(self._summaries.values()))
        for gpu in gpus:
            # Values that were missing only in some samples, such as a rate in the first, are available.
            gpu["unavailable"] = {name: gpu["unavailable"][name] for name in GPU_METRICS if name not in gpu["metrics"]}
        seconds = (monotonic() if self._thread is not None else self._ended) - self._began
        return {"seconds": seconds, "gpus": gpus if self.unavailable is None else None, "unavailable": self.unavailable}

    def _sample(self) -> None:
        assert self._gpus is not None
        readings = self._gpus.read()
        with self._lock:
            self._kept.append((monotonic() - self._began, readings))
            for gpu in readings:
                summary = self._summaries.setdefault(gpu.identity["gpu"], {**gpu.identity, "metrics": {}, "unavailable": {}})
                # A GPU that did not respond at first has no UUID and no name until it does.
                summary.update(gpu.identity)
                summary["unavailable"].update(gpu.unavailable)
                for name, value in gpu.values.items():
                    metric = summary["metrics"].setdefault(name, {"mean": value, "min": value, "max": value, "samples": 0})
                    metric["samples"] += 1
                    metric["mean"] += (value - metric["mean"]) / metric["samples"]
                    metric["min"], metric["max"] = min(metric["min"], value), max(metric["max"], value)
