"""Cost of the monitor to a training: alternating rounds with and without sampling, and the CPU time of the monitor's thread.

    python benchmarks/monitor_overhead.py

The loop computes in Python and holds its lock all the time, so it is delayed whenever the sampling thread holds the lock; a
training that waits for a GPU is delayed less often. One iteration takes about 100 ms. The ratio is of the means, since a sample
falls into one iteration of ten, and is as noisy as the machine; the CPU time of the thread bounds the cost to a training, and
is the figure to compare with 0.1%. On a machine with GPUs one is read, as a rank reads its own (`--gpus` selects it).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.monitor import Monitor, TrainingMonitor


class MeteredMonitor(Monitor):
    """A monitor that records the cost of each sample to its thread, and takes none while it is `paused`.

    Attributes:
        costs: CPU seconds of each sample.
        computed: the same without those of the driver, which delay nothing: they decide how often the monitor samples.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.costs: list[float] = []
        self.computed: list[float] = []
        self.paused = False

    def _take_sample(self) -> float:
        if self.paused:
            return 0.0
        before = thread_time()
        of_driver = super()._take_sample()
        cost = thread_time() - before
        self.costs.append(cost)
        self.computed.append(cost - of_driver)
        return of_driver


def work(amount: int) -> int:
    total = 0
    for number in range(amount):
        total += number * number
    return total


def calibrate(seconds: float) -> int:
    amount = 10_000
    while True:
        began = perf_counter()
        work(amount)
        took = perf_counter() - began
        if took > 0.05:
            return int(amount * seconds / took)
        amount *= 2


def train(hook: ProfilingHook, iterations: range, amount: int) -> list[float]:
    took = []
    for iteration in iterations:
        began = perf_counter()
        with hook.iteration(iteration):
            work(amount)
        took.append(perf_counter() - began)
    return took


def time_end_step(steps: int) -> float:
    """Nanoseconds that one `end_step` costs the loop that calls it."""
    with TrainingMonitor() as training:
        before = thread_time()
        for _ in range(steps):
            training.end_step(tokens=8192)
        return (thread_time() - before) / steps * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of both sides")
    parser.add_argument("--iterations", type=int, default=30, help="iterations a round and side")
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of one iteration")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training in which the thread's CPU time is added up")
    parser.add_argument("--gpus", default="0", help="GPUs to read, as nvidia-smi numbers them")
    arguments = parser.parse_args()
    amount = calibrate(arguments.milliseconds / 1e3)
    plain: list[float] = []
    watched: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ProfilingHook(None, rank=0) as hook:
        monitor = MeteredMonitor(
            hook=hook,
            tokens_per_iteration=8192,
            jsonl=Path(folder, "monitor.jsonl"),
            port=0,
            gpus=arguments.gpus.split(","),
            rank=0,
        )
        with monitor:
            train(hook, range(30), amount)
            starting = monitor.costs[0]
            for each in range(arguments.rounds):
                for side in (plain, watched) if each % 2 else (watched, plain):
                    monitor.paused = side is plain
                    side.append(statistics.fmean(train(hook, range(arguments.iterations), amount)))
            # Without a pause, since what a sample costs decides when the next one comes.
            monitor.paused, monitor.costs = False, []
            began = perf_counter()
            while perf_counter() - began < arguments.seconds:
                train(hook, range(1), amount)
            share = sum(monitor.costs) / (perf_counter() - began)
    assert monitor.sample is not None
    gpus = monitor.sample.unavailable.get("gpus") or [gpu.identity["name"] for gpu in monitor.sample.gpus]
    ratios = [one / other for one, other in zip(watched, plain, strict=True)]
    ratio = statistics.median(ratios)
    print(f"Python {platform.python_version()}, {len(monitor.costs)} samples; GPUs: {gpus}")
    print(
        f"an iteration: {statistics.median(plain) * 1e3:.2f} ms without, {ratio:.4f} x with"
        f" (rounds from {min(ratios):.3f} to {max(ratios):.3f})"
    )
    print(
        f"the thread's CPU time: {statistics.median(monitor.costs) * 1e3:.3f} ms a sample in the median,"
        f" {share:.3%} of the time; {starting * 1e3:.1f} ms the first one"
    )
    print(f"end_step: {statistics.median(time_end_step(20_000) for _ in range(9)):.0f} ns")
    print(json.dumps({"ratio": ratio, "share": share}))


if __name__ == "__main__":
    main()
