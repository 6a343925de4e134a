"""The page: one self-contained file that answers where an iteration's time went, and works without a network.

Numbers are the analysis'; this puts them in words, tables and pictures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Thresholds
from bridge_profiling.report import bench_comparison, page_timeline, rank_choice, self_contained
from bridge_profiling.report.answers import Answers, ask
from bridge_profiling.report.figures.style import COLOURS
from bridge_profiling.report.figures.timeline import KIND_NAMES
from bridge_profiling.report.page_findings import Pictures, findings_section, rank_table
from bridge_profiling.report.page_parts import Figures
from bridge_profiling.report.page_quality import facts, quality_section, raw_traces
from bridge_profiling.report.page_ranks import budget_section, iterations_section, waits_section
from bridge_profiling.report.page_timeline import PageTimeline
from bridge_profiling.report.page_work import communication_section, kernel_tables, memory_section
from bridge_profiling.report.verdict import verdict

#: Ranks whose timeline is shown at first.
_AT_FIRST = 8

#: In the order in which they stand on the page.
_SCRIPTS = ("figures.js", "timeline.js", "tables.js", "perfetto.js", "page.js")


def write_page(run: Run, output: Path, thresholds: Thresholds | None = None) -> Answers:
    """Write the page of a run.

    Args:
        run: whose captures are read now, unless they were.
        output: the file. It is there when it is whole.
        thresholds: above or below what a number becomes a finding; None for the defaults.

    Returns:
        What the page shows, for those who show it elsewhere too.

    Raises:
        ProfilingConfigError: the file cannot be written.
    """
    answers = ask(run, thresholds)
    shown = rank_choice.worth_showing(answers.summary.infos, answers.summary.findings, answers.stragglers)
    timeline = page_timeline.page_timeline(run, answers, shown)
    entries = {info.rank: entry for info, entry in run.entries()}
    self_contained.write(output, page(answers, timeline, Pictures(answers, timeline, entries), output))
    return answers


def page(answers: Answers, timeline: PageTimeline, pictures: Pictures, output: Path) -> str:
    """The page's text.

    Args:
        answers: about the run.
        timeline: its timelines.
        pictures: of its findings.
        output: where the page will lie, for links to the raw traces.
    """
    figures: Figures = {}
    shown = rank_choice.worth_showing(answers.summary.infos, answers.summary.findings, answers.stragglers)
    sections = {
        "verdict": verdict(answers.summary),
        "budget": budget_section(answers, shown, figures),
        "iterations": iterations_section(answers, figures),
        "waits": waits_section(answers, figures),
        "pipeline": rank_table(answers.pipeline),
        "findings": findings_section(answers, pictures, timeline, figures),
        "kernel_tables": kernel_tables(answers),
        "communication": communication_section(answers, figures),
        "bench": bench_comparison.page_section(answers.summary.bench),
        "timeline": _timeline_controls(timeline, _at_first(answers)),
        "memory": memory_section(answers, figures),
        "quality": quality_section(answers),
        "raw": raw_traces(answers, shown, output),
    }
    data = {
        "figures": figures,
        "timeline": page_timeline.as_json(timeline) if timeline else None,
        "colours": COLOURS,
        "kindNames": KIND_NAMES,
    }
    return self_contained.render(
        "page.html.jinja",
        _SCRIPTS,
        data,
        title=answers.summary.path.absolute().name or "run",
        facts=facts(answers),
        **sections,
    )


def _at_first(answers: Answers) -> list[int]:
    """Ranks whose timeline is shown at first: so many fit a screen."""
    summary = answers.summary
    return rank_choice.worth_showing(summary.infos, summary.findings, answers.stragglers, most=_AT_FIRST, every=_AT_FIRST)


def _timeline_controls(timeline: PageTimeline, at_first: list[int]) -> dict[str, Any]:
    if not timeline:
        return {}
    numbers = list(timeline.windows)
    return {
        "iterations": [("capture" if number is None else str(number), number == timeline.typical) for number in numbers],
        "ranks": sorted({rank for _, rank in timeline.segments}),
        "at_first": at_first,
        "left_out": timeline.left_out,
        "resolution_us": max(timeline.resolution_ns.values()) / 1e3,
    }
