"""A comparison of two runs in words, tables and a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge_profiling.compare import Comparison, changed
from bridge_profiling.compare.steps import OUTLIERS
from bridge_profiling.facts.statistics import LEVEL, Change
from bridge_profiling.report import figures, words
from bridge_profiling.report.memory_view import signed
from bridge_profiling.report.tables import copy_kind
from bridge_profiling.report.views import Cell, FigureView, PageView, Row, SectionView, TableView, Verdict, ms, of, table

#: Rows of a table of events, and ranks in a table; the JSON has all.
_SHOWN, _RANKS = 10, 8

#: Names of an iteration's parts.
PARTS = {name: text for name, (text, _) in figures.PARTS.items()} | {OUTLIERS: "median less mean: outlying iterations"}


def comparison_view(comparison: Comparison) -> PageView:
    """The view of a comparison."""
    headline, *sentences = _sentences(comparison)
    names = _names(comparison)
    sections = [
        SectionView(id, table.title, tables=[table], short=short) for id, short, table in _tables(comparison) if table.rows
    ]
    if comparison.profiled is not None and comparison.profiled.change:
        variants = {
            name: figures.change_figure(parts, comparison.profiled, names, PARTS)
            for name, parts in (("by cause", comparison.by_cause), ("by activity", comparison.by_activity))
        }
        caption = "From one median iteration to the other; the parts add up. The axis does not start at zero."
        view = FigureView("the-change", variants, caption)
        picture = SectionView("the-change", "The change of the median iteration by part", figures=[view], short="The change")
        sections.insert(1 if comparison.differences else 0, picture)
    return PageView("comparison", " → ".join(names), Verdict(headline, sentences), sections, caveats=_limitations(comparison))


def _names(comparison: Comparison) -> tuple[str, str]:
    """What the sides are called."""
    base, other = distinct_names([comparison.base[0], comparison.other[0]])
    more = [f" and {len(side) - 1} more" if len(side) > 1 else "" for side in (comparison.base, comparison.other)]
    return f"{base}{more[0]}", f"{other}{more[1]}"


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell different paths apart."""
    parts = [Path(path).parts for path in paths]
    for depth in range(1, max(map(len, parts), default=0)):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(Path(path)) for path in paths]


def _sentences(comparison: Comparison) -> Iterator[str]:
    """The comparison, the most important sentence first."""
    yield _headline(comparison)
    if not comparison.same_work:
        topics = ", ".join(each.topic for each in comparison.differences if each.concerns == "work")
        yield f"The runs did different work ({topics}), which affects the change."
    yield from _evidence(comparison)
    explains = comparison.explains_most
    # A part whose change may be chance explains nothing.
    if explains is not None and explains[1].significant is not False and comparison.profiled is not None:
        name, part = explains
        whole = words.change(comparison.profiled.change)
        yield f"The largest part of the change in the captures ({whole}): {PARTS[name]}, {words.change(part.change)}."


def _headline(comparison: Comparison) -> str:
    step = comparison.step
    _, other = _names(comparison)
    if comparison.empty:
        return "Nothing changed."
    if step is None:
        return "The change of the iteration time is unknown: iterations are not marked on both sides."
    seen = (
        f"the median iteration takes {words.milliseconds(step.us.other)} instead of {words.milliseconds(step.us.base)}, "
        f"{words.change(step.us.change)} ({words.percent(step.us.relative, signed=True)}), "
        f"speed-up {words.speedup(step.us.speedup)}"
    )
    if step.verdict == "unknown":
        return f"It is unknown whether {other} is slower or faster: {step.reason or 'too little data'}. As captured, {seen}."
    bounds = f"between {words.change(step.us.low)} and {words.change(step.us.high)} with {LEVEL:.0%} confidence"
    if step.verdict == "unchanged":
        return f"No significant change: {seen}, {bounds}."
    return f"{other} is {step.verdict}: {seen}, {bounds}."


def _evidence(comparison: Comparison) -> Iterator[str]:
    step = comparison.step
    if step is None or step.verdict == "unknown":
        return
    counts = f"{step.samples[0]} and {step.samples[1]}"
    which = "without profiling" if step.evidence == "unprofiled" else "inside the profiler's window, which slows them"
    if step.method == "welch":
        yield f"The evidence: medians of {counts} runs' iterations {which} (Welch's t)."
        return
    yield (
        f"The evidence: {counts} iterations {which}. They show whether these two runs differ; only several runs per side show "
        "whether the machines are the reason."
    )
    if step.evidence == "unprofiled" and comparison.profiled is not None:
        yield f"The captures' own median iteration changed by {words.change(comparison.profiled.change)}, as divided below."


def _tables(comparison: Comparison) -> Iterator[tuple[str, str, TableView]]:
    """An id, a short name and a table each."""
    differences = [
        [Cell(text) for text in (each.topic, each.concerns, each.base, each.other, each.means)]
        for each in comparison.differences
    ]
    headings = ["what", "concerns", "base", "other", "consequence"]
    yield "comparability", "Comparability", TableView("differences", "Differences between the runs", headings, differences)
    yield "parts", "By cause", _parts("by cause", comparison.by_cause, comparison)
    yield "parts-by-activity", "By activity", _parts("by activity", comparison.by_activity, comparison)
    yield "ranks", "Ranks", _ranks(comparison.ranks)
    yield "kernels", "Kernels", _events("Kernels", comparison.kernels, lambda row: row["name"])
    yield "copies", "Copies", _events("Copies", comparison.copies, copy_kind)
    yield "communication", "Communication", _communication(comparison.communication)
    title = "Host operators, own time over the whole capture, profiler overhead included,"
    yield "operators", "Operators", _events(title, comparison.operators, lambda row: row["name"])
    yield "memory", "Memory", _memory(comparison.memory)
    yield "allocation-sites", "Allocation sites", _sites(comparison.memory_sites)
    sides = (("new", comparison.findings_came), ("gone", comparison.findings_went))
    rows = [[Cell(text) for text in (word, finding.id, finding.title)] for word, found in sides for finding in found]
    yield (
        "findings",
        "Findings",
        TableView("findings", "Findings that differ", ["change", "id", "finding"], rows, name_last=True),
    )


def _parts(view: str, parts: dict[str, Change], comparison: Comparison) -> TableView:
    whole, rows = comparison.profiled, {}
    if whole is not None and not comparison.empty:
        # A part that is nothing on both sides has no row.
        rows = {
            PARTS[name]: part
            for name, part in parts.items()
            if (abs(part.change) if name == OUTLIERS else max(abs(part.base), abs(part.other))) >= 0.5
        }
        rows["median iteration of the captures"] = whole
    cells = [
        [
            Cell(name),
            *(Cell(words.ms(each), each) for each in (part.base, part.other)),
            Cell(words.ms(part.change, signed=True), part.change),
            Cell(
                words.UNKNOWN
                if part.low is None
                else f"{words.ms(part.low, signed=True)} to {words.ms(part.high, signed=True)}"
            ),
        ]
        for name, part in rows.items()
    ]
    headings = ["part", "base", "other", "change", f"{LEVEL:.0%} interval"]
    return TableView(f"parts-{view.replace(' ', '-')}", f"The change {view}, ms; the parts add up", headings, cells)


def _change_ms(name: str) -> Callable[[Row], Cell]:
    return of(name, lambda time_us: words.ms(time_us, signed=True))


def _ranks(table_: pa.Table) -> TableView:
    found = table_.to_pylist()
    shown = found[:_RANKS] if any(row["change_duration_us"] for row in found) else []
    columns = {
        "rank": of("rank", str),
        "base": ms("base_duration_us"),
        "other": ms("other_duration_us"),
        "change": _change_ms("change_duration_us"),
        "part that changed most": lambda row: (
            f"{PARTS[row['largest']]} {words.ms(row['change_' + row['largest']], signed=True)}"
            if row["change_duration_us"]
            else ""
        ),
    }
    return table("by-rank", f"Mean iteration by rank, ms, {len(shown)} of {len(found)}", shown, columns, of_ranks=True)


def _sides(heading: str, name: str, text: Callable[[Any], str]) -> dict[str, Callable[[Row], Cell]]:
    return {f"{heading}, {side}": of(f"{side}_{name}", text) for side in ("base", "other")}


def _count(value: float) -> str:
    return f"{value:g}"


def _events(title: str, rows: pa.Table, name: Callable[[Row], str]) -> TableView:
    found = changed(rows)
    columns = {
        "change": lambda row: row["change"],
        **_sides("calls", "count", _count),
        **_sides("µs per call", "mean_us", lambda value: words.UNKNOWN if value is None else f"{value:.1f}"),
        "ms per iteration": _change_ms("change_us"),
        "name": name,
    }
    title = f"{title} that changed, {min(len(found), _SHOWN)} of {len(found)}, per iteration and rank"
    return table(title.split()[0].lower(), title, found[:_SHOWN], columns, name_last=True)


def _communication(rows: pa.Table) -> TableView:
    found = [row for row in rows.to_pylist() if row["change"] is not None or abs(row["change_wait_us"]) >= 1]
    columns = {
        "change": lambda row: row["change"] or words.UNKNOWN,
        **_sides("calls", "count", _count),
        **_sides("data", "bytes", words.size),
        "transfer ms": _change_ms("change_us"),
        "waiting ms": _change_ms("change_wait_us"),
        "operation": lambda row: f"{row['operation']} {row['group']} of {row['group_size']}",
    }
    return table("communication", "Communication per iteration and rank", found[:_SHOWN], columns, name_last=True)


def _memory(rows: pa.Table) -> TableView:
    found = [row for row in rows.to_pylist() if row["change_peak_bytes"] or row["change_growth_bytes_per_iteration"]]
    columns = {
        "rank": of("rank", str),
        **_sides("peak", "peak_bytes", words.memory),
        "change": signed("change_peak_bytes"),
        "change of growth per iteration": signed("change_growth_bytes_per_iteration"),
    }
    title = f"Memory, {min(len(found), _RANKS)} of {len(found)} devices"
    return table("memory", title, found[:_RANKS], columns, of_ranks=True)


def _sites(rows: pa.Table) -> TableView:
    found = [row for row in rows.to_pylist() if abs(row["change_bytes_at_peak"]) >= 1 << 20]
    columns = {
        "base": of("before_bytes_at_peak", words.memory),
        "other": of("after_bytes_at_peak", words.memory),
        "change": signed("change_bytes_at_peak"),
        "allocation site": lambda row: row["site"],
    }
    title = f"Memory at the peak by allocation site, {min(len(found), _SHOWN)} of {len(found)}"
    return table("sites", title, found[:_SHOWN], columns, name_last=True)


def _limitations(comparison: Comparison) -> list[str]:
    """What the captures cannot show; once if it is the same on both sides."""
    found: list[str] = []
    for sentence in comparison.limitations:
        side, colon, rest = sentence.partition(": ")
        same = f"{'other' if side == 'base' else 'base'}: {rest}"
        both = colon and side in ("base", "other") and same in comparison.limitations
        found.append(f"both: {rest}" if both else sentence)
    return list(dict.fromkeys(found))
