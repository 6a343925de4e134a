"""Every table: `tables.toml` declares them, and what a declaration cannot say is a function here."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge_profiling.facts.phases import KINDS
from bridge_profiling.facts.words import UNKNOWN, fill, written
from bridge_profiling.report import words
from bridge_profiling.report.figures import HOST_PARTS, PARTS, VIEWS
from bridge_profiling.report.rows import Rows
from bridge_profiling.report.views import Cell, Row, SectionView, TableView

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


def declared(id: str) -> dict[str, Any]:
    """The declaration of a table, with what it takes from another one."""
    every = words.resource("tables")
    return every.get(every[id].get("like"), {}) | every[id]


def sections(rows: Mapping[str, Rows], side: str = "") -> list[SectionView]:
    """A section for each table that has rows, by its short name; `side`: what comes before it, as "Before: "."""
    views = {f"{side}{declared(id)['short']}": view(id, found) for id, found in rows.items() if found}
    ids = {name: name.lower().replace(": ", "-").replace(" ", "-") for name in views}
    return [SectionView(ids[name], f"{side}{table.title}", tables=[table], short=name) for name, table in views.items()]


def view(
    id: str, rows: Rows, most: int | None = None, *, place: str = "page", note: str = "", known: Row | None = None
) -> TableView:
    """A table of rows.

    Args:
        id: of the table in `tables.toml`.
        rows: the rows.
        most: how many of them the table has at most; a note counts the others. None for the declared number.
        place: where it is shown, which decides that number.
        note: a further note.
        known: values that the title names, besides those of the first row.
    """
    table, every = declared(id), list(rows)
    order, kinds, less = table.get("order"), table.get("kinds"), table.get("less", "with less time")
    names_of_parts = (
        HOST_PARTS if table.get("parts") == "host" else {part: PARTS[part] for part in VIEWS.get(table.get("parts", ""), ())}
    )
    parts = [f"{name} = {part} ?" for part, (name, _) in names_of_parts.items()]
    made = [part for each in table["columns"] for part in (parts if each == "*" else [each])]
    columns = [each for each in map(_Column.of, made) if not each.condition or any(row.get(each.condition) for row in every)]
    if order:
        every.sort(key=lambda row: -(row[order] or 0))
    most = table.get("most", {}).get(place) if most is None else most
    shown = every[:most]
    left = len(every) - len(shown) if less else 0
    noted = f"{left:,} more {less}: bridge-profiling analyze --json lists them. " if left else ""
    unmarked = not any(row.get("iterations") for row in every)
    marked = {name: texts[unmarked] for name, texts in table.get("marked", {}).items()}
    said = {**(every[0] if every else {}), **(known or {}), **marked, "shown": len(shown), "all": len(every)}
    names, found = [column.name for column in columns], {row[kinds] for row in shown} if kinds else set()
    return TableView(
        id,
        table["title"].format_map(defaultdict(str, said)),
        [column.heading for column in columns],
        [[column.cell(row) for column in columns] for row in shown],
        filters=None if kinds is None else [kind for kind in (*KINDS, *sorted(found - {*KINDS})) if kind in found],
        sorted_by=names.index(order) if order in names else 0,
        note=f"{noted}{NOTES[id](every, shown) if id in NOTES else note}".strip(),
        **{name: table[name] for name in _SHOWN if name in table},
    )


def _differing(every: Rows, shown: Rows) -> str:
    return "A +: launches differ, and the most frequent is shown." if any(row["configurations"] > 1 for row in shown) else ""


def _unknown_counters(every: Rows, shown: Rows) -> str:
    unknown = [row for row in every if row["samples_per_call"] < 1]
    if not unknown:
        return ""
    spent = sum(row["device_ns"] for row in unknown) / sum(row["device_ns"] for row in every)
    return words.say("unknown_counters", "1 kernel is" if len(unknown) == 1 else f"{len(unknown):,} kernels are", spent)


#: Notes on the rows of tables and on those shown, by the tables' ids.
NOTES: Mapping[str, Callable[[Rows, Rows], str]] = {"kernels": _differing, "kernel-counters": _unknown_counters}


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
