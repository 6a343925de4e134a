"""A comparison as a page of its own: the same words and tables as on the terminal, and a picture of the change in parts."""

from __future__ import annotations

from pathlib import Path

from bridge_profiling.analysis.compare import Comparison
from bridge_profiling.report import comparison as words
from bridge_profiling.report.figures.comparison import change_figure
from bridge_profiling.report.small_page import Block, block_of, write_small_page


def write_page(found: Comparison, output: Path) -> None:
    """Write the page of a comparison.

    Args:
        found: the comparison.
        output: the file.

    Raises:
        ProfilingConfigError: it cannot be written.
    """
    base, other = words.names(found)
    blocks = [block_of(short, section) for short, section in words.named_sections(found)]
    if found.profiled is not None and found.profiled.change:
        variants = {
            name: change_figure(parts, found.profiled, words.PARTS, (base, other))
            for name, parts in (("by what the time is owed to", found.by_cause), ("by what runs", found.by_activity))
        }
        picture = Block("The change", "The change of the median iteration, part by part", None, variants, _FIGURE)
        blocks.insert(1 if found.differences else 0, picture)
    write_small_page(
        output,
        kind="comparison",
        title=f"{base} → {other}",
        sentences=words.sentences(found),
        blocks=blocks,
        limitations=words.limitations(found),
    )


_FIGURE = "From the median iteration of one side to that of the other; the parts add up exactly."
