"""A comparison in words and tables: for the terminal, and for the page of its own. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge_profiling.analysis.compare import Comparison, changed
from bridge_profiling.analysis.compare.statistics import LEVEL, Change
from bridge_profiling.analysis.compare.steps import OUTLIERS
from bridge_profiling.report.figures import budget as figures
from bridge_profiling.report.run_tables import Section
from bridge_profiling.report.wording import mebibytes, milliseconds, size

#: Rows of a table of events; the JSON has all.
_SHOWN = 10

#: Ranks in a table.
_RANKS = 8

#: What the parts of an iteration are called.
PARTS = {name: words for name, (words, _) in figures.PARTS.items()} | {OUTLIERS: "median less mean: outlying iterations"}

#: What the table of host operators cannot know.
_OPERATORS = "of whole captures; includes what the profiler costs"


def sentences(comparison: Comparison) -> list[str]:
    """The comparison in a paragraph, the most important sentence first."""
    found = [_headline(comparison)]
    if not comparison.same_work:
        topics = ", ".join(each.topic for each in comparison.differences if each.concerns == "work")
        found.append(f"The two are not the same work ({topics}): read the change with that in mind.")
    found += _evidence(comparison)
    explains = comparison.explains_most
    # A part that changed no more than it does by chance explains nothing.
    if explains is not None and explains[1].significant is not False and comparison.profiled is not None:
        name, part = explains
        whole = _signed(comparison.profiled.change)
        found.append(f"The largest part of the change in the captures ({whole}): {PARTS[name]}, {_signed(part.change)}.")
    return found


def named_sections(comparison: Comparison) -> list[tuple[str, Section]]:
    """The comparison's tables with a short name each, differences first; those without rows are left out."""
    quiet = comparison.empty
    found = [
        ("Same work?", _differences(comparison)),
        ("Parts", _parts("the change in parts, by what the time is owed to", comparison.by_cause, comparison.profiled, quiet)),
        ("Parts by activity", _parts("the same change by what runs", comparison.by_activity, comparison.profiled, quiet)),
        ("Ranks", _ranks(comparison.ranks)),
        ("Kernels", _events("kernels", comparison.kernels, lambda row: row["name"])),
        ("Copies", _events("copies", comparison.copies, _copy)),
        ("Communication", _communication(comparison.communication)),
        ("Operators", _events(f"host operators, own time ({_OPERATORS})", comparison.operators, lambda row: row["name"])),
        ("Memory", _memory(comparison.memory)),
        ("Allocation sites", _sites(comparison.memory_sites)),
        ("Findings", _findings(comparison)),
    ]
    return [(short, section) for short, section in found if section.rows]


def sections(comparison: Comparison) -> list[Section]:
    """The comparison's tables alone."""
    return [section for _, section in named_sections(comparison)]


def names(comparison: Comparison) -> tuple[str, str]:
    """What the sides are called: the last parts of their paths that differ."""
    base, other = (Path(side[0]) for side in (comparison.base, comparison.other))
    first, second = base.name, other.name
    while first == second and base.parent != base and base != other:
        base, other = base.parent, other.parent
        first, second = f"{base.name}/{first}", f"{other.name}/{second}"
    more = [f" and {len(side) - 1} more" if len(side) > 1 else "" for side in (comparison.base, comparison.other)]
    return f"{first}{more[0]}", f"{second}{more[1]}"


def _headline(comparison: Comparison) -> str:
    step = comparison.step
    _, other = names(comparison)
    if comparison.empty:
        return "Nothing changed."
    if step is None:
        return "How an iteration's duration changed is not known: nothing marks iterations on both sides."
    seen = (
        f"the median iteration takes {milliseconds(step.us.other, 1)} instead of {milliseconds(step.us.base, 1)}, "
        f"{_signed(step.us.change)} ({_relative(step.us)})"
    )
    if step.verdict == "unknown":
        return (
            f"Whether {other} is slower or faster cannot be told: {step.reason or 'too little is known'}. As captured, {seen}."
        )
    bounds = f"between {_signed(step.us.low)} and {_signed(step.us.high)} with {LEVEL:.0%} confidence".replace("%", " %")
    if step.verdict == "unchanged":
        return f"No change can be told from chance: {seen}, {bounds}."
    return f"{other} is {step.verdict}: {seen}, {bounds}."


def _evidence(comparison: Comparison) -> list[str]:
    step = comparison.step
    if step is None or step.verdict == "unknown":
        return []
    counts = f"{step.samples[0]} and {step.samples[1]}"
    touched = "that no profiler touched" if step.evidence == "unprofiled" else "inside the profiler's window, which slows them"
    if step.method == "welch":
        return [f"That is from the medians of {counts} runs' iterations {touched} (Welch's t)."]
    found = [
        f"That is from {counts} iterations {touched}. It says whether these two runs differ; whether the machines are the "
        "reason is known from several runs a side."
    ]
    if step.evidence == "unprofiled" and comparison.profiled is not None:
        found.append(
            f"The captures' own median iteration changed by {_signed(comparison.profiled.change)}; the parts split that."
        )
    return found


def _differences(comparison: Comparison) -> Section:
    rows = [[each.concerns, each.topic, each.base, each.other, each.means] for each in comparison.differences]
    return Section("not the same besides the times", ["concerns", "what", "base", "other", "so"], rows)


def _parts(title: str, parts: dict[str, Change], whole: Change | None, quiet: bool) -> Section:
    headings = ["base", "other", "change", "95 % interval", "part"]
    if whole is None or quiet:
        return Section(title, headings, [])
    rows = [_part(each, PARTS[name]) for name, each in parts.items() if _visible(name, each)]
    rows.append(_part(whole, "the median iteration of the captures"))
    return Section(f"{title}, ms; they add up", headings, rows)


def _visible(name: str, part: Change) -> bool:
    """Whether a line of a split says anything: not where there is nothing on either side."""
    return abs(part.change) >= 0.5 if name == OUTLIERS else max(abs(part.base), abs(part.other)) >= 0.5


def _part(change: Change, name: str) -> list[str]:
    bounds = "-" if change.low is None else f"{_ms(change.low, True)} to {_ms(change.high, True)}"
    return [_ms(change.base), _ms(change.other), _ms(change.change, True), bounds, name]


def _ranks(table: pa.Table) -> Section:
    found = table.to_pylist()
    rows = [
        [
            str(row["rank"]),
            *(_ms(row[f"{side}_duration_us"], side == "change") for side in ("base", "other", "change")),
            f"{PARTS[row['largest']]} {_ms(row['change_' + row['largest']], True)}" if row["change_duration_us"] else "",
        ]
        for row in found[:_RANKS]
    ]
    if all(not row["change_duration_us"] for row in found):
        rows = []
    headings = ["rank", "base", "other", "change", "part that changed most"]
    return Section(f"mean iteration by rank, ms, {len(rows)} of {len(found)}", headings, rows, of_ranks=True)


def _events(title: str, table: pa.Table, text: Callable[[dict[str, Any]], str]) -> Section:
    found = changed(table)
    rows = [
        [
            row["change"],
            *(f"{row[f'{side}_count']:g}" for side in ("base", "other")),
            *(_optional_us(row[f"{side}_mean_us"]) for side in ("base", "other")),
            _ms(row["change_us"], True),
            text(row),
        ]
        for row in found[:_SHOWN]
    ]
    headings = ["change", "calls", "now", "µs a call", "now", "ms an iteration", "name"]
    return Section(f"{title} that changed, {len(rows)} of {len(found)}, per iteration and rank", headings, rows)


def _communication(table: pa.Table) -> Section:
    found = [row for row in table.to_pylist() if row["change"] is not None or abs(row["change_wait_us"]) >= 1]
    rows = [
        [
            row["change"] or "-",
            *(f"{row[f'{side}_count']:g}" for side in ("base", "other")),
            *(size(row[f"{side}_bytes"]) for side in ("base", "other")),
            _ms(row["change_us"], True),
            _ms(row["change_wait_us"], True),
            f"{row['operation']} {row['group']} of {row['group_size']}",
        ]
        for row in found[:_SHOWN]
    ]
    headings = ["change", "calls", "now", "data", "now", "transfer ms", "waiting ms", "operation"]
    return Section("communication, per iteration and rank", headings, rows)


def _memory(table: pa.Table) -> Section:
    found = [row for row in table.to_pylist() if row["change_peak_bytes"] or row["change_growth_bytes_per_iteration"]]
    rows = [
        [
            str(row["rank"]),
            *(mebibytes(row[f"{side}_peak_bytes"]) for side in ("base", "other")),
            _signed_size(row["change_peak_bytes"]),
            _signed_size(row["change_growth_bytes_per_iteration"]),
        ]
        for row in found[:_RANKS]
    ]
    headings = ["rank", "peak", "now", "change", "change of growth an iteration"]
    return Section(f"memory, {len(rows)} of {len(found)} devices", headings, rows, of_ranks=True)


def _sites(table: pa.Table) -> Section:
    found = [row for row in table.to_pylist() if abs(row["change_bytes_at_peak"]) >= 1 << 20]
    rows = [
        [
            *(mebibytes(row[f"{side}_bytes_at_peak"]) for side in ("before", "after")),
            _signed_size(row["change_bytes_at_peak"]),
            row["site"],
        ]
        for row in found[:_SHOWN]
    ]
    headings = ["base", "other", "change", "allocation site"]
    return Section(f"memory at the peak by allocation site, {len(rows)} of {len(found)}", headings, rows)


def _findings(comparison: Comparison) -> Section:
    sides = (("came", comparison.findings_came), ("went", comparison.findings_went))
    rows = [[word, finding.id, finding.title] for word, found in sides for finding in found]
    return Section("findings", ["", "id", "what"], rows)


def _copy(row: dict[str, Any]) -> str:
    if row["kind"] == "memset":
        return "memset"
    return f"{row['direction']} {row['from_memory']} to {row['to_memory']}"


def _ms(time_us: float | None, signed: bool = False) -> str:
    if time_us is None:
        return "-"
    return f"{time_us / 1e3:+.2f}" if signed else f"{time_us / 1e3:.2f}"


def _signed(time_us: float | None) -> str:
    """A change of time with its unit: "+18.7 ms"."""
    if time_us is None:
        return "-"
    return f"{time_us / 1e3:+.1f} ms" if abs(time_us) >= 50 else f"{time_us / 1e3:+.3f} ms"


def _relative(change: Change) -> str:
    return "-" if change.relative is None else f"{change.relative * 100:+.1f} %"


def _signed_size(amount: float | None) -> str:
    return "-" if amount is None else f"{'+' if amount > 0 else ''}{mebibytes(amount)}"


def _optional_us(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:.1f}"


def limitations(comparison: Comparison) -> Sequence[str]:
    """What the captures cannot tell; what both sides say is said once."""
    found: list[str] = []
    for sentence in comparison.limitations:
        side, colon, rest = sentence.partition(": ")
        same = f"{'other' if side == 'base' else 'base'}: {rest}"
        if colon and side in ("base", "other") and same in comparison.limitations:
            sentence = f"both: {rest}"
        if sentence not in found:
            found.append(sentence)
    return found
