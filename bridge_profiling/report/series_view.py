"""Three or more runs in order, in words, tables and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridge_profiling.compare import Comparison, Series, SeriesRun
from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.facts.statistics import LEVEL
from bridge_profiling.report import figures, words
from bridge_profiling.report.comparison_view import PARTS, distinct_names
from bridge_profiling.report.views import Cell, FigureView, PageView, SectionView, TableView, Verdict

#: Parts with a column of their own; the figure has the others.
_PARTS = 4


def series_view(series: Series) -> PageView:
    """The view of a series."""
    names = distinct_names([run.name for run in series.runs])
    headline, *sentences = _sentences(series)
    labels = [f"{number} {name}" for number, name in enumerate(names, 1)]
    figure = figures.series_figure(labels, [run.step_us for run in series.runs], [_changed(run) for run in series.runs])
    caption = (
        f"The median iteration of each run with its {LEVEL:.0%} interval; runs that differ from the previous one stand out."
    )
    picture = FigureView("series", {"median": figure}, caption)
    times, parts = _tables(series, names)
    sections = [SectionView("runs", "The runs", figures=[picture], tables=[times], short="Runs")]
    rows = [{"label": label, **run.parts} for label, run in zip(labels, series.runs, strict=True) if run.parts]
    axis = "ms of the mean captured iteration"
    variants = {f"by {view}": figures.attribution_figure(rows, view, axis) for view in figures.VIEWS if rows}
    budget = FigureView("series-parts", variants, "The mean captured iteration of each run, divided into its parts.")
    section = SectionView("parts", "The parts of an iteration", figures=[budget] if rows else [], tables=[parts], short="Parts")
    sections.append(section)
    title = f"{names[0]} → {names[-1]}, {len(names)} runs"
    return PageView("comparison", title, Verdict(headline, sentences), sections, caveats=series.limitations)


def _changed(run: SeriesRun) -> bool:
    found = run.against_previous
    return found is not None and found.step is not None and found.step.verdict in ("slower", "faster")


def _sentences(series: Series) -> Iterator[str]:
    """The last run against the first, each run that changed, and the trend."""
    yield _against(len(series.runs), 1, series.runs[-1].against_first, "No significant change")
    undecided = []
    for number, run in enumerate(series.runs[1:], 2):
        if _changed(run):
            yield _against(number, number - 1, run.against_previous)
        elif (
            run.against_previous is None or run.against_previous.step is None or run.against_previous.step.verdict == "unknown"
        ):
            undecided.append(number)
    if undecided:
        reason = series.runs[undecided[0] - 1].against_previous
        why = "" if reason is None else f": {reason.undecided}"
        runs = f"runs {', '.join(map(str, undecided))} differ" if len(undecided) > 1 else f"run {undecided[0]} differs"
        yield f"It is unknown whether {runs} from the previous run{why}."
    spread = series.over_runs_us
    if spread is not None and spread.std is not None:
        deviation = f"{words.ms(spread.std)} ms ({words.percent(spread.std / spread.mean)})" if spread.mean else "0 ms"
        yield (
            f"Over {spread.n} runs, the median iteration has a mean of {words.ms(spread.mean)} ms and a standard deviation of"
            f" {deviation}; the lowest is {words.ms(spread.min)} ms, the highest {words.ms(spread.max)} ms."
        )
    if series.trend is not None and series.trend.low is not None and series.trend.high is not None:
        slope, timed = series.trend, sum(run.step_us is not None for run in series.runs)
        yield (
            f"Trend over {timed} runs: {words.change(slope.value)} per run, between {words.change(slope.low)} and "
            f"{words.change(slope.high)} with {LEVEL:.0%} confidence."
        )


def _against(number: int, base: int, found: Comparison | None, quiet: str = "") -> str:
    """A run against an earlier one in a sentence."""
    if found is None or found.step is None or found.step.verdict == "unknown":
        why = "" if found is None else f": {found.undecided}"
        return f"It is unknown whether run {number} is slower or faster than run {base}{why}."
    us = found.step.us
    if found.step.verdict == "unchanged":
        return (
            f"{quiet} from run {base} to run {number}: {words.change(us.change)} ({words.percent(us.relative, signed=True)})."
        )
    share = words.percent(abs(us.relative or 0.0))
    text = f"Run {number} is {share} {found.step.verdict} than run {base} ({words.speedup(us.speedup)})"
    explains = found.explains_most
    # A part whose change may be chance explains nothing, nor does one that changed in the other direction.
    if explains is not None and explains[1].significant is not False and explains[1].change * us.change > 0:
        text += f": {PARTS[explains[0]]} {words.change(explains[1].change)}"
    if found.different_work:
        text += f"; the runs are not comparable ({'; '.join(found.different_work)})"
    return f"{text}."


def _tables(series: Series, names: Sequence[str]) -> list[TableView]:
    """The times, and the parts: in one table they would not fit on a terminal."""
    parts = _shown_parts(series.runs)
    times: list[list[Cell]] = []
    split: list[list[Cell]] = []
    for number, (run, name) in enumerate(zip(series.runs, names, strict=True), 1):
        rest = sum(run.parts[part] for part in BY_CAUSE if part not in parts) if run.parts else None
        times.append(
            [
                Cell(str(number), number),
                Cell(words.date(run.captured_ns), run.captured_ns),
                Cell(_median(run)),
                Cell(str(run.samples), run.samples),
                Cell(_change(run.against_first)),
                Cell(_change(run.against_previous)),
                Cell(name),
            ]
        )
        split.append(
            [
                Cell(str(number), number),
                *(Cell(words.ms(each), each) for each in (*(run.parts.get(part) for part in parts), rest)),
                Cell(words.memory(run.peak_bytes), run.peak_bytes),
                Cell(name),
            ]
        )
    which = "without profiling" if series.evidence == "unprofiled" else "in the captures"
    headings = ["run", "captured", "median ms", "iterations", "against first", "against previous", "name"]
    title = f"Median of the iterations {which}, with its {LEVEL:.0%} interval"
    parts_title = "The mean captured iteration by cause, ms, and the peak of device memory"
    part_headings = ["run", *(PARTS[part] for part in parts), "other parts", "peak memory", "name"]
    return [
        TableView("runs", title, headings, times, name_last=True),
        TableView("run-parts", parts_title, part_headings, split, name_last=True),
    ]


def _shown_parts(runs: Sequence[SeriesRun]) -> list[str]:
    """Compute, communication and waiting if there are any, then the largest idle causes; in the order of `BY_CAUSE`."""
    rows = [run.parts for run in runs if run.parts]
    visible = figures.visible_parts(rows)
    ordered = sorted(visible, key=lambda part: (BY_CAUSE.index(part) > 2, -max(row[part] for row in rows)))
    return sorted(ordered[: _PARTS + 1], key=BY_CAUSE.index)


def _median(run: SeriesRun) -> str:
    if run.step_us is None:
        return words.UNKNOWN
    reach = "" if run.step_us.high is None else f" ± {words.ms(run.step_us.high - run.step_us.value)}"
    return f"{words.ms(run.step_us.value)}{reach}"


def _change(found: Comparison | None) -> str:
    if found is None or found.step is None:
        return words.UNKNOWN
    us, verdict = found.step.us, "no difference" if found.step.verdict == "unchanged" else found.step.verdict
    return f"{words.percent(us.relative, signed=True)}, {words.speedup(us.speedup)}, {verdict}"
