"""A capture in one screen: which ranks captured what, what that cost a step, and where the time went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bridge_profiling.errors import TraceError
from bridge_profiling.traces.kineto import top_operators
from bridge_profiling.traces.run_dir import RankCapture

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
        if capture.manifest["reason"]:
            console.print(f"rank {capture.rank}: {capture.manifest['reason']}", markup=False)
    for capture in captures:
        for path in capture.artifacts:
            # A path broken over lines, or coloured in pieces, cannot be copied.
            console.print(str(path), soft_wrap=True, markup=False, highlight=False)


def _ranks_table(captures: Sequence[RankCapture]) -> Table:
    window = captures[0].manifest["window"]
    table = Table(title=f"window {window['start']}-{window['end']}", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("status")
    table.add_column("iterations")
    table.add_column("step, profiled", justify="right")
    table.add_column("unprofiled", justify="right")
    for capture in captures:
        table.add_row(
            str(capture.rank),
            capture.manifest["status"],
            ", ".join(str(iteration) for iteration in capture.captured) or "none",
            _median_ms(capture.durations_ns(profiled=True)),
            _median_ms(capture.durations_ns(profiled=False)),
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
            for operator in top_operators(capture.torch_trace, _OPERATORS):
                table.add_row(str(capture.rank), f"{operator.self_us / 1e3:.2f} ms", str(operator.count), escape(operator.name))
        except TraceError as error:
            table.add_row(str(capture.rank), "", "", escape(str(error)))
        table.add_section()
    return table


def _median_ms(durations_ns: list[int]) -> str:
    return f"{statistics.median(durations_ns) / 1e6:.1f} ms" if durations_ns else "-"
