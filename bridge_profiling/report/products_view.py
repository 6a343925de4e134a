"""The table of matrix products, convolutions and attention, from rows of `Run.matrix_products`: those of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_profiling.report import words
from bridge_profiling.report.tables import most
from bridge_profiling.report.views import Cell, Row, TableView, ms, of, table

_KEYS = ("operator", "shapes", "precision", "flops", "flops_per_byte", "peak_tflops")


def matrix_products(rows: Sequence[Row], count: int) -> TableView:
    """One row per operator, shapes and precision, most device time first."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        sums = found.setdefault(tuple(row[key] for key in _KEYS), {**row, "count": 0, "device_us": 0.0})
        sums |= {"count": sums["count"] + row["count"], "device_us": sums["device_us"] + row["device_us"]}
    for sums in found.values():
        speed = sums["flops"] * sums["count"] / sums["device_us"] / 1e6 if sums["flops"] and sums["device_us"] else None
        share = speed / sums["peak_tflops"] if speed and sums["peak_tflops"] else None
        sums |= {"tflops": speed, "share_of_peak": share}
    shown, note = most(sorted(found.values(), key=lambda row: -row["device_us"]), count)
    columns = {
        "operator": lambda row: row["operator"],
        "count": of("count"),
        "device ms": ms("device_us"),
        "GFLOP a call": lambda row: Cell(words.number(row["flops"] and row["flops"] / 1e9), row["flops"]),
        "TFLOP/s": lambda row: Cell(words.number(row["tflops"] and round(row["tflops"], 1)), row["tflops"]),
        "of peak": of("share_of_peak", words.percent),
        "FLOP/byte": lambda row: Cell(
            words.number(row["flops_per_byte"] and round(row["flops_per_byte"], 1)), row["flops_per_byte"]
        ),
        "precision": lambda row: row["precision"] or words.UNKNOWN,
        "input shapes": lambda row: row["shapes"],
    }
    operators = sorted({row["operator"] for row in shown})
    title = "Matrix products, convolutions and attention of all ranks, by input shapes"
    return table("products", title, shown, columns, name_last=True, filters=operators, sorted_by=2, note=note)
