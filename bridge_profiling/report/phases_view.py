"""Tables of phases and ranges, from rows of `Run.phases`: one row per name on a terminal, one per name and rank on a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from bridge_profiling.facts.phases import KINDS
from bridge_profiling.facts.sampled import MEASURES
from bridge_profiling.findings import Event
from bridge_profiling.report import counters_view, words
from bridge_profiling.report.tables import most
from bridge_profiling.report.timeline import Timeline
from bridge_profiling.report.views import Cell, Row, TableView, Target, ms, of, table

#: Means over the ranks that have the range.
_MEANS = (
    *("calls", "host_us", "host_share", "device_us", "device_share", "compute_us", "kernel_count", "backward_device_us"),
    *MEASURES,
)

#: Ranges of libraries with this share of an iteration are shown below a verdict.
_LONG = 0.1


def by_name(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of all ranks by name and kind: means over the ranks that have it, and the lowest and highest iteration of any."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["kind"], row["name"]].append(row)
    merged = []
    for (kind, name), mine in found.items():
        means = {column: _of_known(fmean, mine, column) for column in _MEANS}
        low, high = (_of_known(*each) for each in ((min, mine, "host_low_us"), (max, mine, "host_high_us")))
        known = {"kind": kind, "name": name, "ranks": len(mine), "iterations": max(row["iterations"] for row in mine)}
        merged.append(known | means | {"host_low_us": low, "host_high_us": high})
    return sorted(merged, key=lambda row: (KINDS.index(row["kind"]), -(row["host_us"] or 0.0), row["name"]))


def of_run(rows: Sequence[Row], count: int, *, of_device: bool, library: bool = True) -> TableView:
    """One row per name. Without `library`, of the ranges that libraries open those that take the host long are left."""
    merged = by_name(rows)
    if not library and any(row["kind"] == "phase" for row in merged):
        merged = [row for row in merged if row["kind"] != "library" or (row["host_share"] or 0.0) >= _LONG]
    shown, note = most(merged, count)
    columns: dict[str, Callable[[Row], Cell]] = {
        "host ms": ms("host_us"),
        "share": of("host_share", words.percent),
        "lowest": ms("host_low_us"),
        "highest": ms("host_high_us"),
    }
    if of_device:
        columns |= {"device ms": ms("device_us"), "device share": of("device_share", words.percent)}
        columns |= {"backward ms": ms("backward_device_us"), "kernels": of("kernel_count")}
        columns |= counters_view.columns(shown)
    columns |= {"calls": of("calls"), "ranks": of("ranks"), "phase or range": lambda row: Cell(row["name"])}
    title = (
        f"Phases and ranges, {_per(merged)}, mean of the ranks; lowest and highest {'iteration' if _marked(merged) else 'rank'}"
    )
    return table("phases", title, shown, columns, name_last=True, note=note)


def of_ranks(rows: Sequence[Row], count: int, timeline: Timeline, *, of_device: bool) -> TableView:
    """One row per name and rank, sortable, which leads to the longest call in the timeline."""
    shown, note = most(sorted(rows, key=lambda row: -(row["host_us"] or 0.0)), count)
    columns: dict[str, Callable[[Row], Any]] = {
        "kind": lambda row: row["kind"],
        "rank": of("rank", str),
        "host ms": ms("host_us"),
        "share": of("host_share", words.percent),
        "low – high": lambda row: _spread(row, "host"),
    }
    if of_device:
        columns |= {
            "device ms": ms("device_us"),
            "device low – high": lambda row: _spread(row, "device"),
            "backward ms": ms("backward_device_us"),
            "kernels": of("kernel_count"),
            **counters_view.columns(shown),
        }
    else:
        columns |= {"backward ms": ms("backward_host_us"), "calls": of("calls")}
    if any(_place(row, timeline) for row in shown):
        columns["longest"] = lambda row: Cell("", row["longest_us"], target=_place(row, timeline))
    columns["name"] = lambda row: row["name"]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in shown)]
    title = f"Phases and ranges by rank, {_per(rows)}"
    return table("phases", title, shown, columns, name_last=True, filters=kinds, sorted_by=2, note=note)


def _place(row: Row, timeline: Timeline) -> Target | None:
    if row["longest_us"] is None:
        return None
    return timeline.target(
        Event(row["rank"], row["name"], row["longest_iteration"], row["longest_start_ns"], row["longest_us"])
    )


def _spread(row: Row, of_what: str) -> Cell:
    low, high = row[f"{of_what}_low_us"], row[f"{of_what}_high_us"]
    return Cell(words.UNKNOWN if low is None else f"{words.ms(low)} – {words.ms(high)}", high)


def _marked(rows: Sequence[Row]) -> bool:
    return any(row["iterations"] for row in rows)


def _per(rows: Sequence[Row]) -> str:
    return "ms per iteration" if _marked(rows) else "ms in the whole capture"


def _of_known(function: Callable[[list[float]], float], rows: Sequence[Row], column: str) -> float | None:
    known = [row[column] for row in rows if row[column] is not None]
    return function(known) if known else None
