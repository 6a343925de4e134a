"""Every table: `tables.toml` declares them, and what a declaration cannot say is a function here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pyarrow as pa

from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.parts import BY_ACTIVITY
from bridge_profiling.facts.phases import KINDS
from bridge_profiling.facts.words import UNKNOWN, fill, named_ranks, written
from bridge_profiling.manifest import RankCapture
from bridge_profiling.report import rows as summed
from bridge_profiling.report import words
from bridge_profiling.report.figures import HOST_PARTS, PARTS, visible_parts
from bridge_profiling.report.rows import Rows
from bridge_profiling.report.views import Cell, Row, TableView, Target
from bridge_profiling.traces.types import RankInfo

#: Units in names of columns, and the formats of values with each.
_UNITS = words.UNITS | {"ns": "bare_ms", "gbs": "bandwidth"}

#: Numbers that identify something: they are not grouped in thousands.
_IDENTIFIERS = ("rank", "stage", "waits_for_stage", "device", "iteration")


#: Keys of a declaration that the view of a table has, too.
_SHOWN = ("name_last", "of_ranks", "folded", "python")


@dataclass(frozen=True)
class _Column:
    heading: str
    name: str  # of a column of the rows, of a function, or a text with values
    form: str  # a format; of a benchmark's estimates after the part that is written: "median digits", "bounds digits"
    condition: str

    @classmethod
    def of(cls, declared: str) -> _Column:
        rest, asked, condition = declared.partition("?")
        heading, equals, made = map(str.strip, rest.rpartition("="))
        name, _, form = (made, "", "") if "{" in made else made.partition(" ")
        if not equals:
            heading = " ".join(word for word in name.removesuffix("()").split("_") if word not in ("ns", "bytes"))
        unit = next((_UNITS[word] for word in name.split("_") if word in _UNITS), "plain")
        if not form or form == "signed":
            form = f"signed {unit}" if form else "identifier" if name in _IDENTIFIERS else unit
        return cls(heading, name, form, (condition or name) if asked else "")

    def cell(self, row: Row) -> Cell:
        if "{" in self.name:
            return Cell(self.name.format_map(row))
        value: Any = FUNCTIONS[self.name[:-2]](row) if self.name.endswith("()") else row[self.name]
        if isinstance(value, Cell):
            return value
        part, _, form = self.form.partition(" ")
        if part == "bounds" and value is not None:
            low, high = value["low"], value["high"]
            known = low is not None and high is not None
            return Cell(f"{written(form, low)}–{written(form, high)}" if known else f"{UNKNOWN} of {value['count']}")
        if part in ("median", "mean"):
            return Cell(written(form, value and value[part]))
        return Cell(written(self.form, value), value if isinstance(value, (int, float)) else None)


def view(
    id: str,
    rows: Rows,
    most_rows: int | None = None,
    *,
    note: str = "",
    more: Mapping[str, str] | None = None,
    shown_as: str = "",
    **said: str,
) -> TableView:
    """A table of rows.

    Args:
        id: of the table in `tables.toml`.
        rows: the rows.
        most_rows: how many of them the table has at most; a note counts the others.
        note: a further note.
        more: headings and names of the columns that "*" stands for.
        shown_as: its id on the page; "" for the same.
        said: what the title names.
    """
    table, every = words.resource("tables")[id], list(rows)
    order, kinds, less = table.get("order"), table.get("kinds"), table.get("less", "with less time")
    added = [f"{heading} = {name}" for heading, name in (more or {}).items()]
    declared = [part for each in table["columns"] for part in (added if each == "*" else [each])]
    columns = [
        each for each in map(_Column.of, declared) if not each.condition or any(row.get(each.condition) for row in every)
    ]
    if order:
        every.sort(key=lambda row: -(row[order] or 0))
    shown = every[:most_rows]
    left = len(every) - len(shown) if less else 0
    noted = f"{left:,} more {less}: bridge-profiling analyze --json lists them. " if left else ""
    names = [column.name for column in columns]
    return TableView(
        shown_as or id,
        table["title"].format(shown=len(shown), all=len(every), **said),
        [column.heading for column in columns],
        [[column.cell(row) for column in columns] for row in shown],
        filters=None if kinds is None else sorted({row[kinds] for row in shown} if kinds else ()),
        sorted_by=names.index(order) if order in names else 0,
        note=f"{noted}{note}".strip(),
        **{name: table[name] for name in _SHOWN if name in table},
    )


def typical(rows: Rows, without_device: Collection[tuple[int, str]]) -> TableView:
    """Rows of `RunFacts.typical_iteration`; ranks without a device have a duration only."""
    known = {"rank", "source", "duration_ns", "iterations"}
    on_cpus = [(row["rank"], row["source"]) in without_device for row in rows]
    shown = [row | dict.fromkeys(row.keys() - known) if on_cpu else row for row, on_cpu in zip(rows, on_cpus, strict=True)]
    return view("typical", shown)


def attribution(bars: Rows, by: str = "cause") -> TableView:
    """Bars of the attribution figure in numbers; each has a `label`."""
    return view(f"attribution-by-{by}", bars, more={PARTS[part][0]: part for part in visible_parts(bars, by)})


def host(ranks: Rows) -> TableView:
    """The parts of each rank's mean iteration, from `rows.mean_host_iterations`."""
    return view("host", ranks, more={name: f"{part} ?" for part, (name, _) in HOST_PARTS.items()})


def spread(rows: Rows) -> TableView:
    """How the ranks of a large job differ, from rows of `RunFacts.attribution`."""
    lines = []
    for part in ("duration_ns", *visible_parts(rows), *BY_ACTIVITY[1:]):
        values = sorted(row[part] for row in rows)
        low, high = (values[min(int(share * len(values)), len(values) - 1)] for share in (0.05, 0.95))
        name = "iteration" if part == "duration_ns" else PARTS[part][0]
        ends = {"minimum_ns": values[0], "low_ns": low, "high_ns": high, "maximum_ns": values[-1]}
        lines.append({"part": name, "median_ns": median(values), **ends})
    return view("spread", lines)


def kernels(rows: Rows, count: int) -> TableView:
    """Rows of `RunFacts.kernels`."""
    differ = any(row["configurations"] > 1 for row in rows[:count])
    note = "A +: launches differ, and the most frequent is shown." if differ else ""
    return view("kernels", summed.shares(rows), count, note=note)


def operators(of_ranks: pa.Table, count: int, places: Mapping[str, Target] | None = None) -> TableView:
    """`RunFacts.operators`; `places`: where the timeline shows the longest call of each name."""
    found = summed.operators(of_ranks)
    if places:
        found = [row | {"longest": Cell("", target=places.get(row["name"]))} for row in found]
    return view("operators", found, count, ranks=named_ranks(sorted(set(of_ranks["rank"].to_pylist()))))


def kernel_counters(rows: Rows, count: int) -> TableView:
    """Rows of `RunFacts.kernel_counters`: the kernels that take the most device time."""
    merged = summed.kernel_counters(rows)
    unknown = [row for row in merged if row["samples_per_call"] < 1]
    note = ""
    if unknown:
        spent = sum(row["device_ns"] for row in unknown) / sum(row["device_ns"] for row in rows)
        shorter = "1 kernel is" if len(unknown) == 1 else f"{len(unknown):,} kernels are"
        note = (
            f"{shorter} shorter than the time between two samples ({words.percent(spent)} of the device time), which leaves"
            " their counters unknown. nsys_extra_args=--gpu-metrics-frequency=200000 samples more often."
        )
    return view("kernel-counters", merged, count, note=note)


def system_calls(rows: Rows, count: int) -> TableView:
    """Rows of `RunFacts.system_calls`."""
    when = "an iteration" if any(row["iterations"] for row in rows) else "the whole capture"
    return view("system-calls", rows, count, when=when)


def phases(rows: Rows, count: int, *, of_device: bool, library: bool = True) -> TableView:
    """Rows of `RunFacts.phases`, one per name; see `rows.phases`."""
    merged = [row | {"of_device": of_device} for row in summed.phases(rows, library=library)]
    each = "iteration" if any(row["iterations"] for row in merged) else "rank"
    return view("phases", merged, count, per=_per(merged), each=each)


def phases_of_ranks(rows: Rows, count: int, places: Sequence[Target | None], *, of_device: bool) -> TableView:
    """Rows of `RunFacts.phases`, one per name and rank; `places`: for each, where the timeline shows its longest call."""
    shown = [
        summed.with_counters(row)
        | {"of_device": of_device, "on_host": not of_device}
        | {"longest": Cell("", row["longest_ns"], target=place) if any(places) else None}
        for row, place in zip(rows, places, strict=True)
    ]
    found = view("phases-by-rank", shown, count, per=_per(rows))
    return replace(found, filters=[kind for kind in KINDS if kind in (found.filters or ())])


def _per(rows: Rows) -> str:
    return "per iteration" if any(row["iterations"] for row in rows) else "in the whole capture"


def _launch(row: Row) -> Cell:
    """Grid and block of the most frequent launch, without dimensions of 1 at the end; "+" where launches differ."""
    if row["grid"] is None:
        return Cell(UNKNOWN)
    grid, block = (re.sub(r"(x1)+$", "", row[name]) for name in ("grid", "block"))
    return Cell(f"{grid} × {block}{'+' * (row['configurations'] > 1)}", math.prod(map(int, row["grid"].split("x"))))


def _resources(row: Row) -> Cell:
    if row["registers_per_thread"] is None:
        return Cell(UNKNOWN)
    return Cell(f"{row['registers_per_thread']}, {written('size', row['shared_memory_bytes'])}", row["registers_per_thread"])


def _slow(row: Row) -> str:
    often = {"stable": "always", "sometimes": "sometimes", "no": "no"}
    confidence = f" ({row['confidence']} confidence)" if row["confidence"] else ""
    return f"{often.get(row['verdict'], row['verdict'])}{confidence}"


def copy_kind(row: Row) -> str:
    """A copy's direction and memory, or "memset"."""
    if row.get("kind") == "memset":
        return "memset"
    return f"{row['direction']} {row['from_memory']} to {row['to_memory']}"


def _low_high(side: str) -> Callable[[Row], Cell]:
    low, high = f"{side}_low_ns", f"{side}_high_ns"
    ends = "{0:bare_ms} – {1:bare_ms}"
    return lambda row: Cell(UNKNOWN if row[low] is None else fill(ends, row[low], row[high]), row[high])


def _measured(row: Row) -> str:
    if row["value"] is None:
        return row["reason"]
    on = "" if row["rank"] is None else f" on rank {row['rank']}"
    return f"{words.percent(row['value'])} {words.text('checks', row['check'])[1]}{on}"


#: What `name()` in `tables.toml` stands for.
FUNCTIONS: Mapping[str, Callable[[Row], Cell | str]] = {
    "copy_kind": copy_kind,
    "device_name": lambda row: UNKNOWN if row["device"] is None else words.device(row["rank"], row["device"]),
    "device_spread": _low_high("device"),
    "host_spread": _low_high("host"),
    "launch": _launch,
    "measured": _measured,
    "question": lambda row: words.text("checks", row["check"])[0].format(limit=words.percent(row["limit"])),
    "resources": _resources,
    "slow": _slow,
}


def captures(
    infos: Iterable[RankInfo],
    manifests: Mapping[int, RankCapture],
    iterations: Rows,
    offsets: Mapping[int, Row],
    uneventful: int | None,
) -> TableView:
    """How complete each rank's capture is; of the complete ones the first `uneventful`, None for all."""
    boundaries = grouped(iterations, "rank")
    rows, quiet = [], 0
    for info in infos:
        manifest, offset = manifests.get(info.rank), offsets.get(info.rank, {})
        status = manifest.manifest.status if manifest else "partial" if info.partial else "no manifest"
        sound = status in ("complete", "no manifest") and not info.error
        quiet += sound
        if sound and uneventful is not None and quiet > uneventful:
            continue
        boundary = [row["boundary"] for row in boundaries.get(info.rank, ())]
        edges = f", {sum(boundary)} at the profiler's edges" if any(boundary) else ""
        row = {
            "rank": f"rank {info.rank}",
            "status": f"{status}{', cut short' if info.error and info.judged else '' if info.judged else ', not judged'}",
            "iterations": f"{len(boundary)}{edges}",
            **{name: offset.get(name) for name in ("offset_ns", "residual_ns")},
            "host": info.host or None,
        }
        for name, profiled in (("profiled", True), ("not_profiled", False)):
            durations_ns = manifest.durations_ns(profiled=profiled) if manifest else []
            row[name] = median(durations_ns) if durations_ns else None
        rows.append(row)
    left = 0 if uneventful is None else max(quiet - uneventful, 0)
    return view("captures", rows, note=f"{left:,} more ranks without problems." if left else "")
