"""What the page's sections are made of: tables of text, figures by name, and links into the timeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from bridge_profiling.report.figures.style import Figure

#: What a number in words begins with; a dash stands for one that is not known.
_NUMBER = re.compile(r"[−+]?\d|–")

#: Figures by section, each in one or more variants among which a reader chooses.
Figures = dict[str, dict[str, Figure]]


@dataclass(frozen=True)
class Table:
    """A table in words; the first column names the row.

    Args:
        headings: with their units.
        rows: a text per column.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numbers(self) -> list[bool]:
        """Which columns hold numbers: those are aligned at the right."""
        return [
            place > 0 and bool(self.rows) and all(_NUMBER.match(row[place]) for row in self.rows)
            for place in range(len(self.headings))
        ]


@dataclass(frozen=True)
class Cell:
    """A cell of a table that can be sorted.

    Args:
        text: what is shown.
        value: what it is sorted by: a number, or None for the text itself.
    """

    text: str
    value: float | None = None


@dataclass(frozen=True)
class SortableTable:
    """A table that the reader sorts and filters.

    Args:
        id: of the table on the page.
        caption: what it shows.
        headings: with their units; the last column is a name.
        rows: cells, and the kind by which they are filtered.
        kinds: that can be chosen; none for no choice.
        sorted_by: the column by which the rows are sorted now, from the most to the least.
        left_out: rows that are not shown.
    """

    id: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    kinds: Sequence[str] = field(default_factory=list)
    sorted_by: int = 0
    left_out: int = 0
