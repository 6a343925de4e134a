"""Hardware counters while kernels ran: columns of other tables, a table and a figure, from rows of `Run.kernel_counters`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

from bridge_profiling.facts.sampled import MEASURES
from bridge_profiling.report import figures, words
from bridge_profiling.report.tables import most
from bridge_profiling.report.views import Cell, Figure, Row, TableView, ms, of, table

#: Colors of groups of kernels, most device time first; the other groups have the last one.
_COLORS = ("compute", "communication", "copy", "host_launch", "data_loading", "unexplained")


def columns(rows: Sequence[Row]) -> dict[str, Callable[[Row], Cell]]:
    """Columns for rows with those of `counters.MEASURES`; none if nothing was measured."""
    if all(row[name] is None for row in rows for name in MEASURES):
        return {}
    return {"SMs active": share("sm_active"), "tensor active": share("tensor_active"), "DRAM": dram}


def share(name: str) -> Callable[[Row], Cell]:
    """Makes cells of a share that may be unknown."""
    return lambda row: Cell(words.UNKNOWN if row[name] is None else words.percent(row[name]), row[name])


def dram(row: Row) -> Cell:
    """Reads and writes of the device's memory as a share of its bandwidth."""
    known = row["dram_read"] is not None and row["dram_write"] is not None
    both = row["dram_read"] + row["dram_write"] if known else None
    return Cell(words.UNKNOWN if both is None else words.percent(both), both)


def of_all_ranks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row per kernel, most device time first: means weighted by device time."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["name"]].append(row)
    merged = []
    for mine in found.values():
        total = sum(row["device_us"] for row in mine)
        means = {name: mean(mine, name) for name in (*MEASURES, "memory_tb_s", "dram_tb_s", "samples_per_call")}
        merged.append({**mine[0], "count": sum(row["count"] for row in mine), "device_us": total, **means})
    return sorted(merged, key=lambda row: -row["device_us"])


def kernel_counters(rows: Sequence[Row], count: int) -> TableView:
    """The kernels that take the most device time."""
    merged = of_all_ranks(rows)
    shown, note = most(merged, count)
    unknown = [row for row in merged if row["samples_per_call"] < 1]
    if unknown:
        spent = sum(row["device_us"] for row in unknown) / sum(row["device_us"] for row in rows)
        shorter = "1 kernel is" if len(unknown) == 1 else f"{len(unknown):,} kernels are"
        note += (
            f" {shorter} shorter than the time between two samples ({words.percent(spent)} of the device time), which leaves"
            " their counters unknown. nsys_extra_args=--gpu-metrics-frequency=200000 samples more often."
        )
    made: Mapping[str, Callable[[Row], Any]] = {
        "group": lambda row: row["group"],
        "count": of("count"),
        "device ms": ms("device_us"),
        "SMs active": share("sm_active"),
        "tensor active": share("tensor_active"),
        "DRAM read": share("dram_read"),
        "DRAM write": share("dram_write"),
        "DRAM TB/s": lambda row: Cell(words.number(row["dram_tb_s"] and round(row["dram_tb_s"], 2)), row["dram_tb_s"]),
        "kernel": lambda row: words.short(row["name"]),
    }
    groups = sorted({row["group"] for row in shown})
    title = "Hardware counters while each kernel ran, as shares of the peak, sampled by nsys"
    return table("kernel-counters", title, shown, made, name_last=True, filters=groups, sorted_by=2, note=note.strip())


def counters_figure(rows: Sequence[Row]) -> Figure | None:
    """Each kernel between the device's memory and its tensor cores; None where neither was measured."""
    points = [row for row in of_all_ranks(rows) if row["tensor_active"] is not None and dram(row).value is not None]
    if not points:
        return None
    groups = list(dict.fromkeys(row["group"] for row in points))
    traces = []
    for place, group in enumerate(groups):
        mine = [row for row in points if row["group"] == group]
        color = figures.COLORS[_COLORS[min(place, len(_COLORS) - 1)]]
        traces.append(_points(group, mine, points[0]["device_us"], color))
    axes = {
        "xaxis": figures.axis("device memory, % of its bandwidth", range=[-2, 102]),
        "yaxis": figures.axis("tensor cores active, %", range=[-2, 102]),
    }
    return figures.figure(traces, 380, margin={"l": 70, "r": 20, "t": 20, "b": 60}, **axes)


def _points(group: str, rows: Sequence[Row], longest_us: float, color: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": group,
        "x": [round(100 * (dram(row).value or 0.0), 1) for row in rows],
        "y": [round(100 * row["tensor_active"], 1) for row in rows],
        "customdata": [[row["name"][:120], round(row["device_us"] / 1e3, 3), row["dram_tb_s"] or 0.0] for row in rows],
        # Areas are as the times, down to a size that can be seen.
        "marker": {
            "color": color,
            "opacity": 0.75,
            "size": [round(max(30 * sqrt(row["device_us"] / longest_us), 6), 1) for row in rows],
        },
        "hovertemplate": "%{customdata[0]}<br>memory %{x:.0f}% (%{customdata[2]:.2f} TB/s), tensor cores %{y:.0f}%<br>"
        "%{customdata[1]:.2f} ms<extra></extra>",
    }


def mean(rows: Sequence[Row], name: str) -> float | None:
    """The mean of a column, weighted by device time; None if nothing is known."""
    known = [(row[name], row["device_us"]) for row in rows if row[name] is not None]
    weight = sum(spent for _, spent in known)
    return sum(value * spent for value, spent in known) / weight if weight else None
