"""In a notebook: a run's answers as figures, and its tables as tables. Loaded when a figure is asked for, or in IPython."""

from __future__ import annotations

import html
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge_profiling.analysis.ranks.timeline import segments, whole_captures, windows_of
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.report.figures.budget import budget_figure
from bridge_profiling.report.figures.communication import MOST_GROUPS, by_group, communication_figure
from bridge_profiling.report.figures.iterations import iterations_figure
from bridge_profiling.report.figures.memory import memory_figure
from bridge_profiling.report.figures.style import Figure
from bridge_profiling.report.figures.timeline import timeline_figure
from bridge_profiling.report.figures.waits import wait_matrix, waits_figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as PlotlyFigure

    from bridge_profiling.analysis.run import Run

#: Rows of a table in a notebook, from its beginning and from its end.
_ROWS = 10

#: Bars of a timeline are told apart down to this part of its width.
_FINEST = 2_000


def figure(run: Run, name: str, **options: Any) -> PlotlyFigure:
    """An answer as a Plotly figure.

    Args:
        run: whose answer.
        name: a key of `FIGURES`.
        options: of that figure.

    Raises:
        ProfilingConfigError: there is no such figure.
        ModuleNotFoundError: Plotly is not installed.
    """
    if name not in FIGURES:
        raise ProfilingConfigError(f"there is no figure {name!r}", instead=f"Type one of {', '.join(FIGURES)}")
    from plotly.graph_objects import Figure

    return Figure(FIGURES[name](run, **options))


def show_tables() -> None:
    """Let IPython show pyarrow's tables as tables, unless somebody told it how already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    if pa.Table not in formatter.type_printers:
        formatter.for_type(pa.Table, table_html)


def table_html(table: pa.Table) -> str:
    """A table as HTML: its first and last rows; names are text, whatever they contain.

    Args:
        table: an answer.
    """
    rows = table.slice(0, _ROWS).to_pylist()
    last = table.slice(max(table.num_rows - _ROWS, _ROWS)).to_pylist() if table.num_rows > _ROWS else []
    lines = ["".join(f"<th>{html.escape(name)}</th>" for name in table.column_names)]
    lines += [_line(row) for row in rows]
    hidden = table.num_rows - len(rows) - len(last)
    if hidden:
        lines.append(f"<td colspan={len(table.column_names)}>… {hidden:,} more rows</td>")
    lines += [_line(row) for row in last]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{body}</table><p>{table.num_rows:,} rows × {table.num_columns} columns</p>"


def _line(row: dict[str, Any]) -> str:
    return "".join(f"<td>{html.escape(_text(value))}</td>" for value in row.values())


def _text(value: Any) -> str:
    return "" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)


def _budget(run: Run, view: str = "cause") -> Figure:
    rows = [row for row in run.attribution().to_pylist() if row["source"] == run.main_source]
    return budget_figure(rows, view)


def _iterations(run: Run, measure: str = "own_us") -> Figure:
    return iterations_figure(run.ranks().to_pylist(), measure)


def _waits(run: Run) -> Figure:
    rows = run.waits().to_pylist()
    return waits_figure(wait_matrix(rows, _iteration_count(run), [info.rank for info, _ in run.entries()]))


def _communication(run: Run) -> Figure:
    return communication_figure(by_group(run.communication().to_pylist(), _iteration_count(run))[:MOST_GROUPS])


def _memory(run: Run, rank: int | None = None, device: int = 0) -> Figure:
    held = sorted({row["rank"] for row in run.memory().to_pylist()})
    if not held or (rank is not None and rank not in held):
        known = f"one of {held}" if held else "a run whose memory was recorded"
        raise ProfilingConfigError("no memory of that rank was recorded", instead=f"Name {known}")
    rank = held[0] if rank is None else rank
    by_site = run.ask("memory_over_time", ranks=(rank,)).to_pylist()
    mine = [row for row in run.memory_timeline().to_pylist() if row["rank"] == rank and row["device"] == device]
    return memory_figure([row for row in by_site if row["device"] == device], mine)


def _timeline(run: Run, iteration: int | None = None, ranks: list[int] | None = None) -> Figure:
    entries = [(info, entry) for info, entry in run.entries() if ranks is None or info.rank in ranks]
    offsets = run.clock_offsets() if len(run.entries()) > 1 else None
    windows = windows_of(run.iterations(), run.main_source, offsets) or whole_captures(entries, offsets)
    number = next(iter(windows), None) if iteration is None else iteration
    if number not in windows:
        raise ProfilingConfigError(f"iteration {iteration} was not captured", instead=f"Type one of {list(windows)}")
    mine = windows[number]
    resolution = max(max(window.end_ns - window.zero_ns for window in mine.values()) // _FINEST, 1)
    shown = [
        segments(entry, [mine[info.rank]], {number: resolution}, host=True) for info, entry in entries if info.rank in mine
    ]
    return timeline_figure([each for found in shown for each in found])


def _iteration_count(run: Run) -> int:
    return len(set(run.iterations()["iteration"].to_pylist())) or 1


#: What `Run.figure` can show.
FIGURES = {
    "budget": _budget,
    "iterations": _iterations,
    "waits": _waits,
    "communication": _communication,
    "memory": _memory,
    "timeline": _timeline,
}
