"""What an iteration outside the window costs: our hook against the stateless two-call form.

    python benchmarks/hook_overhead.py

The baseline is written here from the behaviour of Megatron Bridge's pair of calls: at the top of an iteration a
function asks whether there is a config, whether this rank is profiled, whether the torch profiler must step, and
whether this is nsys' first iteration; at its bottom another asks the same for the end. It times nothing, whereas the
hook times every iteration. Both sides alternate in one process, in rounds, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
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

    # The window lies past everything that runs: the ordinary state of a training that will be, or was, profiled.
    far = 10**12
    config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=far, profile_step_end=far + 2)
    with tempfile.TemporaryDirectory() as folder, ProfilingHook(config, rank=0, output_dir=folder) as waiting:
        measure(config, waiting, ProfilingHook(None, rank=0), arguments)


def measure(config: ProfilingConfig, waiting: ProfilingHook, idle: ProfilingHook, arguments: argparse.Namespace) -> None:
    sides = {
        "pair of calls (baseline)": lambda: time_pair(config, arguments.iterations),
        "hook, before its window": lambda: time_hook(waiting, arguments.iterations),
        "hook, no profiling asked for": lambda: time_hook(idle, arguments.iterations),
        "empty loop": lambda: time_loop(arguments.iterations),
    }
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            measured[name].append(side())

    loop = statistics.median(measured.pop("empty loop"))
    medians = {name: statistics.median(times) - loop for name, times in measured.items()}
    baseline = medians["pair of calls (baseline)"]
    print(f"Python {platform.python_version()}, {arguments.rounds} rounds of {arguments.iterations} iterations, medians")
    for name, median in medians.items():
        print(f"{name:32} {median:7.0f} ns an iteration   {median / baseline:5.2f} x baseline")
    print(json.dumps({"nanoseconds": medians, "ratio": medians["hook, before its window"] / baseline}))


if __name__ == "__main__":
    main()
