"""Results of the GPU benchmarks as tables: ratios, and the cost of captures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu_rounds import Row
from benchmarks.gpu_sizes import Sizes


def row_lines(rows: Sequence[Row]) -> list[str]:
    """Ratios as a table."""
    lines = []
    for row in rows:
        sides = ", ".join(f"{name} {value:.2f}" for name, value in row.milliseconds.items())
        target = "" if row.target is None else f"   {_target(row.target)}: {row.verdict}"
        note = f"   [{row.note}]" if row.note else ""
        lines.append(
            f"{row.case:24} {row.what:34} {row.ratio.median:.4f} ({row.ratio.low:.4f} to {row.ratio.high:.4f})"
            f"  {row.iterations:5d} a side, {row.ratio.pairs} pairs; ms: {sides}{target}{note}"
        )
    return lines


def _target(target: tuple[float, float]) -> str:
    low, high = target
    return f"{low} to {high}" if low else f"at most {high}"


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
