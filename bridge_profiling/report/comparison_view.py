"""Comparisons in words, tables and figures: of two runs, of three or more in order, of a run with benchmarks; and these."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bridge_profiling.compare import Comparison, Series, SeriesRun, changed
from bridge_profiling.compare.bench import AgainstBench
from bridge_profiling.compare.steps import OUTLIERS
from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.facts.statistics import LEVEL, Change, Estimate
from bridge_profiling.facts.words import UNKNOWN, fill, named_ranks, written
from bridge_profiling.report import figures, tables, words
from bridge_profiling.report.rows import Rows, group_name
from bridge_profiling.report.views import PageView, Row, SectionView, TableView, Verdict, captioned, section

#: Parts of the iterations of a series with a column of their own; the figure has the others.
_PARTS = 4

#: Kinds of communication in sentences: those with the most time.
_SAID = 3

#: From this share on, the run is as fast as the benchmark.
_AS_FAST = 0.95

#: Names of an iteration's parts.
PARTS = {name: text for name, (text, _) in figures.PARTS.items()} | {OUTLIERS: "median less mean: outlying iterations"}


def comparison_view(comparison: Comparison) -> PageView:
    """The view of a comparison."""
    headline, *sentences = _sentences(comparison)
    names = _names(comparison)
    sections = tables.sections(_rows(comparison))
    if comparison.profiled is not None and comparison.profiled.change:
        variants = {
            name: figures.change_figure(parts, comparison.profiled, names, PARTS)
            for name, parts in (("by cause", comparison.by_cause), ("by activity", comparison.by_activity))
        }
        picture = section("the-change", figures=captioned("the-change", variants))
        sections.insert(1 if comparison.differences else 0, picture)
    return PageView("comparison", " → ".join(names), Verdict(headline, sentences), sections, caveats=_limitations(comparison))


def _names(comparison: Comparison) -> tuple[str, str]:
    """What the sides are called."""
    base, other = distinct_names([comparison.base[0], comparison.other[0]])
    more = [f" and {len(side) - 1} more" if len(side) > 1 else "" for side in (comparison.base, comparison.other)]
    return f"{base}{more[0]}", f"{other}{more[1]}"


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell different paths apart."""
    parts = [Path(path).parts for path in paths]
    for depth in range(1, max(map(len, parts), default=0)):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(Path(path)) for path in paths]


def _sentences(comparison: Comparison) -> Iterator[str]:
    """The comparison, the most important sentence first."""
    step, profiled, explains = comparison.step, comparison.profiled, comparison.explains_most
    verdict = "nothing" if comparison.empty else "no_iterations" if step is None else step.verdict
    known = {"name": _names(comparison)[1], "step": step, "level": LEVEL, "reason": step and (step.reason or "too little data")}
    yield words.say(f"compared_{verdict}", seen=words.say("compared_seen", step.ns) if step else "", **known)
    if not comparison.same_work:
        yield words.say("different_work", ", ".join(each.topic for each in comparison.differences if each.concerns == "work"))
    if step is not None and step.verdict != "unknown":
        yield words.say(f"evidence_{step.method}", *step.samples, words.say(f"evidence_{step.evidence}"))
        if step.method != "welch" and step.evidence == "unprofiled" and profiled is not None:
            yield words.say("change_in_captures", profiled)
    # A part whose change may be chance explains nothing.
    if explains is not None and explains[1].significant is not False and profiled is not None:
        yield words.say("largest_part", whole=profiled, name=PARTS[explains[0]], part=explains[1])


def _rows(comparison: Comparison) -> dict[str, Rows]:
    """The rows of each table."""
    ranks = comparison.ranks.to_pylist()
    ranks = [row | {"most": _changed_most(row)} for row in ranks] if any(row["change_duration_ns"] for row in ranks) else []
    communication = comparison.communication.to_pylist()
    memory = comparison.memory.to_pylist()
    sides = (("new", comparison.findings_came), ("gone", comparison.findings_went))
    return {
        "differences": [vars(each) for each in comparison.differences],
        "parts-by-cause": _parts(comparison.by_cause, comparison),
        "parts-by-activity": _parts(comparison.by_activity, comparison),
        "by-rank": ranks,
        "changed-kernels": changed(comparison.kernels),
        "changed-copies": [row | {"name": tables.copy_kind(row)} for row in changed(comparison.copies)],
        "changed-communication": [row for row in communication if row["change"] or abs(row["change_wait_ns"]) >= 1e3],
        "changed-operators": changed(comparison.operators),
        "changed-memory": [row for row in memory if row["change_peak_bytes"] or row["change_growth_bytes_per_iteration"]],
        "changed-sites": comparison.changed_sites,
        "changed-findings": [{"change": word, "id": each.id, "finding": each.title} for word, mine in sides for each in mine],
    }


def _parts(parts: dict[str, Change], comparison: Comparison) -> Rows:
    whole = comparison.profiled
    if whole is None or comparison.empty:
        return []
    # A part that is nothing on both sides has no row.
    shown = {
        PARTS[name]: part
        for name, part in parts.items()
        if (abs(part.change) if name == OUTLIERS else max(abs(part.base), abs(part.other))) >= 0.5
    } | {"median iteration of the captures": whole}
    ends = "{0.low:signed bare_ms} to {0.high:signed bare_ms}"
    return [
        {"part": name, "interval": UNKNOWN if part.low is None else fill(ends, part)}
        | {f"{side}_ns": getattr(part, side) for side in ("base", "other", "change")}
        for name, part in shown.items()
    ]


def _changed_most(row: Row) -> str:
    changed_ns = row[f"change_{row['largest']}"]
    return f"{PARTS[row['largest']]} {written('signed bare_ms', changed_ns)}" if row["change_duration_ns"] else ""


def _limitations(comparison: Comparison) -> list[str]:
    """What the captures cannot show; once if it is the same on both sides."""
    found: list[str] = []
    for sentence in comparison.limitations:
        side, colon, rest = sentence.partition(": ")
        same = f"{'other' if side == 'base' else 'base'}: {rest}"
        both = colon and side in ("base", "other") and same in comparison.limitations
        found.append(f"both: {rest}" if both else sentence)
    return list(dict.fromkeys(found))


def series_view(series: Series) -> PageView:
    """The view of a series."""
    names = distinct_names([run.name for run in series.runs])
    headline, *sentences = _sentences_of_series(series)
    labels = [f"{number} {name}" for number, name in enumerate(names, 1)]
    figure = figures.series_figure(labels, [run.step_ns for run in series.runs], [_changed(run) for run in series.runs])
    times, parts = _tables_of_series(series, names)
    rows = [{"label": label, **run.parts} for label, run in zip(labels, series.runs, strict=True) if run.parts]
    axis = "ms of the mean captured iteration"
    variants = {f"by {view}": figures.attribution_figure(rows, view, axis) for view in figures.VIEWS if rows}
    sections = [
        section("runs", figures=captioned("series", {"median": figure}, level=LEVEL), tables=[times]),
        section("parts", figures=captioned("series-parts", variants), tables=[parts]),
    ]
    title = f"{names[0]} → {names[-1]}, {len(names)} runs"
    return PageView("comparison", title, Verdict(headline, sentences), sections, caveats=series.limitations)


def _changed(run: SeriesRun) -> bool:
    found = run.against_previous
    return found is not None and found.step is not None and found.step.verdict in ("slower", "faster")


def _sentences_of_series(series: Series) -> Iterator[str]:
    """The last run against the first, each run that changed, and the trend."""
    yield _against(len(series.runs), 1, series.runs[-1].against_first)
    undecided = []
    for number, run in enumerate(series.runs[1:], 2):
        found = run.against_previous
        if _changed(run):
            yield _against(number, number - 1, found)
        elif found is None or found.step is None or found.step.verdict == "unknown":
            undecided.append(number)
    if undecided:
        differ = f"runs {', '.join(map(str, undecided))} differ" if len(undecided) > 1 else f"run {undecided[0]} differs"
        why = _why(series.runs[undecided[0] - 1].against_previous)
        yield words.say("unknown_from_previous", runs_differ=differ, why=why)
    spread = series.over_runs_ns
    if spread is not None and spread.std is not None:
        deviation = words.say("relative_deviation", spread.std, spread.std / spread.mean) if spread.mean else "0 ms"
        yield words.say("over_runs", spread, deviation=deviation)
    if series.trend is not None and series.trend.low is not None and series.trend.high is not None:
        yield words.say("trend", series.trend, timed=sum(run.step_ns is not None for run in series.runs), level=LEVEL)


def _against(number: int, base: int, found: Comparison | None) -> str:
    """A run against an earlier one in a sentence."""
    verdict = "unknown" if found is None or found.step is None else found.step.verdict
    if found is None or found.step is None or verdict in ("unknown", "unchanged"):
        return words.say(f"against_{verdict}", run=number, base=base, step=found and found.step, why=_why(found))
    time, explains, more = found.step.ns, found.explains_most, ""
    # A part whose change may be chance explains nothing, nor does one that changed in the other direction.
    if explains is not None and explains[1].significant is not False and explains[1].change * time.change > 0:
        more = f": {PARTS[explains[0]]} {written('change', explains[1].change)}"
    if found.different_work:
        more += f"; the runs are not comparable ({'; '.join(found.different_work)})"
    return words.say("against_changed", run=number, base=base, step=found.step, share=abs(time.relative or 0.0), more=more)


def _why(found: Comparison | None) -> str:
    return "" if found is None else f": {found.undecided}"


def _tables_of_series(series: Series, names: Sequence[str]) -> list[TableView]:
    """The times, and the parts: in one table they would not fit on a terminal."""
    parts = _shown_parts(series.runs)
    which = "without profiling" if series.evidence == "unprofiled" else "in the captures"
    rows = [
        vars(run)
        | {"run": number, "name": name, "which": which}
        | {part: run.parts.get(part) if part in parts else None for part in BY_CAUSE}
        | {"rest_ns": sum(run.parts[part] for part in BY_CAUSE if part not in parts) if run.parts else None}
        | {"median": _median(run.step_ns), "first": _change(run.against_first), "previous": _change(run.against_previous)}
        for number, (run, name) in enumerate(zip(series.runs, names, strict=True), 1)
    ]
    return [tables.view("runs", rows), tables.view("run-parts", rows)]


def _shown_parts(runs: Sequence[SeriesRun]) -> list[str]:
    """Compute, communication and waiting if there are any, then the largest idle causes; in the order of `BY_CAUSE`."""
    rows = [run.parts for run in runs if run.parts]
    visible = figures.visible_parts(rows)
    ordered = sorted(visible, key=lambda part: (BY_CAUSE.index(part) > 2, -max(row[part] for row in rows)))
    return sorted(ordered[: _PARTS + 1], key=BY_CAUSE.index)


def _median(found: Estimate | None) -> str:
    if found is None:
        return UNKNOWN
    reach = "" if found.high is None else f" ± {words.bare_ms(found.high - found.value)}"
    return f"{words.bare_ms(found.value)}{reach}"


def _change(found: Comparison | None) -> str:
    if found is None or found.step is None:
        return UNKNOWN
    time, verdict = found.step.ns, "no difference" if found.step.verdict == "unchanged" else found.step.verdict
    return f"{written('signed percent', time.relative)}, {written('speedup', time.speedup)}, {verdict}"


def bench_section(bench: AgainstBench | None) -> SectionView:
    """A run compared with a benchmark, in sentences and tables; empty without one."""
    title = "Comparison with benchmarks"
    if bench is None:
        return SectionView("bench", title)
    text = words.say("bench", path=bench.file, found=", found next to the captures" if bench.found_beside_captures else "")
    said = list(_sentences_of_bench(bench)) or [words.say("bench_nothing")]
    shown = tables.view("bench-communication", bench_communication(bench))
    return SectionView("bench", title, [text, *said], tables=[shown] if shown.rows else [])


def _sentences_of_bench(bench: AgainstBench) -> Iterator[str]:
    communication = _by_time(bench)
    for row in [row for row in communication if row["reached_share"] is not None][:_SAID]:
        name = "bench_as_fast" if row["reached_share"] >= _AS_FAST else "bench_reached"
        yield words.say(name, row, group=_group(row, " on "))
    if (loader := bench.data_loader) is not None:
        reason = loader["reason"]
        yield f"Not compared: data loader {loader['subject']}: {reason}." if reason else words.say("bench_loader", loader)
    reasons = dict.fromkeys(row["reason"] for row in communication if row["reason"])
    yield from (f"Not compared: {reason}." for reason in list(reasons)[:_SAID])


def bench_communication(bench: AgainstBench | None) -> Rows:
    """Rows of communication compared with the benchmark, the most time first."""
    return [] if bench is None else [row | {"group": _group(row, ", "), "path": bench.file} for row in _by_time(bench)]


def _by_time(bench: AgainstBench) -> list[dict[str, Any]]:
    return sorted(bench.communication.to_pylist(), key=lambda row: -(row["transfer_ns"] or 0.0))


def _group(row: Row, separator: str) -> str:
    """A group, and its ranks if they are few."""
    members = json.loads(row["group_ranks"] or "[]")
    return separator.join(filter(None, (group_name(row["group"]), named_ranks(members) if 0 < len(members) <= 8 else "")))


def result_table(result: dict[str, Any]) -> TableView:
    """One result of `bridge-profiling bench`, as written to its document."""
    known = result | {"on_hosts": words.counted(result.get("hosts", 1), "host")}
    return tables.view(result["kind"], [known | row for row in result["rows"]], known=known)


def recommendation(result: dict[str, Any]) -> str:
    """Which data loader settings to use; "" for other results."""
    chosen = result.get("recommendation")
    if chosen is None:
        return ""
    prefetch = f", prefetch_factor={chosen['prefetch']}" if chosen["prefetch"] else ""
    return f"Use num_workers={chosen['workers']}, pin_memory={chosen['pin_memory']}{prefetch}: {chosen['reason']}"
