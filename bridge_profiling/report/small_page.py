"""A page of an answer, tables and figures, self-contained and in the style of a run's page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.report import self_contained
from bridge_profiling.report.figures.style import COLOURS, Figure
from bridge_profiling.report.page_parts import Table
from bridge_profiling.report.run_tables import Section

#: The page's own are those of a run's page; `small_page.js` stands in for what only that one has.
_SCRIPTS = ("figures.js", "small_page.js", "page.js")


@dataclass(frozen=True)
class Block:
    """A section of the page.

    Args:
        short: its name in the navigation.
        title: what it shows, with the unit.
        table: its table; None for none.
        variants: its figures by name, of which a reader chooses one; none for no figure.
        words: what the figure shows.
    """

    short: str
    title: str
    table: Table | None = None
    variants: dict[str, Figure] | None = None
    words: str = ""

    @property
    def id(self) -> str:
        """The section's name in links."""
        return re.sub(r"[^a-z0-9]+", "-", self.short.lower()).strip("-")


def block_of(short: str, section: Section) -> Block:
    """A terminal's table as a section: there a name is the last column, here the first.

    Args:
        short: its name in the navigation.
        section: the table.
    """
    lines = [section.columns, *section.rows]
    turned = lines if section.of_ranks else [[row[-1], *row[:-1]] for row in lines]
    rows = [[_typeset(text) for text in row] for row in turned[1:]]
    return Block(short, section.title[:1].upper() + section.title[1:], Table(turned[0], rows))


def _typeset(text: str) -> str:
    """With a minus sign, and a dash for what is not known, as on a run's page."""
    return "–" if text == "-" else re.sub(r"^-(?=\d)", "−", text)


def write_small_page(
    output: Path, *, kind: str, title: str, sentences: Sequence[str], blocks: Sequence[Block], limitations: Sequence[str]
) -> None:
    """Write the page. It is there when it is whole.

    Args:
        output: the file.
        kind: what kind of answer this is: "comparison".
        title: what it is about.
        sentences: the answer, the most important first.
        blocks: its sections.
        limitations: what the captures cannot tell.

    Raises:
        ProfilingConfigError: the file cannot be written.
    """
    data = {"figures": {block.id: block.variants for block in blocks if block.variants}, "timeline": None, "colours": COLOURS}
    text = self_contained.render(
        "small_page.html.jinja",
        _SCRIPTS,
        data,
        kind=kind,
        title=title,
        sentences=sentences,
        blocks=[{**vars(block), "id": block.id, "variants": list(block.variants or {})} for block in blocks],
        limitations=limitations,
    )
    self_contained.write(output, text)
