"""Compares doctor's estimates of trace sizes with real captures, and fits the constants to them.

    python benchmarks/trace_size_fit.py                        # the captures in benchmarks/trace_sizes.json
    python benchmarks/trace_size_fit.py mine.json --fit        # and constants to put into doctor/trace_size.py

A file is a list of captures: `settings` and `options` as overrides, `world_size`, and the `bytes` that one rank had in each
kind of file (`torch`, `torch_raw`, `chakra`, `nsys`, `sqlite`, `memory`; compressed traces at gzip's level 1).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bridge_profiling.doctor.request import Request, apply_arguments
from bridge_profiling.doctor.trace_size import MEASURED, Costs, estimate, readable

CAPTURES = Path(__file__).with_name("trace_sizes.json")

#: Penalty for moving a constant, so that one without captures stays.
_INERTIA = 1e-3


def load(path: Path = CAPTURES) -> list[tuple[dict[str, Any], Request]]:
    """Each capture with its request."""
    return [(capture, _request(capture)) for capture in json.loads(path.read_text(encoding="utf-8"))]


def _request(capture: dict[str, Any]) -> Request:
    request = Request(name=capture["what"], world_size=capture["world_size"])
    apply_arguments(request, f"{capture['settings']} {capture['options']}".split())
    return request


def ratios(
    captures: Sequence[tuple[dict[str, Any], Request]], costs: Costs = MEASURED
) -> Iterator[tuple[str, str, int, float]]:
    """For each file: the capture's name, its kind, its measured bytes, and the estimate relative to them."""
    for capture, request in captures:
        estimated = estimate(request, costs).files
        for kind, size in capture["bytes"].items():
            options = " ".join(option.partition(".")[2].removesuffix("=true") for option in capture["options"].split())
            yield f"{capture['what']}: {options}", kind, size, estimated[kind] / size


def fit(captures: Sequence[tuple[dict[str, Any], Request]], costs: Costs = MEASURED) -> Costs:
    """Constants with the least squared error of the estimates' logarithms: one constant after the other, in smaller steps."""

    def error(tried: Costs) -> float:
        wrong = sum(math.log(ratio) ** 2 for *_, ratio in ratios(captures, tried))
        moved = sum(math.log(value / getattr(costs, name)) ** 2 for name, value in asdict(tried).items())
        return wrong + _INERTIA * moved

    best, least = costs, error(costs)
    for step in (1.5, 1.2, 1.08, 1.03, 1.01):
        improved = True
        while improved:
            improved = False
            for name in asdict(best):
                for factor in (step, 1 / step):
                    tried = replace(best, **{name: getattr(best, name) * factor})
                    if (wrong := error(tried)) < least - 1e-9:
                        best, least, improved = tried, wrong, True
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("captures", nargs="?", type=Path, default=CAPTURES, help="JSON file of captures")
    parser.add_argument("--fit", action="store_true", help="fit the constants, and print them")
    options = parser.parse_args()
    captures = load(options.captures)
    costs = fit(captures) if options.fit else MEASURED
    for name, kind, size, ratio in ratios(captures, costs):
        print(f"{ratio:5.2f} of {readable(size):>8} {kind:10} {name}")
    farthest = max(max(ratio, 1 / ratio) for *_, ratio in ratios(captures, costs))
    print(f"farthest off: a factor of {farthest:.2f}")
    if options.fit:
        for name, value in asdict(costs).items():
            print(f"    {name}: float = {float(f'{value:.2g}'):_g}" + ("" if value == getattr(MEASURED, name) else "  # moved"))


if __name__ == "__main__":
    main()
