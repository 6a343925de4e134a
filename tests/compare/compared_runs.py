"""Runs to compare, whose truth is written down: iterations of known kernels, and manifests with unprofiled durations."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.traces.kineto_files import call, complete, kernel, write_capture


@dataclass
class WrittenRun:
    """What is written as a run.

    Args:
        iterations: how many are captured.
        kernels: microseconds of each kernel, by name, as often as it runs in an iteration.
        host_us: how late the host launches the first kernel.
        slow: iterations by place to how much later their first kernel is launched.
        ranks: how many.
        shapes: of the matrix product that launches everything.
        unprofiled_ms: durations of iterations outside the window, for a manifest, times the rank plus 1; none for no manifest.
        manifest: more of the manifest.
        seed: of the scatter of times by up to a microsecond.
        marked: whether iterations are.
    """

    iterations: int = 6
    kernels: Mapping[str, Sequence[float]] = field(default_factory=lambda: {"gemm": [300.0, 300.0], "softmax": [50.0]})
    host_us: float = 100.0
    slow: Mapping[int, float] = field(default_factory=dict)
    ranks: int = 1
    shapes: str = "[[64, 64], [64, 64]]"
    unprofiled_ms: Sequence[float] = ()
    manifest: dict = field(default_factory=dict)
    seed: int = 1
    marked: bool = True

    def write(self, root):
        """Write it under a directory, which is returned."""
        window = range(10, 10 + self.iterations)
        for rank in range(self.ranks):
            trace = write_capture(root, self._events(rank), window, rank, self.ranks, **self._manifest(rank))
            if not self.unprofiled_ms:
                (root / "manifest" / trace.parent.name / f"rank-{rank}.json").unlink()
        return root

    def _events(self, rank):
        chance = random.Random(self.seed * 1000 + rank)
        events, now, correlation, dims = [], 1000.0, 1, json.loads(self.shapes)
        for place in range(self.iterations):
            begin = now
            launch = begin + self.host_us + self.slow.get(place, 0.0) + chance.uniform(0, 1)
            events.append(complete("cpu_op", "aten::mm", launch, 5, **{"Input Dims": dims, "External id": correlation}))
            device = launch + 10
            for name, time in ((name, time) for name, times in self.kernels.items() for time in times):
                lasts = time + chance.uniform(0, 1)
                events.append(call("cudaLaunchKernel", launch + 1, 2, correlation))
                events.append(kernel(name, device, lasts, correlation=correlation))
                device += lasts
                correlation += 1
            now = device + 20
            if self.marked:
                events.append(complete("user_annotation", f"ProfilerStep#{10 + place}", begin, now - begin - 1))
        return events

    def _manifest(self, rank):
        # The first of the run counts to nothing; these come after the window and what it costs.
        outside = [0, *(11 + self.iterations + number for number in range(len(self.unprofiled_ms)))]
        durations = [round(each * 1e6 * (rank + 1)) for each in (999.0, *self.unprofiled_ms)]
        manifest = {"host": "node1", "config": {"record_shapes": True}, "versions": {"torch": "2.13.0"}}
        manifest["coordinates"] = dict.fromkeys(("tp", "pp", "cp", "ep"), (0, 1)) | {"dp": (rank, self.ranks)}
        manifest["durations_ns"] = {"iteration": outside, "duration_ns": durations}
        return manifest | dict(self.manifest)


def quiet(factor=1.0, **more):
    """A run whose iterations without profiling take 5 ms times a factor, within half a percent."""
    return WrittenRun(unprofiled_ms=[each * factor for each in (5.0, 5.01, 4.99, 5.02, 5.0)], **more)
