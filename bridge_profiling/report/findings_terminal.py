"""The verdict, the budget and the findings in one screen of a terminal; plain lines in a pipe. Computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge_profiling.analysis.attribution.parts import BY_CAUSE
from bridge_profiling.analysis.findings import Finding
from bridge_profiling.report import bench_comparison, rank_choice, wording
from bridge_profiling.report.answers import Summary
from bridge_profiling.report.figures.budget import PARTS, parts_that_matter
from bridge_profiling.report.figures.style import COLOURS
from bridge_profiling.report.verdict import shortened, verdict

#: Rows of the budget and findings in one screen; a pipe gets all findings.
_RANKS, _FINDINGS = 8, 6

#: Letters of a bar.
_BAR = 40


def print_verdict(summary: Summary, console: Console) -> None:
    """Print the answer.

    Args:
        summary: of the run.
        console: where to. Colours and bars on a terminal; in a pipe one line for each rank and finding, never wrapped.
    """
    found = verdict(summary)
    console.print(Text(found.headline, style="bold"), soft_wrap=not console.is_terminal)
    console.print(Text(found.paragraph), soft_wrap=not console.is_terminal)
    rows = _rows(summary)
    if rows:
        console.print()
        (_print_bars if console.color_system else _print_budget)(rows, console)
    if summary.findings:
        console.print()
        (_print_table if console.is_terminal else _print_plain)(summary, console)
        _print_commands(summary.findings, console)
    if summary.bench is not None:
        console.print()
        for line in bench_comparison.sentences(summary.bench):
            console.print(Text(line), soft_wrap=not console.is_terminal)


def _rows(summary: Summary) -> list[dict[str, Any]]:
    """Bars of the budget: every rank of a few, else the stages' means and the ranks to blame."""
    by_rank = {row["rank"]: row for row in summary.budget}
    if len(by_rank) <= _RANKS:
        return [{**row, "label": f"rank {rank}"} for rank, row in by_rank.items()]
    rows: list[dict[str, Any]] = []
    for stage, members in rank_choice.stages(summary.infos).items():
        mine = [by_rank[rank] for rank in members if rank in by_rank]
        if mine and len(rows) < _RANKS:
            parts = {part: fmean(row[part] for row in mine) for part in ("duration_us", *BY_CAUSE)}
            rows.append({**parts, "label": f"{stage}, mean of {len(mine)}"})
    blamed = dict.fromkeys(rank for finding in summary.findings for rank in finding.ranks if len(finding.ranks) <= _RANKS)
    rows += [{**by_rank[rank], "label": f"rank {rank}"} for rank in blamed if rank in by_rank]
    return rows[: 2 * _RANKS]


def _print_bars(rows: Sequence[dict[str, Any]], console: Console) -> None:
    longest = max(row["duration_us"] for row in rows) or 1.0
    parts = parts_that_matter(rows)
    table = Table(title="the median iteration", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "", "ms", "compute"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in rows:
        bar, shown = Text(), 0.0
        for part in parts:
            # Cells are rounded where parts end, not each part by itself, so that bars end where they should.
            cells = round(_BAR * (shown + row[part]) / longest) - round(_BAR * shown / longest)
            bar.append("█" * cells, style=COLOURS[PARTS[part][1]])
            shown += row[part]
        share = row["compute_us"] / row["duration_us"] if row["duration_us"] else None
        table.add_row(row["label"], bar, f"{row['duration_us'] / 1e3:,.1f}", wording.percent(share))
    console.print(table)
    legend = Text()
    for part in parts:
        name, colour = PARTS[part]
        if any(round(_BAR * row[part] / longest) for row in rows):
            legend.append("█ ", style=COLOURS[colour]).append(f"{name}  ")
    console.print(legend)


def _print_budget(rows: Sequence[dict[str, Any]], console: Console) -> None:
    parts = parts_that_matter(rows)
    lines = [["ms", "iteration", *(PARTS[part][0] for part in parts)]]
    lines += [[row["label"], *(f"{row[part] / 1e3:.2f}" for part in ("duration_us", *parts))] for row in rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    for line in lines:
        first = line[0].ljust(widths[0])
        numbers = (text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
        console.print(Text("  ".join((first, *numbers))), soft_wrap=True)


def _print_table(summary: Summary, console: Console) -> None:
    table = Table(title="findings, the most time to get back first", title_justify="left", box=None, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("to get back", justify="right", no_wrap=True)
    table.add_column("sure", no_wrap=True)
    table.add_column("finding, and what to change")
    for place, finding in enumerate(summary.findings[:_FINDINGS], 1):
        told = Text(finding.title, style="bold red" if finding.severe else "bold")
        told.append(f"\n{shortened(finding.action)}", style="not bold")
        table.add_row(str(place), _gain(finding), str(finding.confidence), told)
    console.print(table)
    if len(summary.findings) > _FINDINGS:
        console.print(f"and {len(summary.findings) - _FINDINGS} more: the page has them")


def _print_plain(summary: Summary, console: Console) -> None:
    for place, finding in enumerate(summary.findings, 1):
        told = f"{_gain(finding)}, {finding.confidence} confidence{_blamed(finding, summary)}"
        console.print(Text(f"{place}. {finding.id}: {finding.title} [{told}]"), soft_wrap=True)
        console.print(Text(f"   change: {finding.action}"), soft_wrap=True)


def _print_commands(findings: Sequence[Finding], console: Console) -> None:
    """Commands that findings hand on: never wrapped, so that they can be copied, and apart from the table for that."""
    for place, finding in enumerate(findings, 1):
        if "ncu_command" in finding.evidence:
            for line in (
                f"\n{place}. in Nsight Compute:",
                finding.evidence["ncu_command"],
                *(f"   {note}" for note in finding.evidence["ncu_notes"]),
            ):
                console.print(line, soft_wrap=True, markup=False, highlight=False)


def _gain(finding: Finding) -> str:
    back = finding.recoverable_us_per_iteration
    return "unknown" if back is None else f"≤ {wording.milliseconds(back)}"


def _blamed(finding: Finding, summary: Summary) -> str:
    return f", {wording.ranks(finding.ranks, len(summary.infos))}" if finding.ranks else ""
