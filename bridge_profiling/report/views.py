"""The view models: what a page or a terminal shows, in words and figures, independent of how it is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bridge_profiling.report import words

if TYPE_CHECKING:  # a submit host has no numpy
    from bridge_profiling.findings import Finding

#: A Plotly figure: `{"data": […], "layout": {…}}`.
Figure = dict[str, Any]
Row = Mapping[str, Any]

#: A number in words, or the dash for an unknown one.
_NUMBER = re.compile(r"[−+]?\d|–$")


@dataclass(frozen=True)
class Target:
    """A part of the page's timeline, in milliseconds since the iteration began."""

    rank: int
    iteration: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, the number it is sorted by, and what it leads to (a link, or a place in the timeline)."""

    text: str
    value: float | None = None
    link: str | None = None
    copy: str | None = None
    target: Target | None = None


@dataclass(frozen=True)
class TableView:
    """A table in words."""

    id: str  # in links and scripts
    title: str  # what it shows, with the unit
    columns: Sequence[str]  # headings, with units. The first column names the row, unless `name_last`.
    rows: Sequence[Sequence[Cell]]  # a cell per column
    name_last: bool = False  # the last column is a long name
    of_ranks: bool = False  # it has a row or more per rank: a terminal shows the first only
    # Kinds to filter by, the first column; None for a table that is not sorted or filtered.
    filters: Sequence[str] | None = None
    sorted_by: int = 0  # the column that the rows are sorted by, descending
    note: str = ""  # which rows are left out
    folded: bool = False  # hidden until the reader opens it
    python: str = ""  # what of a `Run` returns the rows

    @cached_property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers: those are aligned right."""
        named = len(self.columns) - 1 if self.name_last else 0
        return [
            place != named and bool(self.rows) and all(_NUMBER.match(row[place].text) for row in self.rows)
            for place in range(len(self.columns))
        ]


@dataclass(frozen=True)
class FigureView:
    """A figure in one or more variants, of which the reader selects one."""

    id: str  # in links and scripts
    variants: Mapping[str, Figure]  # figures by their names in words
    caption: str  # what it shows, in a sentence


def captioned(id: str, variants: Mapping[str, Figure | None], *, shown_as: str = "", **said: object) -> list[FigureView]:
    """A figure with its caption, and what that names; none where there is nothing to draw. `shown_as`: its id on the page."""
    drawn = {name: figure for name, figure in variants.items() if figure is not None}
    return [FigureView(shown_as or id, drawn, words.text("captions", id).format(**said))] if drawn else []


@dataclass(frozen=True)
class SectionView:
    """A section: a title, paragraphs, figures and tables; `kind` names a template of its own."""

    id: str
    title: str
    paragraphs: Sequence[str] = ()
    notes: Sequence[str] = ()
    figures: Sequence[FigureView] = ()
    tables: Sequence[TableView] = ()
    parts: Sequence[SectionView] = ()
    short: str = ""
    kind: str = ""
    data: Any = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing but words."""
        return not (self.figures or self.tables or self.parts or self.data)


def section(
    id: str, *paragraphs: str, figures: Sequence[FigureView] = (), tables: Iterable[TableView] = (), **more: Any
) -> SectionView:
    """A section with its explanation, or with the sentence that it has nothing to show. Tables without rows are left out."""
    texts = words.text("sections", id)
    found = [each for each in tables if each.rows]
    view = SectionView(id, texts["title"], short=texts.get("short", ""), figures=figures, tables=found, **more)
    nothing = view.empty and "nothing" in texts
    text, kind = texts.get("nothing" if view.empty else "text"), "" if nothing else texts.get("kind", "")
    return replace(view, paragraphs=[*([text] if text else []), *paragraphs], kind=kind)


@dataclass(frozen=True)
class Verdict:
    """The answer in words: a headline, at most four sentences, what to do first, and what limits the answer."""

    headline: str
    sentences: Sequence[str] = ()
    first: Sequence[str] = ()
    caveats: Sequence[str] = ()


@dataclass(frozen=True)
class FindingView:
    """A finding with its numbers in words, and a picture of it."""

    number: int
    finding: Finding
    responsible: str  # ranks
    gain: str
    evidence: Sequence[tuple[str, str]]
    events: TableView | None
    figure: FigureView | None


@dataclass(frozen=True)
class PageView:
    """A page: of a run, a comparison or memory."""

    kind: str
    title: str
    verdict: Verdict
    sections: Sequence[SectionView]
    facts: Sequence[tuple[str, str]] = ()
    findings: Sequence[FindingView] | None = None
    notices: Sequence[str] = ()
    caveats: Sequence[str] = ()
    timeline: Mapping[str, Any] | None = None
    opened: str = ""  # the line of Python that opens the run

    @property
    def figures(self) -> dict[str, Mapping[str, Figure]]:
        """Every figure's variants by its id."""
        sections = [part for section in self.sections for part in (section, *section.parts)]
        found = [figure for section in sections for figure in section.figures]
        found += [finding.figure for finding in self.findings or () if finding.figure is not None]
        return {figure.id: figure.variants for figure in found}
