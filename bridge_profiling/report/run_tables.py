"""A run's numbers as tables to read: boxes on a terminal, plain aligned columns in a pipe. Formats answers, computes none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.attribution.device import ranks_without_work

#: Kernels, groups and copies shown; the rest is in the JSON.
_SHOWN = 10

#: Ranks shown on a terminal. A pipe gets them all.
_RANKS_ON_A_TERMINAL = 16

_NAME_WIDTH = 90


@dataclass(frozen=True)
class Section:
    """A table in words.

    Args:
        title: what it shows, with the unit.
        columns: their headings. Numbers are aligned right, all but the last column.
        rows: a text per column.
        of_ranks: there is a row per rank, or more: on a terminal only the first are shown.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    of_ranks: bool = False


def sections(run: Run) -> list[Section]:
    """What `analyze` shows of a run; the questions are asked now.

    Args:
        run: whose captures are read, unless they were.
    """
    questions = (
        _device,
        _iterations,
        _kernels,
        _communication,
        _beside_alone,
        _ranks,
        _stragglers,
        _pipeline,
        _copies,
        _memory,
    )
    return [section for question in questions if (section := question(run)).rows]


def print_sections(found: Sequence[Section], limitations: Sequence[str], console: Console) -> None:
    """Print tables, then what the captures cannot tell.

    Args:
        found: what `sections` gave.
        limitations: sentences.
        console: where to.
    """
    for section in found:
        if console.is_terminal:
            console.print(_boxed(section))
        else:
            _print_plain(section, console)
    if limitations:
        console.print(Text("limitations", style="bold"), soft_wrap=True)
        for sentence in limitations:
            console.print(Text(f"- {sentence}"), soft_wrap=True)


def _boxed(section: Section) -> Table:
    hidden = len(section.rows) - _RANKS_ON_A_TERMINAL if section.of_ranks else 0
    caption = f"and {hidden} more ranks: --json has them" if hidden > 0 else None
    table = Table(title=section.title, title_justify="left", caption=caption, caption_justify="left")
    for place, heading in enumerate(section.columns):
        last = place == len(section.columns) - 1
        # What is at the right may be long: a name.
        table.add_column(heading, justify="left" if last else "right", overflow="ellipsis" if last else "fold", no_wrap=True)
    for row in section.rows[:_RANKS_ON_A_TERMINAL] if hidden > 0 else section.rows:
        table.add_row(*(Text(text) for text in row))
    return table


def _print_plain(section: Section, console: Console) -> None:
    lines = [section.columns, *section.rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(section.columns) - 1)]
    console.print(Text(section.title), soft_wrap=True)
    for line in lines:
        columns = [text.rjust(width) for text, width in zip(line, widths, strict=False)]
        console.print(Text("  ".join([*columns, line[-1]])), soft_wrap=True)
    console.print()


def _device(run: Run) -> Section:
    columns = {
        "span": "span_us",
        "busy": "busy_us",
        "idle": "idle_us",
        "compute": "compute_us",
        "communication": "communication_us",
        "exposed": "exposed_communication_us",
        "memcpy": "memcpy_us",
        "memset": "memset_us",
    }
    rows = [
        [str(row["rank"]), *(_ms(row[name]) for name in columns.values()), str(row["kernel_count"]), row["source"]]
        for row in _rows(run.breakdown())
    ]
    return Section("device time over the whole capture, ms", ["rank", *columns, "kernels", "source"], rows, of_ranks=True)


def _iterations(run: Run) -> Section:
    columns = {
        "duration": "duration_us",
        "compute": "compute_us",
        "exposed communication": "exposed_communication_us",
        "idle": "idle_us",
        "launch-starved": "launch_starved_us",
        "blocked": "blocked_us",
        "dependency-stalled": "dependency_stalled_us",
    }
    work = run.breakdown()
    on_cpu = {source: ranks_without_work(work, source) for source in set(work["source"].to_pylist())}
    rows = []
    for row in _rows(run.typical_iteration()):
        # No device was idle there, and none starved.
        told = {"duration_us"} if row["rank"] in on_cpu.get(row["source"], ()) else set(columns.values())
        times = [_ms(row[name]) if name in told else "-" for name in columns.values()]
        rows.append([str(row["rank"]), *times, f"median of {row['iterations']}"])
    return Section("a typical iteration, ms", ["rank", *columns, "iterations"], rows, of_ranks=True)


def _kernels(run: Run) -> Section:
    found = _rows(run.kernels(by_rank=False))
    total_us = sum(row["total_us"] for row in found)
    rows = [
        [
            row["backend"] or row["kind"],
            str(row["count"]),
            _ms(row["total_us"]),
            f"{row['total_us'] / total_us:.1%}" if total_us else "-",
            *(f"{row[name]:.1f}" for name in ("mean_us", "min_us", "max_us")),
            row["name"][:_NAME_WIDTH],
        ]
        for row in found[:_SHOWN]
    ]
    headings = ["kind", "count", "total ms", "share", "mean µs", "min µs", "max µs", "name"]
    return Section(f"kernels of all ranks, {len(rows)} of {len(found)} by total time", headings, rows)


def _communication(run: Run) -> Section:
    found = sorted(_rows(run.communication()), key=lambda row: -((row["transfer_us"] or 0) + (row["wait_us"] or 0)))
    rows = [
        [
            row["operation"] or "?",
            str(row["count"]),
            _optional(row["bytes"], lambda size: f"{size / 1e6:.1f}"),
            _optional(row["transfer_us"], _ms),
            _optional(row["wait_us"], _ms),
            _optional(row["bus_bandwidth_gbs"], lambda speed: f"{speed:.1f}"),
            " ".join(str(part) for part in (row["group"], row["group_ranks"]) if part is not None),
        ]
        for row in found[:_SHOWN]
    ]
    headings = ["operation", "count", "MB", "transfer ms", "waiting ms, all ranks", "bus GB/s", "group"]
    return Section(f"communication, {len(rows)} of {len(found)} kinds", headings, rows)


def _beside_alone(run: Run) -> Section:
    bench = run.against_bench
    found = [] if bench is None else sorted(bench.communication.to_pylist(), key=lambda row: -(row["transfer_us"] or 0.0))
    rows = [
        [
            row["operation"],
            f"{row['compared_count']} of {row['count']}",
            *(_optional(row[name], _ms) for name in ("transfer_us", "alone_us")),
            *(_optional(row[name], lambda speed: f"{speed:.1f}") for name in ("bus_bandwidth_gbs", "alone_bus_bandwidth_gbs")),
            _optional(row["reached_share"], lambda share: f"{share:.0%}"),
            " ".join(str(part) for part in (row["group"], row["group_ranks"], row["reason"]) if part is not None),
        ]
        for row in found[:_SHOWN]
    ]
    headings = [
        "operation",
        "compared",
        "transfer ms",
        "alone ms",
        "bus GB/s",
        "alone",
        "reached",
        "group, and what is not compared",
    ]
    title = "" if bench is None else f"communication beside what its links give alone ({bench.path})"
    return Section(title, headings, rows)


def _ranks(run: Run) -> Section:
    rows = [
        [
            str(row["iteration"]),
            str(row["rank"]),
            *(_optional(row[name], _ms) for name in ("duration_us", "own_us", "waiting_us", "waited_for_us")),
            row["place"] or "",
        ]
        for row in _rows(run.ranks())
    ]
    headings = ["iteration", "rank", "duration", "own", "waits for others", "others wait for it", ""]
    return Section("ranks against each other, ms", headings, rows, of_ranks=True)


def _stragglers(run: Run) -> Section:
    rows = [
        [
            str(row["rank"]),
            *(_optional(row[name], _ms) for name in ("excess_own_us", "excess_compute_us", "waited_for_us")),
            f"{row['times_slow']} of {row['iterations']}",
            row["verdict"] + (f" ({row['confidence']} confidence)" if row["confidence"] else ""),
        ]
        for row in _rows(run.stragglers())
    ]
    headings = ["rank", "own beyond the mean", "compute beyond the mean", "others waited", "iterations slow", "slow"]
    return Section("stragglers, ms", headings, rows, of_ranks=True)


def _pipeline(run: Run) -> Section:
    rows = [
        [
            f"{row['stage']} of {row['stages']}",
            *(_ms(row[name]) for name in ("pipeline_us", "compute_us", "bubble_us", "other_idle_us")),
            f"{row['bubble_fraction']:.1%}" if row["bubble_fraction"] is not None else "-",
            f"{row['ideal_bubble_fraction']:.1%}" if row["ideal_bubble_fraction"] is not None else "-",
            ", ".join(str(rank) for rank in row["ranks"]),
        ]
        for row in _rows(run.pipeline())
    ]
    headings = ["stage", "pipeline", "compute", "bubble", "other idle", "bubble share", "at best", "ranks"]
    return Section("pipeline stages, ms of an iteration", headings, rows)


def _copies(run: Run) -> Section:
    found = _rows(run.copies())
    found.sort(key=lambda row: -row["total_us"])
    rows = [
        [
            str(row["rank"]),
            str(row["count"]),
            _optional(row["bytes"], lambda size: f"{size / 1e6:.1f}"),
            _ms(row["total_us"]),
            _optional(row["bandwidth_gbs"], lambda speed: f"{speed:.1f}"),
            f"{row['direction']} {row['from_memory']} to {row['to_memory']}",
        ]
        for row in found[:_SHOWN]
    ]
    return Section(f"copies, {len(rows)} of {len(found)} kinds", ["rank", "count", "MB", "total ms", "GB/s", "kind"], rows)


def _memory(run: Run) -> Section:
    found = run.memory()
    shown = [name for name in found.column_names if name.endswith(("rank", "device", "bytes", "per_iteration", "ratio"))]
    rows = [[_memory_text(name, row[name]) for name in shown] for row in found.to_pylist()]
    return Section("memory, MiB", [_heading(name) for name in shown], rows, of_ranks=True)


def _heading(name: str) -> str:
    return name.removesuffix("_bytes").replace("_bytes_", " ").replace("_", " ")


def _memory_text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value / 2**20:.1f}" if "bytes" in name else f"{value:.2f}" if isinstance(value, float) else str(value)


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    return table.to_pylist()


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.2f}"


def _optional(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)
