"""A capture in one screen: which ranks captured what, what that cost a step, and where the time went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bridge_profiling.errors import TraceError
from bridge_profiling.manifest import RankCapture

_OPERATORS = 5


def print_captures(captures: Sequence[RankCapture], console: Console) -> None:
    """Print what each rank captured, where its time went, the reasons of whatever is not complete, and every path.

    Args:
        captures: at least one, of one attempt.
        console: where to.
    """
    console.print(_ranks_table(captures))
    operators = _operators_table(captures)
    if operators.row_count:
        console.print(operators)
    for capture in captures:
        if capture.manifest.reason:
            console.print(f"rank {capture.rank}: {capture.manifest.reason}", markup=False)
    for capture in captures:
        for path in capture.artifacts:
            # A path broken over lines, or coloured in pieces, cannot be copied.
            console.print(str(path), soft_wrap=True, markup=False, highlight=False)


def _ranks_table(captures: Sequence[RankCapture]) -> Table:
    window = captures[0].manifest.window
    table = Table(title=f"window {window.start}-{window.end}" if window else None, title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("status")
    table.add_column("iterations")
    table.add_column("step, profiled", justify="right")
    table.add_column("unprofiled", justify="right")
    sides = [(capture.mfu(profiled=True), capture.mfu(profiled=False)) for capture in captures]
    known = any(profiled or unprofiled for profiled, unprofiled in sides)
    if known:
        table.add_column("MFU, profiled", justify="right")
        table.add_column("unprofiled", justify="right")
    for capture, mfus in zip(captures, sides, strict=True):
        table.add_row(
            str(capture.rank),
            capture.manifest.status,
            ", ".join(str(iteration) for iteration in capture.captured) or "none",
            _median_ms(capture.durations_ns(profiled=True)),
            _median_ms(capture.durations_ns(profiled=False)),
            *(_median_percent(mfu) for mfu in mfus if known),
        )
    return table


def _operators_table(captures: Sequence[RankCapture]) -> Table:
    table = Table(title=f"top {_OPERATORS} operators, by self time on the host", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("self time", justify="right")
    table.add_column("calls", justify="right")
    table.add_column("operator", overflow="fold")
    for capture in captures:
        if capture.torch_trace is None:
            continue
        try:
            for name, count, self_ns in _top_operators(capture.torch_trace):
                table.add_row(str(capture.rank), f"{self_ns / 1e6:.2f} ms", str(count), escape(name))
        except (TraceError, ImportError) as error:
            table.add_row(str(capture.rank), "", "", escape(str(error)))
        table.add_section()
    return table


def _top_operators(trace: Path) -> list[tuple[str, int, int]]:
    """Name, calls and own nanoseconds of the operators with the most time of their own, summed over threads.

    Raises:
        TraceError: the trace cannot be read.
        ImportError: this is a submit host without the `analysis` extra. Its message says so.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute as pc

        from bridge_profiling.analysis.intervals import parents, self_times_ns
        from bridge_profiling.traces import kineto
    except ImportError as error:
        raise ImportError("type `pip install 'bridge-profiling[analysis]'` to see operators here") from error
    events = kineto.read(trace).host_events
    events = events.filter(pc.equal(events["category"], "operator"))
    thread, start, end = (events[name].to_numpy() for name in ("thread", "start_ns", "end_ns"))
    own = pa.table({"name": events["name"], "own_ns": self_times_ns(parents(thread, start, end), start, end)})
    totals = own.group_by("name").aggregate([("own_ns", "count"), ("own_ns", "sum")]).sort_by([("own_ns_sum", "descending")])
    return [(row["name"], row["own_ns_count"], row["own_ns_sum"]) for row in totals.slice(0, _OPERATORS).to_pylist()]


def _median_ms(durations_ns: list[int]) -> str:
    return f"{statistics.median(durations_ns) / 1e6:.1f} ms" if durations_ns else "-"


def _median_percent(shares: list[float]) -> str:
    return f"{statistics.median(shares):.1%}" if shares else "-"
