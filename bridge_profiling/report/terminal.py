"""Views on a terminal with Rich; in a pipe as plain aligned lines that are never wrapped."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge_profiling.common.errors import TraceError, install_command
from bridge_profiling.common.printable import printable
from bridge_profiling.facts.words import UNKNOWN
from bridge_profiling.manifest import RankCapture
from bridge_profiling.report.views import Cell, Figure, FindingView, PageView, TableView, Verdict
from bridge_profiling.report.words import first_sentence, ms, sentence

#: Rows of a table of ranks, and findings, on a terminal; a pipe gets all.
_RANKS, _FINDINGS = 16, 6

#: The least width of a long name, in characters.
_NAME = 12

#: Letters of a bar.
_BAR = 40

#: Operators of each rank after a profile.
_OPERATORS = 5


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _print_lines(lines: Iterable[str], console: Console, style: str = "", *, to_copy: bool = False) -> None:
    """Lines that a terminal wraps between words, unless they are there to be copied; a pipe gets them as they are."""
    for line in lines:
        console.print(_text(line, style), soft_wrap=to_copy or not console.is_terminal)


def _print_table(view: TableView, console: Console) -> None:
    if console.is_terminal:
        console.print(_boxed(view, console.width))
    else:
        _print_plain(view, console)


def print_report(view: PageView, console: Console) -> None:
    """Print the answer to `bridge-profiling report`: the verdict, the time attribution, findings and benchmarks."""
    for text in view.notices:
        _print_lines((text, ""), console)
    _print_verdict(view.verdict, console)
    time, checklist, phases, bench = view.sections
    for figure, numbers in zip(time.figures, time.tables[-2:], strict=False):
        console.print()
        if console.color_system:
            _print_bars(figure.variants["by cause"], console)
        else:
            _print_plain(numbers, console)
    for ranges in (*phases.tables, *checklist.tables):
        console.print()
        _print_table(ranges, console)
    if view.findings:
        (_print_findings if console.is_terminal else _print_plain_findings)(view.findings, console)
        for each in view.findings:
            evidence = each.finding.evidence
            if command := evidence.get("ncu_command"):
                notes = map(sentence, evidence.get("ncu_notes", []))
                _print_lines(("", f"{each.number}. in Nsight Compute:", command, *notes), console, to_copy=True)
    if not bench.empty:
        _print_lines(("", *bench.paragraphs), console)


def print_answer(view: PageView, console: Console, lines: Iterable[str] = ()) -> None:
    """Print a comparison or memory: the verdict, lines of one's own, and every table."""
    if view.kind == "comparison":
        _print_lines([view.title], console, "bold", to_copy=True)
    _print_verdict(view.verdict, console)
    _print_lines(("", *lines, ""), console, to_copy=True)
    print_tables([table for section in view.sections for table in section.tables], view.caveats, console)


def print_tables(tables: Iterable[TableView], limitations: Sequence[str], console: Console) -> None:
    """Print tables, then what the captures cannot show."""
    for view in tables:
        _print_table(view, console)
        if not console.is_terminal:
            console.print()
    if limitations:
        _print_lines(["Limitations"], console, "bold")
        _print_lines((f"- {text}" for text in limitations), console, to_copy=True)


def _print_verdict(verdict: Verdict, console: Console) -> None:
    _print_lines([verdict.headline], console, "bold")
    _print_lines(verdict.sentences, console)
    if verdict.first:
        _print_lines(("", "Do this first:"), console, "bold")
    _print_lines((f"- {text}" for text in verdict.first), console)
    if verdict.caveats:
        console.print()
    _print_lines((f"Note: {text}" for text in verdict.caveats), console, "dim")


def _boxed(view: TableView, width: int) -> Table:
    hidden = max(len(view.rows) - _RANKS, 0) if view.of_ranks else 0
    caption = _text(f"and {hidden} more rows: --json has them" if hidden else view.note)
    rows = [[printable(cell.text) for cell in row] for row in view.rows[: len(view.rows) - hidden]]
    # A number is never broken; headings are, between words.
    widths = [
        max([*map(len, heading.split()), *(len(row[place]) for row in rows if number)], default=1)
        for place, (heading, number) in enumerate(zip(view.columns, view.numeric, strict=True))
    ]
    if view.name_last:
        widths[-1] = _NAME
    boxed = sum(widths) + 3 * len(widths) < width
    spare = width - sum(widths) - (3 * len(widths) + 1 if boxed else len(widths))
    table = Table(
        title=_text(view.title),
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=box.HEAVY_HEAD if boxed else None,
        padding=(0, 1) if boxed else (0, 1, 0, 0),
    )
    for heading, number, least in zip(view.columns, view.numeric, widths, strict=True):
        # A long name is cut to the width of the terminal; nothing else is.
        name = view.name_last and heading == view.columns[-1]
        table.add_column(
            _text(heading),
            justify="right" if number else "left",
            overflow="ellipsis" if name else "fold",
            no_wrap=name,
            width=max(least + spare, 1) if name else least if number else None,
            min_width=None if name else least,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _print_plain(view: TableView, console: Console) -> None:
    lines = [list(map(printable, view.columns)), *([printable(cell.text) for cell in row] for row in view.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    console.print(_text(view.title), soft_wrap=True)
    for line in lines:
        columns = zip(line, widths, view.numeric, strict=True)
        texts = [text.rjust(width) if number else text.ljust(width) for text, width, number in columns]
        console.print(Text("  ".join(texts).rstrip()), soft_wrap=True)
    if view.note:
        console.print(_text(view.note), soft_wrap=True)


def _print_bars(figure: Figure, console: Console) -> None:
    """A figure of stacked bars, with letters."""
    labels = figure["data"][0]["y"]
    totals = [sum(trace["x"][row] for trace in figure["data"]) for row in range(len(labels))]
    longest = max(totals) or 1.0
    whole = figure["layout"]["xaxis"]["title"]["text"].removeprefix("ms of the ")
    table = Table(title=f"The {whole}", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "", "ms", figure["data"][0]["name"]):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    legend: dict[str, Text] = {}
    for row, label in enumerate(labels):
        bar, drawn = Text(), 0.0
        for trace in figure["data"]:
            # Ends are rounded, not lengths, so that the bar ends where it should.
            cells = round(_BAR * (drawn + trace["x"][row]) / longest) - round(_BAR * drawn / longest)
            bar.append("█" * cells, style=trace["marker"]["color"])
            drawn += trace["x"][row]
            if cells:
                legend[trace["name"]] = Text("█ ", style=trace["marker"]["color"]).append(
                    f"{printable(trace['name'])}  ", style="default"
                )
        share = figure["data"][0]["x"][row] / totals[row] if totals[row] else 0.0
        table.add_row(_text(label), bar, f"{totals[row]:,.1f}", f"{share:.0%}")
    console.print(table)
    console.print(Text.assemble(*legend.values()))


def _print_findings(findings: Sequence[FindingView], console: Console) -> None:
    table = Table(title="\nFindings, the largest potential saving first", title_justify="left", box=None, pad_edge=False)
    table.add_column("", justify="right")
    for heading in ("saving", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("confidence", no_wrap=True)
    table.add_column("finding, and what to change")
    for view in findings[:_FINDINGS]:
        finding = view.finding
        saving = finding.recoverable_ns_per_iteration, finding.at_most_ns_per_iteration
        about, at_most = ("" if each is None else ms(each) for each in saving)
        text = _text(finding.title, "bold red" if finding.severe else "bold")
        text.append(f"\n{printable(first_sentence(finding.action))}", style="not bold default")
        table.add_row(str(view.number), about or "unknown", at_most, finding.confidence, text)
    console.print(table)
    if len(findings) > _FINDINGS:
        console.print(f"{len(findings) - _FINDINGS} more findings are on the page.")


def _print_plain_findings(findings: Sequence[FindingView], console: Console) -> None:
    console.print()
    for view in findings:
        finding, gain = view.finding, f"saves {view.gain}" if view.gain else "saving unknown"
        ranks = f", {view.responsible}" if view.responsible else ""
        about = f"{gain}, {finding.confidence} confidence{ranks}"
        lines = f"{view.number}. {finding.id}: {finding.title} [{about}]", f"   change: {finding.action}"
        _print_lines(lines, console)


def print_captures(captures: Sequence[RankCapture], console: Console) -> None:
    """Print what each rank of one attempt captured, its top operators, why a capture is not complete, and every path."""

    def middle(values: Sequence[float], text: str) -> str:
        return text.format(statistics.median(values)) if values else UNKNOWN

    rows = []
    for capture in captures:
        captured = ", ".join(map(str, capture.captured)) or "none"
        row = {"rank": str(capture.rank), "status": capture.manifest.status, "iterations": captured}
        for name, profiled in (("profiled", True), ("unprofiled", False)):
            durations_ms = [duration / 1e6 for duration in capture.durations_ns(profiled=profiled)]
            row[f"step ms, {name}"] = middle(durations_ms, "{:.1f}")
            row[f"MFU, {name}"] = middle(capture.mfu(profiled=profiled), "{:.1%}")
        rows.append(row)
    shown = [name for name in rows[0] if "MFU" not in name or any(row[name] != UNKNOWN for row in rows)]
    window = captures[0].manifest.window
    title = f"window {window.start}-{window.end}" if window else "captures"
    _print_texts(title, shown, [[row[name] for name in shown] for row in rows], console)
    operators = [row for capture in captures if capture.torch_trace is not None for row in _operators(capture)]
    if operators:
        title = f"top {_OPERATORS} operators, by self time on the host"
        _print_texts(title, ["rank", "self time", "calls", "operator"], operators, console)
    for capture in captures:
        if capture.manifest.reason:
            console.print(_text(f"rank {capture.rank}: {capture.manifest.reason}"))
    # A path that is wrapped, or partly colored, cannot be copied.
    _print_lines((str(path) for capture in captures for path in capture.artifacts), console, to_copy=True)


def _print_texts(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    console.print(_boxed(TableView("", title, headings, [list(map(Cell, row)) for row in rows]), console.width))


def _operators(capture: RankCapture) -> list[tuple[str, ...]]:
    """Rank, own time, calls and name of the operators with the most own time, over all threads; or why there are none."""
    assert capture.torch_trace is not None
    try:
        from bridge_profiling.facts.rank import operators_by
        from bridge_profiling.traces import kineto

        found = operators_by(kineto.read(capture.torch_trace))["operators"].table.slice(0, _OPERATORS).to_pylist()
    except ImportError:  # a submit host without the `analysis` extra
        return [(str(capture.rank), "", "", f"type {install_command('analysis')} to see operators here")]
    except TraceError as error:
        return [(str(capture.rank), "", "", str(error))]
    return [(str(capture.rank), f"{row['self_ns'] / 1e6:.2f} ms", str(row["count"]), row["name"]) for row in found]
