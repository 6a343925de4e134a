"""The page's sections about work: kernels and operators, communication by group, memory by allocation site."""

from __future__ import annotations

from typing import Any

from bridge_profiling.report import wording
from bridge_profiling.report.answers import Answers, Rows
from bridge_profiling.report.figures.communication import MOST_GROUPS, by_group, communication_figure
from bridge_profiling.report.figures.memory import memory_figure
from bridge_profiling.report.page_parts import Cell, Figures, SortableTable, Table

#: Rows of kernels and of operators on the page; the rest is in the JSON.
_MOST_ROWS = 250

#: A name longer than this helps nobody: the middle goes.
_NAME = 600


def kernel_tables(answers: Answers) -> list[SortableTable]:
    """Kernels and host operators, sortable and filterable.

    Args:
        answers: about the run.
    """
    return [table for table in (_kernels(answers.kernels), _operators(answers)) if table.rows]


def communication_section(answers: Answers, figures: Figures) -> dict[str, Any]:
    """Each kind of communication in each group; of many groups, those of one name as one.

    Args:
        answers: about the run.
        figures: the section's are added.
    """
    iterations = len({row["iteration"] for row in answers.iterations}) or 1
    rows = by_group(answers.communication, iterations)
    if not rows:
        return {}
    shown = rows[:MOST_GROUPS]
    if any(row["transfer_us"] is not None for row in shown):
        figures["communication"] = {"communication": communication_figure(shown)}
    table = Table(
        [
            "operation", "group", "ranks", "times an iteration", "bytes an iteration", "transfer", "waiting", "algorithm GB/s",
            "bus GB/s",
        ],
        [
            [
                row["operation"] or "?",
                row["group"],
                row["ranks"],
                wording.number(row["count"]),
                wording.size(row["bytes"]),
                *(wording.milliseconds(row[name]) for name in ("transfer_us", "wait_us")),
                *(wording.bandwidth(row[name]) for name in ("algorithm_bandwidth_gbs", "bus_bandwidth_gbs")),
            ]
            for row in shown
        ],
    )  # fmt: skip
    return {"table": table, "left_out": len(rows) - len(shown), "iterations": iterations}


def memory_section(answers: Answers, figures: Figures) -> dict[str, Any]:
    """Memory over time of the ranks drawn, and the peaks.

    Args:
        answers: about the run.
        figures: the section's are added.
    """
    if not answers.memory:
        return {}
    variants = {}
    for key in sorted({*answers.memory_timeline, *answers.memory_by_site}):
        by_site, timeline = answers.memory_by_site.get(key, []), answers.memory_timeline.get(key, [])
        variants[f"rank {key[0]}, device {key[1]}"] = memory_figure(by_site, timeline)
    if variants:
        figures["memory"] = variants
    rows = sorted(answers.memory, key=lambda row: -(row["peak_bytes"] or 0))[:16]
    table = Table(
        ["", "from", "peak", "at the end", "reserved at most", "growth an iteration", "fragmentation"],
        [
            [
                f"rank {row['rank']}, device {row['device']}",
                "snapshot" if row["source"] == "snapshot" else "trace",
                *(wording.mebibytes(row[name]) for name in ("peak_bytes", "end_bytes", "peak_reserved_bytes")),
                wording.mebibytes(row["growth_bytes_per_iteration"]),
                wording.percent(row["fragmentation"]),
            ]
            for row in rows
        ],
    )
    return {
        "table": table,
        "figures": list(variants),
        "sites": any(answers.memory_by_site.values()),
        "left_out": len(answers.memory) - len(rows),
    }


def _kernels(rows: Rows) -> SortableTable:
    total_us = sum(row["total_us"] for row in rows) or 1.0
    lines = []
    for row in rows[:_MOST_ROWS]:
        kind = row["backend"] or row["kind"]
        cells = [
            Cell(kind),
            Cell(wording.number(row["count"]), row["count"]),
            Cell(f"{row['total_us'] / 1e3:,.2f}", row["total_us"]),
            Cell(wording.percent(row["total_us"] / total_us), row["total_us"] / total_us),
            *(Cell(f"{row[name]:,.1f}", row[name]) for name in ("mean_us", "min_us", "max_us")),
            Cell(_shortened(row["name"])),
        ]
        lines.append((kind, cells))
    return SortableTable(
        "kernels",
        "Kernels of all ranks, over the whole capture",
        ["kind", "count", "total ms", "share", "mean µs", "min µs", "max µs", "name"],
        lines,
        sorted({kind for kind, _ in lines}),
        2,
        len(rows) - len(lines),
    )


def _operators(answers: Answers) -> SortableTable:
    lines = []
    for row in answers.operators[:_MOST_ROWS]:
        cells = [
            Cell(wording.number(row["count"]), row["count"]),
            *(Cell(f"{row[name] / 1e3:,.2f}", row[name]) for name in ("self_us", "total_us", "device_us")),
            Cell(f"{row['max_us']:,.1f}", row["max_us"]),
            Cell(_shortened(row["name"])),
        ]
        lines.append(("", cells))
    return SortableTable(
        "operators",
        f"Host operators of {wording.ranks(answers.operator_ranks)}, over the whole capture",
        ["count", "own ms", "total ms", "device ms", "longest µs", "name"],
        lines,
        [],
        1,
        len(answers.operators) - len(lines),
    )


def _shortened(name: str | None) -> str:
    name = name or "?"
    return name if len(name) <= _NAME else f"{name[: _NAME // 2]} … {name[-_NAME // 2 :]}"
