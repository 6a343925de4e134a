"""What an iteration outside the window costs: our hook, with and without listening, compared with the stateless two-call form.

    python benchmarks/hook_overhead.py

The baseline is written here from the behaviour of Megatron Bridge's pair of calls: at the top of an iteration a
function checks whether there is a config, whether this rank is profiled, whether the torch profiler must step, and
whether this is nsys' first iteration; at its bottom another checks the same for the end. It times nothing, whereas the
hook times every iteration. All sides alternate in one process, in rounds, so that all run under the same conditions.

A hook that listens polls for requests in a thread, once a second. Here every round of some tens of
milliseconds contains a poll, so the printed cost of listening is more than a training pays. A single poll is timed as well.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter_ns

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook


def step_begins(config: ProfilingConfig | None, iteration: int, rank: int, profiler: object | None) -> object | None:
    if config is None or not is_profiled(config, rank):
        return None
    if config.use_pytorch_profiler and profiler is not None:
        profiler.step()
    if config.use_nsys_profiler and iteration == config.profile_step_start:
        raise AssertionError("the benchmark stays outside the window")
    return None


def step_ends(config: ProfilingConfig | None, iteration: int, rank: int, profiler: object | None, context: object) -> None:
    if config is None or not is_profiled(config, rank) or iteration != config.profile_step_end:
        return
    raise AssertionError("the benchmark stays outside the window")


def is_profiled(config: ProfilingConfig, rank: int) -> bool:
    return rank in config.profile_ranks


def time_loop(iterations: int) -> float:
    began = perf_counter_ns()
    for _ in range(iterations):
        pass
    return (perf_counter_ns() - began) / iterations


def time_pair(config: ProfilingConfig, iterations: int) -> float:
    began = perf_counter_ns()
    for iteration in range(iterations):
        context = step_begins(config, iteration, 0, None)
        step_ends(config, iteration, 0, None, context)
    return (perf_counter_ns() - began) / iterations


def time_hook(hook: ProfilingHook, iterations: int) -> float:
    began = perf_counter_ns()
    for iteration in range(iterations):
        with hook.iteration(iteration):
            pass
    return (perf_counter_ns() - began) / iterations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--iterations", type=int, default=50_000, help="iterations a round and side")
    arguments = parser.parse_args()
    # Silences the warning that a round ended before its window.
    logging.getLogger("bridge_profiling").setLevel(logging.ERROR)

    # The window is after everything that runs: the usual state of a training that will be, or was, profiled.
    far = 10**12
    config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=far, profile_step_end=far + 2)
    measure(config, arguments)


def open_hook(config: ProfilingConfig, **settings: object) -> Callable[[int], float]:
    """A round of a hook that is open only for that round, so that a listening hook's thread does not slow the others down."""

    def one_round(iterations: int) -> float:
        asked = replace(config, **settings)
        with tempfile.TemporaryDirectory() as folder, ProfilingHook(asked, rank=0, output_dir=folder) as hook:
            return time_hook(hook, iterations)

    return one_round


def time_poll(config: ProfilingConfig, *, rank: int, polls: int = 200) -> float:
    """Seconds that one poll of the listener takes when there is no request."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProfilingHook(config, rank=rank, world_size=2, output_dir=folder) as hook,
    ):
        time_hook(hook, 1000)
        listener = hook._listener
        assert listener is not None
        listener._stopping.set()
        listener.join()
        began = perf_counter_ns()
        for _ in range(polls):
            listener._poll()
        return (perf_counter_ns() - began) / polls / 1e9


def measure(config: ProfilingConfig, arguments: argparse.Namespace) -> None:
    sides = {
        "pair of calls (baseline)": lambda iterations: time_pair(config, iterations),
        "hook, before its window": open_hook(config, on_demand=False),
        "the same, listening": open_hook(config, on_demand=True),
        "and watching for slow ones": open_hook(config, on_demand=True, slow_iteration_factor=1000.0),
        "hook, no profiling asked for": lambda iterations: time_hook(ProfilingHook(None, rank=0), iterations),
        "empty loop": time_loop,
    }
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            measured[name].append(side(arguments.iterations))

    loop = measured.pop("empty loop")
    medians = {name: statistics.median(times) - statistics.median(loop) for name, times in measured.items()}
    fastest = {name: min(times) - min(loop) for name, times in measured.items()}
    baseline = medians["pair of calls (baseline)"]
    print(f"Python {platform.python_version()}, {arguments.rounds} rounds of {arguments.iterations} iterations: medians")
    for name, median in medians.items():
        print(f"{name:32} {median:7.0f} ns an iteration   {median / baseline:5.2f} x baseline   {fastest[name]:7.0f} ns")
    polls = {rank: time_poll(config, rank=rank) for rank in (0, 1)}
    print(f"one poll for a request, once a second: {polls[0] * 1e6:.0f} us on rank 0, {polls[1] * 1e6:.0f} us on the others")
    told = {"nanoseconds": medians, "fastest_nanoseconds": fastest, "look_seconds": polls}
    print(json.dumps(told | {"ratio": medians["hook, before its window"] / baseline}))


if __name__ == "__main__":
    main()
