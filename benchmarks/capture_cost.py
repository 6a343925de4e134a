"""What a capture costs a training, for each option of the profilers: `make bench-gpu`.

    python benchmarks/capture_cost.py [--rounds 20] [--options "torch profiler,light"] [--layers 3]

A training of small layers, bound by the host: the profiler's cost to the host is fully visible. Every iteration ends with a
synchronization of the device. In each round, blocks of a window without a profiler, with torch's profiler driven bare and with
the hook take turns in random order, in one process; ratios are medians of the rounds' with a 95% interval (paired.py). Blocks
are seconds apart, so one more block alternates iterations within the hook and without it in one window: the hook's own cost.
Held is the time from the window's last iteration until the next one can begin: stopping the profiler and writing. The bare
profiler writes torch's own .json.gz. Without a GPU, the same runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("TEARDOWN_CUPTI", "1")  # the hook's default; a bare block may come before its first

import torch
from torch.profiler import ProfilerActivity

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.paired import paired_ratio
from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook

OPTIONS: dict[str, dict[str, Any]] = {
    "torch profiler": {},
    "light": {"pytorch_profiler_device_only": True},
    "with shapes": {"record_shapes": True},
    "with call stacks": {"pytorch_profiler_collect_callstack": True},
    "with memory events": {"pytorch_profiler_profile_memory": True},
}

#: Iterations before a window and in it.
SETTLE, WINDOW = 5, 12

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


class Training:
    """Layers of a transformer, in bf16 on a GPU: `step` is one iteration."""

    def __init__(self, layers: int) -> None:
        width = 512 if CUDA else 64
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self._model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(DEVICE)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), foreach=False)
        self._batch = torch.randn(2, 256 if CUDA else 32, width, device=DEVICE)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        with torch.autocast("cuda", torch.bfloat16) if CUDA else nullcontext():
            loss = self._model(self._batch).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if CUDA:
            torch.cuda.synchronize()


def timed(step: Callable[[], None]) -> float:
    """Seconds of one iteration."""
    began = perf_counter()
    step()
    return perf_counter() - began


def plain(training: Training, _: dict[str, Any], folder: Path) -> tuple[list[float], float]:
    """Iterations without a profiler, and nothing held."""
    return [timed(training.step) for _ in range(SETTLE + WINDOW)][SETTLE:], 0.0


def bare(training: Training, option: dict[str, Any], folder: Path) -> tuple[list[float], float]:
    """Iterations under torch's profiler with the same options, and seconds held."""
    activities = [] if option.get("pytorch_profiler_device_only") and CUDA else [ProfilerActivity.CPU]
    profiler = torch.profiler.profile(
        activities=[*activities, *([ProfilerActivity.CUDA] if CUDA else [])],
        record_shapes="record_shapes" in option,
        with_stack="pytorch_profiler_collect_callstack" in option,
        profile_memory="pytorch_profiler_profile_memory" in option,
    )
    for _ in range(SETTLE):
        training.step()
    profiler.prepare_trace()
    training.step()
    profiler.start_trace()
    times = [timed(training.step) for _ in range(WINDOW)]
    began = perf_counter()
    profiler.stop_trace()
    profiler.export_chrome_trace(str(folder / "bare.json.gz"))
    return times, perf_counter() - began


def hooked(training: Training, option: dict[str, Any], folder: Path, *, pairs: bool = False) -> tuple[list[float], float]:
    """Iterations within the hook's window, and seconds held; with `pairs`, ratios to ones that the hook does not see."""
    window = {"profile_step_start": SETTLE, "profile_step_end": SETTLE + WINDOW}
    config = ProfilingConfig(use_pytorch_profiler=True, **window, **option)
    times, unseen = [], []
    with ProfilingHook(config, rank=0, output_dir=folder / "hook") as hook:

        def iterate(number: int) -> None:
            with hook.iteration(number):
                training.step()

        for number in range(SETTLE + WINDOW):
            paired = pairs and SETTLE < number < SETTLE + WINDOW - 1  # the profiler starts in the first, and stops in the last
            if paired and number % 2:
                unseen.append(timed(training.step))
            times.append(timed(lambda number=number: iterate(number)))
            if paired and not number % 2:
                unseen.append(timed(training.step))
    held = times[-1] - statistics.median(times[SETTLE + 1 : -1])
    inside = times[SETTLE + 1 : -1]
    return [mine / other for mine, other in zip(inside, unseen, strict=True)] if pairs else inside, held


SIDES = {"unprofiled": plain, "bare": bare, "hook": hooked}


def measure(training: Training, name: str, rounds: int) -> dict[str, Any]:
    """The cost of one option."""
    draw, option = random.Random(name), OPTIONS[name]
    medians: dict[str, list[float]] = {side: [] for side in SIDES}
    held: dict[str, list[float]] = {side: [] for side in SIDES}
    recorded: list[float] = []
    for number in range(rounds + 1):
        for side in draw.sample([*SIDES, "pairs"], len(SIDES) + 1):
            with tempfile.TemporaryDirectory() as folder:
                if side == "pairs":
                    ratios, _ = hooked(training, option, Path(folder), pairs=True)
                    recorded += ratios if number else []
                    continue
                times, seconds = SIDES[side](training, option, Path(folder))
                kept = sum(path.stat().st_size for path in Path(folder, "hook").rglob("*.json.gz"))
                if number:  # the first round prepares CUPTI and compiles
                    medians[side].append(statistics.median(times[1:-1]))
                    held[side].append(seconds)
                if side == "hook":
                    kb = kept / WINDOW / 1e3
    return {
        "recorded: with the hook / without": paired_ratio(recorded, [1.0] * len(recorded)),
        "window: hook / bare": paired_ratio(medians["hook"], medians["bare"]),
        "window: hook / unprofiled": paired_ratio(medians["hook"], medians["unprofiled"]),
        "held: hook / torch's .json.gz": paired_ratio(held["hook"], held["bare"]),
        "held_s": {side: statistics.median(held[side]) for side in ("hook", "bare")},
        "iteration_ms": {side: 1e3 * statistics.median(times) for side, times in medians.items()},
        "kb_per_iteration": kb,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table as Markdown, and what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--options", default=",".join(OPTIONS), help="which of " + ", ".join(OPTIONS))
    parser.add_argument("--layers", type=int, default=3)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    if not CUDA:
        torch.set_num_threads(1)  # threads that wait for busy cores would be all that is measured
    training = Training(options.layers)
    for _ in range(20):
        training.step()
    where = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{where}, torch {torch.__version__}, {options.layers} layers, {options.rounds} rounds of {WINDOW} iterations\n")
    print("| | recorded: with the hook / without | hook / bare | hook / unprofiled | held, hook | torch's .json.gz | kB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    found = {}
    for name in options.options.split(","):
        found[name] = one = measure(training, name, options.rounds)
        ratios = [each for each in one.values() if hasattr(each, "median")][:3]
        cells = [f"{each.median:.3f} ({each.low:.3f} to {each.high:.3f})" for each in ratios]
        cells += [f"{1e3 * seconds:.0f} ms" for seconds in one["held_s"].values()]
        print(f"| {name} | {' | '.join(cells)} | {one['kb_per_iteration']:.0f} |", flush=True)
    print(json.dumps(found, default=vars))


if __name__ == "__main__":
    main()
