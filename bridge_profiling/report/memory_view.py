"""Device memory of one run, or of two, in words, tables and figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_profiling.facts.caveats import sentences
from bridge_profiling.report import tables, words
from bridge_profiling.report.run_view import memory_over_time_view
from bridge_profiling.report.views import FigureView, PageView, Row, SectionView, TableView, Verdict, of, table

if TYPE_CHECKING:
    from bridge_profiling.run import Run

SCHEMA_VERSION = 1

#: Rows of a table of allocation sites.
_SHOWN = 12

#: Devices that are drawn.
_DRAWN = 8

#: Columns of a picture on a terminal, and its levels.
_WIDTH, _LEVELS = 72, "▁▂▃▄▅▆▇█"

#: Smaller changes of a site come from the allocator's rounding.
_LEAST_BYTES = 1 << 20

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Recorded:
    """One run's memory: rows of the `Run.memory…` questions, `figures` over time, and a terminal's picture as lines."""

    path: Path
    devices: Rows
    sites: Rows
    at_peak: Rows
    growth: Rows
    limitations: list[str]
    figures: list[FigureView]
    lines: list[str]


@dataclass(frozen=True)
class MemoryAnswer:
    """One run's memory; or two runs' and rows of `Run.memory_difference`, if both have allocation sites."""

    runs: list[Recorded]
    difference: Rows = field(default_factory=list)


def ask(run: Run, other: Run | None = None) -> MemoryAnswer:
    """Ask all that is shown of a run's memory, or of two runs'."""
    runs = [_recorded(run, "over-time"), *([] if other is None else [_recorded(other, "over-time-after")])]
    if other is None or not all(each.sites for each in runs):
        return MemoryAnswer(runs)
    return MemoryAnswer(runs, run.memory_difference(other).to_pylist())


#: Where snapshots can be opened, in the browser.
MEMORY_VIEWER = "https://pytorch.org/memory_viz"


def dumps(answer: MemoryAnswer) -> str:
    """The document that `bridge-profiling memory --json` prints."""
    names = ("devices", "sites", "growth", "limitations")
    runs = [{"path": str(each.path), **{name: getattr(each, name) for name in names}} for each in answer.runs]
    return json.dumps({"schema_version": SCHEMA_VERSION, "runs": runs, "difference": answer.difference}, indent=1)


def memory_view(answer: MemoryAnswer) -> PageView:
    """The view of one run's memory, or of two runs'."""
    sections = []
    if answer.difference:
        sections.append(SectionView("difference", "Difference", tables=[_difference(answer.difference)]))
    for each, side in zip(answer.runs, ("",) if len(answer.runs) == 1 else ("Before: ", "After: "), strict=True):
        if each.figures:
            sections.append(SectionView(each.figures[0].id, f"{side}memory over time".capitalize(), figures=each.figures))
        for short, found in (
            ("Devices", _devices(each)),
            ("Sites", _sites(each)),
            ("Largest", _largest(each)),
            ("Growth", _growth(each)),
        ):
            if found.rows:
                id = f"{side}{short}".lower().replace(": ", "-")
                sections.append(SectionView(id, f"{side}{found.title}", tables=[found], short=f"{side}{short}"))
    headline, *sentences = _sentences(answer)
    limitations = list(dict.fromkeys(sentence for each in answer.runs for sentence in each.limitations))
    title = " → ".join(each.path.absolute().name for each in answer.runs)
    return PageView("memory", title, Verdict(headline, sentences), sections, caveats=limitations)


def picture_lines(answer: MemoryAnswer) -> list[str]:
    """Memory over time as a line of a terminal for each device."""
    return [
        f"{side}{line}"
        for each, side in zip(answer.runs, ("", "after: ")[: len(answer.runs)], strict=True)
        for line in each.lines
    ]


def _recorded(run: Run, figure: str) -> Recorded:
    devices = run.memory().to_pylist()
    drawn = {(row["rank"], row["device"]) for row in sorted(devices, key=lambda row: -row["peak_bytes"])[:_DRAWN]}
    timeline = [row for row in run.memory_timeline().to_pylist() if (row["rank"], row["device"]) in drawn]
    return Recorded(
        path=run.path,
        devices=devices,
        sites=run.memory_sites().to_pylist(),
        at_peak=run.memory_at_peak().drop_columns(["stack"]).slice(0, 1000).to_pylist(),
        growth=run.memory_growth().to_pylist(),
        figures=memory_over_time_view(run, {rank for rank, _ in drawn}, figure) if devices else [],
        lines=_lines(timeline, max((row["peak_bytes"] for row in devices), default=0) or 1),
        limitations=sentences([*run.capture_caveats, *run.caveats("memory")]),
    )


def _lines(timeline: Rows, highest: int) -> list[str]:
    lines = []
    for rank, device in sorted({(row["rank"], row["device"]) for row in timeline}):
        rows = [row for row in timeline if (row["rank"], row["device"]) == (rank, device)]
        amounts = _sampled(rows)
        bar = "".join(_LEVELS[min(int(amount / highest * len(_LEVELS)), len(_LEVELS) - 1)] for amount in amounts)
        seconds = (rows[-1]["time_ns"] - rows[0]["time_ns"]) / 1e9
        lines.append(f"{words.device(rank, device)} {bar} {seconds:.2f} s, peak {words.memory(max(amounts))}")
    return lines


def _sampled(rows: Rows) -> list[int]:
    """The maximum in each of `_WIDTH` equal intervals."""
    first, last = rows[0]["time_ns"], rows[-1]["time_ns"]
    width = max(last - first, 1) / _WIDTH
    highest: dict[int, int] = {}
    for row in rows:
        place = min(int((row["time_ns"] - first) / width), _WIDTH - 1)
        highest[place] = max(highest.get(place, 0), row["allocated_bytes"])
    filled = [rows[0]["allocated_bytes"]]
    for place in range(_WIDTH):
        filled.append(highest.get(place, filled[-1]))
    return filled[1:]


def _sentences(answer: MemoryAnswer) -> list[str]:
    """The answer, the most important sentence first."""
    first, last = answer.runs[0], answer.runs[-1]
    found = [_peak(first)]
    if len(answer.runs) > 1:
        found = [_change(first, last), f"Before: {found[0]}", f"After: {_peak(last)}"]
    if answer.difference and abs(answer.difference[0]["change_bytes_at_peak"]) >= _LEAST_BYTES:
        row = answer.difference[0]
        found.insert(
            1, f"Most of the change is {row['site']}: {words.memory(row['change_bytes_at_peak'], signed=True)} at the peak."
        )
    elif len(answer.runs) == 1 and first.sites:
        row = max(first.sites, key=lambda row: row["bytes_at_peak"])
        share = words.percent(row["bytes_at_peak"] / max(row["peak_bytes"] for row in first.devices))
        found.append(f"The largest part at the peak is from {row['site']}: {words.memory(row['bytes_at_peak'])} ({share}).")
    found.append(_growing(last))
    if any(row["source"] == "snapshot" for each in answer.runs for row in each.devices):
        found.append(f"PyTorch's memory viewer shows the snapshots themselves, allocation by allocation: {MEMORY_VIEWER}.")
    return found


def _peak(recorded: Recorded) -> str:
    highest = max(recorded.devices, key=lambda row: row["peak_bytes"])
    reserved = highest["peak_reserved_bytes"]
    more = f"; at most {words.memory(reserved)} reserved" if reserved else ""
    of = f", the highest of {len(recorded.devices)} devices" if len(recorded.devices) > 1 else ""
    return words.sentence(
        f"{words.device(highest['rank'], highest['device'])} peaks at {words.memory(highest['peak_bytes'])}{of}{more}"
    )


def _change(before: Recorded, after: Recorded) -> str:
    first, second = (max(row["peak_bytes"] for row in each.devices) for each in (before, after))
    if first == second:
        return f"The highest peak is the same: {words.memory(first)}."
    share = f" ({words.percent(second / first - 1, signed=True)})" if first else ""
    difference = words.memory(second - first, signed=True)
    return f"The highest peak is {words.memory(second)} instead of {words.memory(first)}, {difference}{share}."


def _growing(recorded: Recorded) -> str:
    known = [row for row in recorded.devices if row["growth_bytes_per_iteration"] is not None]
    if not known:
        return "Whether memory grows from one iteration to the next is unknown."
    highest = max(known, key=lambda row: row["growth_bytes_per_iteration"])
    growth = highest["growth_bytes_per_iteration"]
    if growth <= 0:
        return "It does not grow from one iteration to the next."
    return f"It grows by {words.memory(growth)} per iteration on {words.device(highest['rank'], highest['device'])}."


def signed(name: str) -> Any:
    """Makes cells of a change of memory."""
    return of(name, lambda amount: words.memory(amount, signed=True))


def _devices(recorded: Recorded) -> TableView:
    return tables.memory_devices(recorded.devices, len(recorded.devices), "Memory by device")


def _sites(recorded: Recorded) -> TableView:
    peak = max((row["peak_bytes"] for row in recorded.devices), default=1) or 1
    found = sorted(recorded.sites, key=lambda row: -row["bytes_at_peak"])
    columns = {
        "rank": of("rank", str),
        "at the peak": of("bytes_at_peak", words.memory),
        "share": lambda row: words.percent(row["bytes_at_peak"] / peak),
        "its own peak": of("peak_bytes", words.memory),
        "growth per iteration": of("growth_bytes_per_iteration", words.memory),
        "allocations": of("allocations"),
        "allocation site": lambda row: row["site"],
    }
    title = f"Live at the peak by allocation site, {min(len(found), _SHOWN)} of {len(found)}"
    return table("sites", title, found[:_SHOWN], columns, name_last=True)


def _largest(recorded: Recorded) -> TableView:
    alike = Counter((row["rank"], row["bytes"], row["site"]) for row in recorded.at_peak)
    found = sorted(alike.items(), key=lambda item: (-item[0][1], -item[1], item[0][2]))[:_SHOWN]
    rows = [{"rank": rank, "bytes": size, "count": count, "site": site} for (rank, size, site), count in found]
    columns = {
        "rank": of("rank", str),
        "size": of("bytes", words.memory),
        "count": of("count"),
        "allocation site": lambda row: row["site"],
    }
    return table("largest", "Largest allocations live at the peak", rows, columns, name_last=True)


def _growth(recorded: Recorded) -> TableView:
    columns = {
        "rank": of("rank", str),
        "iteration": of("iteration"),
        "at its end": of("allocated_bytes", words.memory),
        "change": signed("change_bytes"),
    }
    return table("growth", "Memory at the end of each iteration", recorded.growth, columns, of_ranks=True)


def _difference(difference: Sequence[Row]) -> TableView:
    changes = ("change_bytes_at_peak", "change_end_bytes")
    found = [row for row in difference if max(abs(row[name]) for name in changes) >= _LEAST_BYTES] or difference
    shown = [row for row in found[:_SHOWN] if any(row[name] for name in changes)]
    title = f"Changes by allocation site, {len(shown)} of {len(found)}, means of the devices"
    columns = {
        "before": of("before_bytes_at_peak", words.memory),
        "after": of("after_bytes_at_peak", words.memory),
        "change at the peak": signed("change_bytes_at_peak"),
        "change at the end": signed("change_end_bytes"),
        "allocation site": lambda row: row["site"],
    }
    return table("difference", title, shown, columns, name_last=True)
