"""Device memory of one run, or of two, in words, tables and pictures: for the terminal, and for a page of its own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge_profiling.analysis import Run
from bridge_profiling.report.figures.memory import memory_figure
from bridge_profiling.report.run_tables import Section
from bridge_profiling.report.small_page import Block, block_of, write_small_page
from bridge_profiling.report.wording import mebibytes, percent

SCHEMA_VERSION = 1

#: Rows of a table; the JSON has all.
_SHOWN = 12

#: Devices that are drawn.
_DRAWN = 8

#: Columns of a picture on a terminal, and its steps.
_WIDTH, _STEPS = 72, "▁▂▃▄▅▆▇█"

#: A change of a site that is only the allocator's rounding.
_LEAST_BYTES = 1 << 20

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Recorded:
    """What one run's captures say of memory.

    Args:
        path: the run.
        devices: rows of `Run.memory`.
        sites: rows of `Run.memory_sites`.
        at_peak: rows of `Run.memory_at_peak`, without their stacks.
        growth: rows of `Run.memory_growth`.
        timeline: rows of `Run.memory_timeline`, of the devices drawn.
        over_time: rows of `memory_over_time`, of the same.
        limitations: what the captures cannot tell.
    """

    path: Path
    devices: Rows
    sites: Rows
    at_peak: Rows
    growth: Rows
    timeline: Rows
    over_time: Rows
    limitations: list[str]


@dataclass(frozen=True)
class MemoryAnswer:
    """Of one run, or of two and what differs.

    Args:
        runs: one or two.
        difference: rows of `Run.memory_difference`; none for one run, or where a side has no sites.
    """

    runs: list[Recorded]
    difference: Rows = field(default_factory=list)


def ask(run: Run, other: Run | None = None) -> MemoryAnswer:
    """Ask all that is shown.

    Args:
        run: whose captures are read now, unless they were.
        other: a second one to compare with.
    """
    runs = [_recorded(each) for each in (run, other) if each is not None]
    if other is None or not all(each.sites for each in runs):
        return MemoryAnswer(runs)
    return MemoryAnswer(runs, run.memory_difference(other).to_pylist())


def dumps(answer: MemoryAnswer) -> str:
    """The answer as JSON text: what `bridge-profiling memory --json` prints."""
    names = ("devices", "sites", "growth", "limitations")
    runs = [{"path": str(each.path), **{name: getattr(each, name) for name in names}} for each in answer.runs]
    return json.dumps({"schema_version": SCHEMA_VERSION, "runs": runs, "difference": answer.difference}, indent=1)


def sentences(answer: MemoryAnswer) -> list[str]:
    """The answer in a few sentences, the most important first."""
    first = answer.runs[0]
    found = [_peak(first)]
    if len(answer.runs) > 1:
        found = [_change(*answer.runs), f"Before: {found[0]}", f"After: {_peak(answer.runs[1])}"]
    if answer.difference and abs(answer.difference[0]["change_bytes_at_peak"]) >= _LEAST_BYTES:
        most = answer.difference[0]
        found.insert(1, f"Most of that is {most['site']}: {_signed(most['change_bytes_at_peak'])} at the peak.")
    elif len(answer.runs) == 1 and first.sites:
        most = max(first.sites, key=lambda row: row["bytes_at_peak"])
        share = percent(most["bytes_at_peak"] / max(row["peak_bytes"] for row in first.devices))
        found.append(f"Most of it at the peak is from {most['site']}: {mebibytes(most['bytes_at_peak'])} ({share}).")
    found += [_growing(each) for each in answer.runs[-1:]]
    return [sentence for sentence in found if sentence]


def named_sections(answer: MemoryAnswer) -> list[tuple[str, Section]]:
    """The tables with a short name each; those without rows are left out."""
    found: list[tuple[str, Section]] = []
    if answer.difference:
        found.append(("Difference", _difference(answer.difference)))
    for each, word in zip(answer.runs, ("", "") if len(answer.runs) == 1 else ("before: ", "after: "), strict=False):
        short = word.removesuffix(": ").title()
        found += [
            (f"{short} Devices".strip(), _devices(each, word)),
            (f"{short} At the peak".strip(), _sites(each, word)),
            (f"{short} Largest".strip(), _largest(each, word)),
            (f"{short} Growth".strip(), _growth(each, word)),
        ]
    return [(short, section) for short, section in found if section.rows]


def pictures(answer: MemoryAnswer) -> list[str]:
    """A line of a terminal for each device drawn: memory over time, as tall as it was high."""
    lines = []
    words = ("before, ", "after, ") if len(answer.runs) > 1 else ("",)
    for each, word in zip(answer.runs, words, strict=True):
        highest = max((row["peak_bytes"] for row in each.devices), default=0) or 1
        for key, rows in _by_device(each.timeline).items():
            amounts = _sampled(rows)
            bar = "".join(_STEPS[min(int(amount / highest * len(_STEPS)), len(_STEPS) - 1)] for amount in amounts)
            seconds = (rows[-1]["time_ns"] - rows[0]["time_ns"]) / 1e9
            lines.append(f"{word}{_device(*key)} {bar} {seconds:.2f} s, at most {mebibytes(max(amounts))}")
    return lines


def write_page(answer: MemoryAnswer, output: Path) -> None:
    """Write the answer as a page, with memory over time by allocation site.

    Args:
        answer: about one run or two.
        output: the file.

    Raises:
        ProfilingConfigError: it cannot be written.
    """
    variants = {}
    for each, word in zip(answer.runs, ("before, ", "after, ") if len(answer.runs) > 1 else ("",), strict=True):
        sites = _by_device(each.over_time)
        for key, rows in _by_device(each.timeline).items():
            variants[f"{word}{_device(*key)}"] = memory_figure(sites.get(key, []), rows)
    has_sites = any(each.over_time for each in answer.runs)
    words = "By the place in the program that allocated it." if has_sites else "A trace knows no allocation sites."
    blocks = [Block("Over time", "Memory over time", None, variants, words)] if variants else []
    write_small_page(
        output,
        kind="memory",
        title=" → ".join(each.path.absolute().name for each in answer.runs),
        sentences=sentences(answer),
        blocks=[*blocks, *(block_of(short, section) for short, section in named_sections(answer))],
        limitations=limitations(answer),
    )


def limitations(answer: MemoryAnswer) -> Sequence[str]:
    """What the captures cannot tell."""
    return list(dict.fromkeys(sentence for each in answer.runs for sentence in each.limitations))


def _recorded(run: Run) -> Recorded:
    devices = run.memory().to_pylist()
    drawn = sorted(devices, key=lambda row: -row["peak_bytes"])[:_DRAWN]
    keys = {(row["rank"], row["device"]) for row in drawn}
    over_time = run.ask("memory_over_time", ranks=tuple({rank for rank, _ in keys})) if devices else None

    def of_drawn(rows: Rows) -> Rows:
        return [row for row in rows if (row["rank"], row["device"]) in keys]

    return Recorded(
        path=run.path,
        devices=devices,
        sites=run.memory_sites().to_pylist(),
        at_peak=run.memory_at_peak().drop_columns(["stack"]).slice(0, 1000).to_pylist(),
        growth=run.memory_growth().to_pylist(),
        timeline=of_drawn(run.memory_timeline().to_pylist()),
        over_time=of_drawn(over_time.to_pylist()) if over_time is not None else [],
        limitations=run.limitations,
    )


def _peak(recorded: Recorded) -> str:
    highest = max(recorded.devices, key=lambda row: row["peak_bytes"])
    reserved = highest["peak_reserved_bytes"]
    more = f", {mebibytes(reserved)} reserved of the device" if reserved else ""
    of = f", the highest of {len(recorded.devices)} devices" if len(recorded.devices) > 1 else ""
    where = _device(highest["rank"], highest["device"])
    return f"{where} held {mebibytes(highest['peak_bytes'])} at its peak{more}{of}."


def _change(before: Recorded, after: Recorded) -> str:
    first, second = (max(row["peak_bytes"] for row in each.devices) for each in (before, after))
    if first == second:
        return f"The highest peak is the same: {mebibytes(first)}."
    share = f" ({(second / first - 1) * 100:+.1f} %)" if first else ""
    return f"The highest peak is {mebibytes(second)} instead of {mebibytes(first)}, {_signed(second - first)}{share}."


def _growing(recorded: Recorded) -> str:
    known = [row for row in recorded.devices if row["growth_bytes_per_iteration"] is not None]
    if not known:
        return "Whether it grows from one iteration to the next is not known."
    most = max(known, key=lambda row: row["growth_bytes_per_iteration"])
    growth = most["growth_bytes_per_iteration"]
    if growth <= 0:
        return "It does not grow from one iteration to the next."
    return f"It grows by {mebibytes(growth)} an iteration on {_device(most['rank'], most['device'])}."


def _devices(recorded: Recorded, word: str) -> Section:
    names = ("peak_bytes", "end_bytes", "peak_reserved_bytes", "growth_bytes_per_iteration")
    rows = [
        [
            str(row["rank"]),
            *(mebibytes(row[name]) for name in names),
            percent(row["fragmentation"]),
            row["source"],
        ]
        for row in recorded.devices
    ]
    headings = ["rank", "peak", "at the end", "reserved at most", "growth an iteration", "fragmentation", "from"]
    return Section(f"{word}memory by device", headings, rows, of_ranks=True)


def _sites(recorded: Recorded, word: str) -> Section:
    peak = max((row["peak_bytes"] for row in recorded.devices), default=1) or 1
    found = sorted(recorded.sites, key=lambda row: -row["bytes_at_peak"])
    rows = [
        [
            str(row["rank"]),
            mebibytes(row["bytes_at_peak"]),
            percent(row["bytes_at_peak"] / peak),
            mebibytes(row["peak_bytes"]),
            mebibytes(row["growth_bytes_per_iteration"]),
            str(row["allocations"]),
            row["site"],
        ]
        for row in found[:_SHOWN]
    ]
    headings = ["rank", "at the peak", "share", "its own peak", "growth an iteration", "allocations", "allocation site"]
    return Section(f"{word}live at the peak by allocation site, {len(rows)} of {len(found)}", headings, rows)


def _largest(recorded: Recorded, word: str) -> Section:
    alike = Counter((row["rank"], row["bytes"], row["site"]) for row in recorded.at_peak)
    found = sorted(alike.items(), key=lambda item: (-item[0][1], -item[1], item[0][2]))[:_SHOWN]
    rows = [[str(rank), mebibytes(size), str(count), site] for (rank, size, site), count in found]
    return Section(f"{word}largest allocations live at the peak", ["rank", "size", "times", "allocation site"], rows)


def _growth(recorded: Recorded, word: str) -> Section:
    rows = [
        [
            str(row["rank"]),
            "-" if row["iteration"] is None else str(row["iteration"]),
            mebibytes(row["allocated_bytes"]),
            _signed(row["change_bytes"]),
        ]
        for row in recorded.growth
    ]
    headings = ["rank", "iteration", "at its end", "change"]
    return Section(f"{word}memory at the end of each iteration", headings, rows, of_ranks=True)


def _difference(difference: Rows) -> Section:
    found = [
        row for row in difference if max(abs(row["change_bytes_at_peak"]), abs(row["change_end_bytes"])) >= _LEAST_BYTES
    ] or difference
    rows = [
        [
            *(mebibytes(row[f"{side}_bytes_at_peak"]) for side in ("before", "after")),
            _signed(row["change_bytes_at_peak"]),
            _signed(row["change_end_bytes"]),
            row["site"],
        ]
        for row in found[:_SHOWN]
        if row["change_bytes_at_peak"] or row["change_end_bytes"]
    ]
    headings = ["before", "after", "change at the peak", "change at the end", "allocation site"]
    return Section(f"what changed by allocation site, {len(rows)} of {len(found)}, means of the devices", headings, rows)


def _by_device(rows: Rows) -> dict[tuple[int, int], Rows]:
    found: dict[tuple[int, int], Rows] = {}
    for row in rows:
        found.setdefault((row["rank"], row["device"]), []).append(row)
    return found


def _sampled(rows: Rows) -> list[int]:
    """The most that was held in each of some equal stretches of time, as a terminal is wide."""
    first, last = rows[0]["time_ns"], rows[-1]["time_ns"]
    width = max(last - first, 1) / _WIDTH
    amounts: list[int | None] = [None] * _WIDTH
    for row in rows:
        place = min(int((row["time_ns"] - first) / width), _WIDTH - 1)
        amounts[place] = max(amounts[place] or 0, row["allocated_bytes"])
    held = rows[0]["allocated_bytes"]
    filled = []
    for amount in amounts:
        held = held if amount is None else amount
        filled.append(held)
    return filled


def _device(rank: int, device: int) -> str:
    return f"rank {rank}" if device in (0, rank) else f"rank {rank}, device {device}"


def _signed(amount: float | None) -> str:
    return "-" if amount is None else f"{'+' if amount > 0 else ''}{mebibytes(amount)}"
