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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

if __name__ == "__main__":
    # Started by its path, Python looks for modules in benchmarks/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import gpu_cases
from benchmarks.gpu_cases import NSYS, NSYS_SHAPES, TEARDOWN, Case
from benchmarks.gpu_processes import ManyWindows, Place, plain_worker
from benchmarks.gpu_rounds import SETTLE, Bench, median_ms
from benchmarks.gpu_schedule import main
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
    main(COST_CASES, __doc__)
