"""What a capture costs: bytes and seconds for each captured iteration, for each option, at several sizes of the model.

    python benchmarks/trace_cost.py [--seconds 200] [--cases cost-torch] [--json FILE]

Windows of 3 and of 8 iterations are captured in one process, after an uncounted one, to separate the cost of an iteration from
that of a capture. Models of several layers and micro-batches separate the cost of layers x micro-batches from that of an
iteration. Held is the additional duration of the window's last iteration: stopping the profiler and writing, as far as the
training waits for it. Background is the writing while the training continues. Raw is the first file written: Kineto's JSON
before compression, and nsys' recording before it becomes a report. gpu_overhead.py runs these cases too, and divides the
machine among all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

if __name__ == "__main__":
    # Started by its path, Python looks for modules in benchmarks/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from benchmarks import gpu_cases
from benchmarks.gpu_cases import NSYS, NSYS_SHAPES, TEARDOWN, Case
from benchmarks.gpu_processes import ManyWindows, Place, plain_worker
from benchmarks.gpu_rounds import SETTLE, Bench, median_ms
from benchmarks.gpu_sizes import Sizes

#: Iterations of the windows; the first is not counted.
_WINDOWS = (2, 3, 8)

_TORCH = {
    "torch": gpu_cases.TORCH,
    "torch +shapes": gpu_cases.SHAPES,
    "torch +stacks": gpu_cases.STACKS,
    "torch +memory": gpu_cases.MEMORY_EVENTS,
    "torch +chakra": gpu_cases.CHAKRA,
    "torch, all four": gpu_cases.ALL,
}
_HISTORY = {"memory history": gpu_cases.HISTORY}


def torch_cost(bench: Bench, sizes: Sizes) -> None:
    """The torch profiler's options, and the memory history."""
    place = Place(bench.place.lane, bench.place.scratch, bench.place.environment | TEARDOWN)
    options = _TORCH | (_HISTORY if bench.cuda else {})
    with plain_worker(place, sizes) as worker:
        usual = median_ms(worker.ask("plain", settle=0, count=60)["durations"])
        for option, profiling in options.items():
            for number, window in enumerate(_WINDOWS):
                found = worker.ask("hook", profiling=profiling, settle=SETTLE, count=window, seconds=180)
                if number:
                    kept, raw = (sum(one[key] for one in found["artifacts"]) for key in ("bytes", "raw_bytes"))
                    chakra = sum(one["bytes"] for one in found["artifacts"] if one["path"].endswith(".et.json"))
                    entry = {
                        "kept_bytes": kept,
                        "raw_bytes": raw,
                        "chakra_bytes": chakra,
                        "background_s": found["background_s"],
                    }
                    _keep(bench, option, sizes, window, found["durations"], usual, entry)


def nsys_cost(bench: Bench, option: str, profiling: dict[str, Any], sizes: Sizes) -> None:
    """One set of nsys' options; nsys makes the reports when the training has ended, and then they are exported to SQLite."""
    costs = bench.results.costs
    with ManyWindows(bench.place, sizes, profiling, reports=True) as nsys:
        usual = median_ms(nsys.worker.ask("plain", settle=0, count=60)["durations"])
        for number, window in enumerate(_WINDOWS):
            found = nsys.window("hook", profiling=profiling, settle=SETTLE, count=window)
            if number:
                entry = {"kept_bytes": None, "raw_bytes": found["recorded_bytes"], "background_s": None}
                _keep(bench, option, sizes, window, found["durations"], usual, entry)
    bench.results.facts["nsys"] = nsys.about()
    for entry, report in zip(costs, nsys.reports()[1:], strict=True):
        entry["kept_bytes"] = report.stat().st_size
        target = report.with_suffix(".sqlite")
        began = monotonic()
        command = ["nice", nsys.executable, "export", "--type=sqlite", "--quiet=true", f"--output={target}", str(report)]
        subprocess.run(command, capture_output=True, timeout=120, check=True)
        entry["sqlite_bytes"], entry["sqlite_s"] = target.stat().st_size, monotonic() - began
        target.unlink()


def _keep(
    bench: Bench, option: str, sizes: Sizes, window: int, durations: list[int], usual: float, found: dict[str, Any]
) -> None:
    """Record the cost of one window."""
    captured = durations[-window:]
    inside = median_ms(captured[1:-1])
    bench.results.costs.append(
        {
            "option": option,
            **asdict(sizes),
            "tp": 1,
            "pp": 1,
            "units": sizes.layers * sizes.micro_batches,
            "window": window,
            "unprofiled_ms": usual,
            "inside_ms": inside,
            "armed_ms": durations[SETTLE - 1] / 1e6,
            "first_ms": captured[0] / 1e6,
            "held_s": (captured[-1] / 1e6 - inside) / 1e3,
            **found,
        }
    )


def per_iteration(costs: Iterable[Mapping[str, Any]], key: str) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Cost of each captured iteration and of every capture, from windows of different lengths.

    Args:
        costs: the costs of windows.
        key: the cost: bytes or seconds.

    Returns:
        By option, layers, micro-batches and recompute: (per iteration, per capture).
    """
    windows: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for one in costs:
        if one.get(key) is not None:
            name = (one["option"], one["layers"], one["micro_batches"], one["recompute"])
            windows.setdefault(name, []).append((one["window"], one[key]))
    return {name: _line(points) for name, points in windows.items() if len({window for window, _ in points}) > 1}


def per_unit(costs: Iterable[Mapping[str, Any]], key: str) -> dict[str, tuple[float, float]]:
    """Cost of one layer of one micro-batch and of every iteration, from models of several sizes.

    Args:
        costs: the costs of windows; those with recompute are left out.
        key: the cost: bytes or seconds.

    Returns:
        By option: (per layer and micro-batch, per iteration).
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for (option, layers, micro_batches, recompute), (each, _) in per_iteration(costs, key).items():
        if not recompute:
            points.setdefault(option, []).append((layers * micro_batches, each))
    return {option: _line(found) for option, found in points.items() if len({units for units, _ in found}) > 1}


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line through these points."""
    slope, intercept = np.polyfit(*zip(*points, strict=True), 1)
    return float(slope), float(intercept)


def cost_lines(costs: Sequence[Mapping[str, Any]], *, summary: bool = False) -> list[str]:
    """Costs of captures, as tables.

    Args:
        costs: the costs of windows.
        summary: whether to summarize all of them instead of listing each.
    """
    if not costs:
        return []
    if not summary:
        return [_cost_line(one) for one in costs]
    lines = ["", "each captured iteration adds, and every capture has (kept, raw and SQLite: kB; held and background: ms):"]
    scales = {"kept_bytes": 1e3, "raw_bytes": 1e3, "sqlite_bytes": 1e3, "held_s": 1e-3, "background_s": 1e-3}
    parts = {key: per_iteration(costs, key) for key in scales}
    for name in parts["kept_bytes"]:
        option, layers, micro_batches, recompute = name
        found = [
            f"{key.rsplit('_', 1)[0]} {parts[key][name][0] / scale:.1f} + {parts[key][name][1] / scale:.0f}"
            for key, scale in scales.items()
            if name in parts[key]
        ]
        size = Sizes(layers, micro_batches, recompute)
        lines.append(f"{option:24} {size!s:14} {layers * micro_batches:3d} units   " + ",  ".join(found))
    lines += ["", "each layer of a micro-batch adds, and every iteration has (bytes; no recompute):"]
    fits = {key: per_unit(costs, key) for key in ("kept_bytes", "raw_bytes", "sqlite_bytes")}
    for option in fits["kept_bytes"]:
        found = [f"{key} {fit[option][0]:.0f} + {fit[option][1]:.0f}" for key, fit in fits.items() if option in fit]
        lines.append(f"{option:24} " + ",  ".join(found))
    return lines


def _cost_line(one: Mapping[str, Any]) -> str:
    size = Sizes(one["layers"], one["micro_batches"], one["recompute"])
    kept = "not known" if one["kept_bytes"] is None else f"{one['kept_bytes'] / 1e6:.3f} MB"
    raw = f"{one['raw_bytes'] / 1e6:.3f} MB"
    sqlite = f", SQLite {one['sqlite_bytes'] / 1e6:.3f} MB in {one['sqlite_s']:.1f} s" if "sqlite_bytes" in one else ""
    background = "" if one["background_s"] is None else f", background {one['background_s']:.3f} s"
    return (
        f"{one['option']:24} {size!s:14} {one['window']:2d} iterations: {kept} kept, {raw} raw{sqlite};"
        f" step {one['unprofiled_ms']:.1f} -> {one['inside_ms']:.1f} ms, armed {one['armed_ms']:.1f},"
        f" first {one['first_ms']:.1f}, held {one['held_s']:.3f} s{background}"
    )


def _torch_case(sizes: Sizes, fixed: float) -> Case:
    name = f"cost-torch-{sizes}"
    return Case(name, 0, fixed, partial(torch_cost, sizes=sizes), cuda=sizes.recompute)


def _nsys_case(option: str, profiling: dict[str, Any], sizes: Sizes) -> Case:
    name = f"cost-{option.replace(' +', '-').replace(' ', '-').lower()}-{sizes}"
    return Case(name, 0, 40, partial(nsys_cost, option=option, profiling=profiling, sizes=sizes), nsys=True)


_SMALL, _MIDDLE, _LARGE, _RECOMPUTED = Sizes(2, 2), Sizes(6, 2), Sizes(3, 8), Sizes(6, 2, recompute=True)
_SWITCHES = NSYS | {"nsys_extra_args": ["--cpuctxsw=process-tree"]}
_BACKTRACES = NSYS | {"nsys_extra_args": ["--cudabacktrace=all", "--sample=process-tree"]}

COST_CASES = (
    _torch_case(_LARGE, 90),
    _torch_case(_MIDDLE, 60),
    _torch_case(_RECOMPUTED, 70),
    _torch_case(_SMALL, 40),
    *(_nsys_case("nsys", NSYS, sizes) for sizes in (_SMALL, _MIDDLE, _LARGE)),
    _nsys_case("nsys +shapes", NSYS_SHAPES, _MIDDLE),
    _nsys_case("nsys +context switches", _SWITCHES, _MIDDLE),
    _nsys_case("nsys +CUDA backtraces", _BACKTRACES, _MIDDLE),
)

if __name__ == "__main__":
    from benchmarks.gpu_overhead import main

    main(COST_CASES, __doc__)
