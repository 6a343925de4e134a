"""A run in a notebook: its answers as Plotly figures, and pyarrow's tables as HTML tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge_profiling.common.errors import ProfilingConfigError, did_you_mean, require
from bridge_profiling.facts.timeline import segments, whole_captures, windows_of
from bridge_profiling.report import figures, rows
from bridge_profiling.report.answers import Answers
from bridge_profiling.report.flame_graph import LEAST_SHARE, Weight, flame_graph_figure
from bridge_profiling.report.rows import of_source
from bridge_profiling.report.timeline import timeline_figure
from bridge_profiling.report.views import Figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as PlotlyFigure

    from bridge_profiling.facts.run import RunFacts

#: The shortest visible bar of a timeline is this part of its width.
_FINEST = 2_000


def figure(facts: RunFacts, name: str, **options: Any) -> PlotlyFigure:
    """An answer as a Plotly figure; `name` is a key of `FIGURES`."""
    if name not in FIGURES:
        raise ProfilingConfigError(f"{name!r} is not a figure", instead=did_you_mean(name, FIGURES))
    from plotly.graph_objects import Figure

    drawn = FIGURES[name](facts, **options)
    if drawn is None:
        problem, remedy = _UNKNOWN[name]
        raise ProfilingConfigError(problem, instead=remedy)
    shown = Figure(figures.plain_texts(drawn))
    if find_spec("nbformat") is None:
        # Plotly's own display refuses to work without it, and a kernel does without it: IPython shows the same MIME bundle.
        shown._ipython_display_ = _left_to_ipython
    return shown


def _left_to_ipython() -> None:
    """Make IPython take an object's other representations."""
    raise NotImplementedError


def show_tables() -> None:
    """Make IPython show pyarrow's tables as it shows pandas', unless it has a formatter for them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    if pa.Table not in formatter.type_printers:
        formatter.for_type(pa.Table, lambda table: table.to_pandas()._repr_html_())


def _answers(facts: RunFacts) -> Answers:
    return Answers(facts, "page", None, None)


def _attribution(facts: RunFacts, view: str = "cause") -> Figure:
    return figures.attribution_figure(of_source(facts, facts.attribution).to_pylist(), view)


def _iterations(facts: RunFacts, measure: str = "own_ns") -> Figure:
    return figures.iterations_figure(facts.ranks.to_pylist(), measure)


def _memory(facts: RunFacts, rank: int | None = None, device: int = 0) -> Figure:
    held = sorted({row["rank"] for row in facts.memory.to_pylist()})
    if not held or (rank is not None and rank not in held):
        known = f"one of {held}" if held else "a run whose memory was recorded"
        raise ProfilingConfigError("no memory of that rank was recorded", instead=f"Name {known}")
    rank = held[0] if rank is None else rank
    by_site, mine = (
        [row for row in table.to_pylist() if (row["rank"], row["device"]) == (rank, device)]
        for table in (facts.memory_over_time, facts.memory_timeline)
    )
    return figures.memory_figure(by_site, mine)


def _timeline(facts: RunFacts, iteration: int | None = None, ranks: list[int] | None = None) -> Figure:
    entries = [(info, entry) for info, entry in facts.captures.entries() if ranks is None or info.rank in ranks]
    offsets = facts.clock_offsets if len(facts.captures.entries()) > 1 else None
    windows = windows_of(facts.iterations, facts.source, offsets) or whole_captures(entries, offsets)
    number = next(iter(windows), None) if iteration is None else iteration
    if number not in windows:
        raise ProfilingConfigError(f"iteration {iteration} was not captured", instead=f"Type one of {list(windows)}")
    mine = windows[number]
    resolution = max(max(window.end_ns - window.zero_ns for window in mine.values()) // _FINEST, 1)
    shown = [
        segments(entry, [mine[info.rank]], {number: resolution}, host=True) for info, entry in entries if info.rank in mine
    ]
    return timeline_figure([each for found in shown for each in found])


def _flame_graph(facts: RunFacts, rank: int | None = None, weight: str = "host") -> Figure:
    require(weight in list(Weight), f"weight={weight!r} is unknown", instead="Type host or device")
    ranks = [info.rank for info in facts.infos if rank in (None, info.rank)]
    stacks = facts.flame_graph_of(ranks[0], LEAST_SHARE).to_pylist() if ranks else []
    of = "" if rank is None else f" of rank {rank}"
    require(stacks, f"no stacks{of} were captured", instead="Name a rank with operators, annotations or Python stacks")
    count = len({row["iteration"] for row in facts.iterations.to_pylist() if row["rank"] == ranks[0]}) or 1
    return flame_graph_figure(stacks, Weight(weight), f"rank {ranks[0]}", count)


#: The figures of `Run.figure`.
FIGURES: Mapping[str, Callable[..., Figure | None]] = {
    "attribution": _attribution,
    "iterations": _iterations,
    "waits": lambda facts: figures.waits_figure(_answers(facts).waiting),
    "communication": lambda facts: figures.communication_figure(_answers(facts).by_group[: rows.MOST_GROUPS]),
    "roofline": lambda facts: figures.roofline_figure(facts.matrix_products.to_pylist()),
    "counters": lambda facts: figures.kernel_counters_figure(facts.kernel_counters.to_pylist()),
    "memory": _memory,
    "timeline": _timeline,
    "flame_graph": _flame_graph,
}

#: Why a figure has nothing to draw, and how to capture it.
_UNKNOWN = {
    "roofline": (
        "no matrix product has a known intensity, or the device is unknown",
        "Capture with profiling.record_shapes=true",
    ),
    "counters": ("no hardware counters of kernels were sampled", "Capture with nsys and profiling.nsys_gpu_metrics=true"),
}
