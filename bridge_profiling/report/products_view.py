"""Matrix products, convolutions and attention of all ranks: a table and a roofline, from rows of `Run.matrix_products`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

from bridge_profiling.report import counters_view, figures, words
from bridge_profiling.report.tables import most
from bridge_profiling.report.views import Cell, Figure, Row, TableView, ms, of, table

_KEYS = ("operator", "shapes", "precision", "flops", "flops_per_byte", "peak_tflops", "memory_tb_s", "roof_tflops")

#: The least and the greatest arithmetic intensity of a figure, in FLOP per byte.
_LEAST, _GREATEST = 1.0, 10_000.0

#: Colors of precisions.
_COLORS = ("compute", "communication", "copy", "host_launch", "data_loading")


def of_all_ranks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row per operator, shapes and precision of a kind of device, most device time first."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in _KEYS)].append(row)
    merged = []
    for mine in found.values():
        count, spent_us = (sum(row[name] for row in mine) for name in ("count", "device_us"))
        sums = {**mine[0], "count": count, "device_us": spent_us}
        speed = sums["flops"] * count / spent_us / 1e6 if sums["flops"] and spent_us else None
        shares = [speed / sums[most] if speed and sums[most] else None for most in ("peak_tflops", "roof_tflops")]
        sums |= {"tflops": speed, "share_of_peak": shares[0], "share_of_roof": shares[1]}
        sums |= {name: counters_view.mean(mine, name) for name in ("tensor_active", "dram_tb_s")}
        sums["measured_flops_per_byte"] = speed / sums["dram_tb_s"] if speed and sums["dram_tb_s"] else None
        merged.append(sums)
    return sorted(merged, key=lambda row: -row["device_us"])


def matrix_products(rows: Sequence[Row], count: int) -> TableView:
    """The rows that take the most device time."""
    shown, note = most(of_all_ranks(rows), count)
    columns = {
        "operator": lambda row: row["operator"],
        "count": of("count"),
        "device ms": ms("device_us"),
        "GFLOP a call": lambda row: Cell(words.number(row["flops"] and row["flops"] / 1e9), row["flops"]),
        "TFLOP/s": lambda row: Cell(words.number(row["tflops"] and round(row["tflops"], 1)), row["tflops"]),
        "of peak": of("share_of_peak", words.percent),
        "of roof": of("share_of_roof", words.percent),
        "FLOP/byte": lambda row: Cell(
            words.number(row["flops_per_byte"] and round(row["flops_per_byte"], 1)), row["flops_per_byte"]
        ),
        **(_measured() if any(row["measured_flops_per_byte"] for row in shown) else {}),
        "precision": lambda row: row["precision"] or words.UNKNOWN,
        "input shapes": lambda row: row["shapes"],
    }
    operators = sorted({row["operator"] for row in shown})
    title = "Matrix products, convolutions and attention of all ranks, by input shapes"
    return table("products", title, shown, columns, name_last=True, filters=operators, sorted_by=2, note=note)


def _measured() -> dict[str, Callable[[Row], Cell]]:
    return {
        "measured": lambda row: Cell(
            words.number(row["measured_flops_per_byte"] and round(row["measured_flops_per_byte"], 1)),
            row["measured_flops_per_byte"],
        ),
        "DRAM TB/s": lambda row: Cell(words.number(row["dram_tb_s"] and round(row["dram_tb_s"], 2)), row["dram_tb_s"]),
        "tensor active": counters_view.share("tensor_active"),
    }


def roofline(rows: Sequence[Row]) -> Figure | None:
    """Speed by arithmetic intensity, below what the device's peak and its memory allow; None where either is unknown."""
    points = [row for row in of_all_ranks(rows) if row["roof_tflops"] and row["tflops"]]
    if not points:
        return None
    traces: list[dict[str, Any]] = []
    for precision, color in zip(sorted({row["precision"] for row in points}), itertools.cycle(_COLORS), strict=False):
        mine = [row for row in points if row["precision"] == precision]
        roofs = sorted({(row["peak_tflops"], row["memory_tb_s"]) for row in mine})
        traces += [_roof(precision, peak, bandwidth, figures.COLORS[color]) for peak, bandwidth in roofs]
        traces.append(_points(precision, mine, points[0]["device_us"], figures.COLORS[color]))
        if measured := [row for row in mine if row["measured_flops_per_byte"]]:
            traces.append(_measured_points(precision, measured, figures.COLORS[color]))
    axes = {"xaxis": figures.axis("FLOP per byte", type="log"), "yaxis": figures.axis("TFLOP/s", type="log")}
    return figures.figure(traces, 380, margin={"l": 70, "r": 20, "t": 20, "b": 60}, **axes)


def _roof(precision: str, peak: float, bandwidth: float, color: str) -> dict[str, Any]:
    ridge = peak / bandwidth
    intensities = sorted({_LEAST, min(max(ridge, _LEAST), _GREATEST), _GREATEST})
    text = f"{peak:,.0f} TFLOP/s of {precision} from {ridge:,.0f} FLOP per byte on; memory of {bandwidth:g} TB/s"
    return {
        "type": "scatter",
        "mode": "lines",
        "x": intensities,
        "y": [round(min(peak, intensity * bandwidth), 3) for intensity in intensities],
        "line": {"color": color, "width": 1.5},
        "showlegend": False,
        "text": [text] * len(intensities),
        "hovertemplate": "%{text}<extra></extra>",
    }


def _measured_points(precision: str, rows: Sequence[Row], color: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{precision}, measured traffic",
        "x": [round(row["measured_flops_per_byte"], 3) for row in rows],
        "y": [round(row["tflops"], 3) for row in rows],
        "customdata": [[row["operator"], row["shapes"][:120], round(row["dram_tb_s"], 3)] for row in rows],
        "marker": {"color": color, "symbol": "diamond-open", "size": 10},
        "hovertemplate": "%{customdata[0]} %{customdata[1]}<br>%{y:.1f} TFLOP/s at %{x:.1f} FLOP per byte of measured traffic, "
        "%{customdata[2]:.2f} TB/s<extra></extra>",
    }


def _points(precision: str, rows: Sequence[Row], longest_us: float, color: str) -> dict[str, Any]:
    # Areas are as the times, down to a size that can be seen.
    sizes = [round(max(30 * sqrt(row["device_us"] / longest_us), 6), 1) for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": precision,
        "x": [round(row["flops_per_byte"], 3) for row in rows],
        "y": [round(row["tflops"], 3) for row in rows],
        "customdata": [
            [row["operator"], row["shapes"][:120], round(row["share_of_roof"], 4), round(row["device_us"] / 1e3, 3)]
            for row in rows
        ],
        "marker": {"color": color, "opacity": 0.75, "size": sizes},
        "hovertemplate": "%{customdata[0]} %{customdata[1]}<br>%{y:.1f} TFLOP/s at %{x:.1f} FLOP per byte, "
        "%{customdata[2]:.0%} of what is possible<br>%{customdata[3]:.2f} ms<extra></extra>",
    }
