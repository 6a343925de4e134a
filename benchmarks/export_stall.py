"""How long a training is held while its trace is written: torch's own export, the same in the foreground, and the hook.

    python benchmarks/export_stall.py

Each round profiles the same operators three times, once per side, in one process. Held is the time from the end of the
window's last iteration until the next one can begin: stopping the profiler, which all sides do, and writing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import shutil
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook

#: Operators in one iteration of the steps that follow a window; a few milliseconds.
STEP = 2_000


def work(operators: int) -> float:
    began = perf_counter()
    tensor = torch.ones(8, 8)
    for _ in range(operators):
        tensor.add_(0.0)
    return perf_counter() - began


def bare(operators: int, write, folder: Path) -> tuple[float, float]:
    """Seconds held stopping, and writing, without the hook."""
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    profiler.prepare_trace()
    profiler.start_trace()
    work(operators)
    began = perf_counter()
    profiler.stop_trace()
    stopped = perf_counter()
    write(profiler, folder)
    return stopped - began, perf_counter() - stopped


def export_by_torch(profiler, folder: Path) -> None:
    profiler.export_chrome_trace(str(folder / "torch.json.gz"))


def export_in_foreground(profiler, folder: Path) -> None:
    raw = folder / "foreground.json"
    profiler.export_chrome_trace(str(raw))
    with raw.open("rb") as source, gzip.open(folder / "foreground.json.gz", "wb", compresslevel=1) as packed:
        shutil.copyfileobj(source, packed, 1 << 20)


BARE = {"torch's own .json.gz": export_by_torch, "compressed in the foreground": export_in_foreground}


def hook(operators: int, folder: Path) -> tuple[float, list[float], list[float]]:
    """Total seconds held, and the steps before and after."""
    config = ProfilingConfig(use_pytorch_profiler=True, record_shapes=True, profile_step_start=20, profile_step_end=21)
    before, after, held = [], [], 0.0
    with ProfilingHook(config, rank=0, output_dir=folder / "hook") as opened:
        for iteration in range(60):
            with opened.iteration(iteration):
                step = work(operators if iteration == 20 else STEP)
                ended = perf_counter()
            if iteration == 20:
                held = perf_counter() - ended
            elif iteration < 19:
                before.append(step)
            elif iteration > 20:
                after.append(step)
    return held, before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--operators", type=int, default=45_000, help="operators in the window; 45,000 make about 100 MB")
    arguments = parser.parse_args()

    stops: list[float] = []
    held: dict[str, list[float]] = {side: [] for side in (*BARE, "the hook")}
    before, after, megabytes = [], [], 0.0
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for side, write in BARE.items():
                stop, written = bare(arguments.operators, write, folder)
                stops.append(stop)
                held[side].append(stop + written)
            megabytes = (folder / "foreground.json").stat().st_size / 1e6
            total, steps_before, steps_after = hook(arguments.operators, folder)
            held["the hook"].append(total)
            before += steps_before
            after += steps_after

    stop = statistics.median(stops)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, trace of {megabytes:.0f} MB, {arguments.rounds} rounds"
    )
    print(f"{'stopping the profiler alone':32} {stop:6.2f} s")
    ours = statistics.median(held["the hook"])
    for side, seconds in held.items():
        median = statistics.median(seconds)
        print(f"{side:32} {median:6.2f} s held, {median - stop:6.2f} s of it writing, {median / ours:5.2f} x the hook's")
    slowed = statistics.median(after) / statistics.median(before)
    print(f"steps after the window, most of them while the thread compresses: {slowed:.2f} x those before")
    print(json.dumps({"stop_s": stop, "held_s": {side: statistics.median(seconds) for side, seconds in held.items()}}))


if __name__ == "__main__":
    main()
