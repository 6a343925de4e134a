"""What a window's edges cost: arming, the start and the stop, by the hook and by torch's profiler with its own export."""

from __future__ import annotations

import random
import statistics
from functools import partial

from benchmarks.gpu_cases import TEARDOWN, TORCH, Case, stay_on_one_core
from benchmarks.gpu_processes import Place, plain_worker
from benchmarks.gpu_rounds import SETTLE, Bench, Row
from benchmarks.paired import paired_ratio

#: Iterations of a window: enough for a trace of some megabytes.
_WINDOW = 24

#: The stop may hold the training this much of what torch's own stop and export do.
_STOP = (0.0, 0.7)


def edges(bench: Bench) -> None:
    """Blocks of the hook and of torch's profiler in turns: the two iterations at a window's begin, and what its end adds."""
    place = Place(bench.place.lane, bench.place.scratch, bench.place.environment | TEARDOWN)
    sides = ("hook", "exported")
    found: dict[str, dict[str, list[float]]] = {edge: {side: [] for side in sides} for edge in ("begin", "stop")}
    draw = random.Random(bench.name)
    with plain_worker(place, bench.sizes) as worker:
        stay_on_one_core(bench, worker)
        blocks = {side: partial(worker.ask, side, profiling=TORCH, settle=SETTLE, count=_WINDOW) for side in sides}
        for side in sides:
            blocks[side]()  # the first of a process prepares CUPTI
        bench.begin()
        while bench.another_round():
            for side in draw.sample(sides, len(sides)):
                milliseconds = [each / 1e6 for each in blocks[side]()["durations"]]
                found["begin"][side].append(sum(milliseconds[SETTLE - 1 : SETTLE + 1]))
                found["stop"][side].append(milliseconds[-1] - statistics.median(milliseconds[SETTLE + 1 : -1]))
    for edge, what, target in (
        ("begin", "arming and start: hook / torch.profiler", None),
        ("stop", "stop: hook / torch.profiler and export", _STOP),
    ):
        times = found[edge]
        ratio = paired_ratio(times["hook"], times["exported"])
        middle = {side: statistics.median(times[side]) for side in sides}
        bench.results.rows.append(Row(bench.name, what, ratio, len(times["hook"]), middle, target))


EDGE_CASES = (Case("edges-torch", 40, 25, edges),)
