"""The page: one self-contained file that answers where an iteration's time went, and works without a network.

Numbers are the analysis'; this puts them in words, tables and pictures. Plotly comes out of its Python package and is packed,
as are the pictures' data: the browser unpacks both (every browser since May 2023 can).
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

from isal import igzip
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bridge_profiling import __version__
from bridge_profiling.analysis import Run
from bridge_profiling.analysis.figures.style import COLOURS
from bridge_profiling.analysis.figures.timeline import KIND_NAMES
from bridge_profiling.analysis.findings import Thresholds
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.report import page_timeline, rank_choice
from bridge_profiling.report.answers import Answers, ask
from bridge_profiling.report.page_findings import Pictures, findings_section, rank_table
from bridge_profiling.report.page_parts import Figures
from bridge_profiling.report.page_quality import facts, quality_section, raw_traces
from bridge_profiling.report.page_ranks import budget_section, iterations_section, waits_section
from bridge_profiling.report.page_timeline import PageTimeline
from bridge_profiling.report.page_work import communication_section, kernel_tables, memory_section
from bridge_profiling.report.verdict import verdict

#: Ranks whose timeline is shown at first.
_AT_FIRST = 8

#: Scripts and styles, in the order in which they stand on the page.
_STYLES = ("page.css",)
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
    _write(output, page(answers, timeline, Pictures(answers, timeline, entries), output))
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
    environment = Environment(
        loader=PackageLoader("bridge_profiling.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        title=answers.summary.path.absolute().name or "run",
        facts=facts(answers),
        version=__version__,
        style=_own(_STYLES),
        script=_own(_SCRIPTS),
        plotly=_as_text(igzip.compress(plotly_script(), 3)),
        data=_as_text(gzip.compress(json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).encode(), 9, mtime=0)),
        **sections,
    )


def plotly_script() -> bytes:
    """Plotly's own script, out of its Python package, which is not imported for it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("plotly is not installed", name="plotly")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_bytes()


def _as_text(packed: bytes) -> Markup:
    """Packed bytes as text that no browser and no template takes for markup."""
    return Markup(base64.b64encode(packed).decode())


def _own(names: tuple[str, ...]) -> Markup:
    """Our own scripts or styles as they are."""
    folder = Path(__file__).parent / "templates"
    return Markup("\n".join((folder / name).read_text(encoding="utf-8") for name in names))


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


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(output: Path, text: str) -> None:
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, output)
    except OSError as error:
        raise ProfilingConfigError(
            f"{output} cannot be written", why=error.strerror or str(error), instead="Name another file with -o"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
