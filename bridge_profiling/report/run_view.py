"""A run's answers as a view: for a page, and for a terminal. Chooses the ranks that have a row of their own."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.facts.device import ranks_without_work
from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.printable import shell_path
from bridge_profiling.report import (
    bench_view,
    counters_view,
    figures,
    host_view,
    measurements,
    message_sizes_view,
    phases_view,
    products_view,
    scorecard_view,
    tables,
    words,
)
from bridge_profiling.report.findings_view import Pictures, findings_view
from bridge_profiling.report.flame_graph_view import flame_graph_section
from bridge_profiling.report.timeline import Timeline, iteration_name, timeline_of
from bridge_profiling.report.verdict import Summary, verdict
from bridge_profiling.report.views import Cell, FigureView, FindingView, PageView, SectionView, TableView, Target
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    from bridge_profiling.run import Run

Rows = list[dict[str, Any]]

#: Up to the first number of ranks, each has a row. Beyond, ranks are aggregated, and the second number have rows of their own.
EVERY_RANK, NAMED_RANKS = 64, 16

#: Ranks on a terminal, and in the timeline at first: as many as fit a screen.
_ON_A_SCREEN = 8

#: Ranks whose memory is drawn, and rows of kernels and of operators.
_MEMORY_RANKS, _MOST_ROWS = 4, 250

#: Rows of a table on a terminal, and phases below a verdict.
_TERMINAL_ROWS, _SCREEN_PHASES = 10, 6

#: The method of `Run` that returns the rows of a table, by its id.
_PYTHON = {
    "attribution-by-activity": "attribution()",
    "attribution-by-cause": "attribution()",
    "bench-communication": "against_bench.communication",
    "bench-copies": "against_bench.copies",
    "captures": "infos",
    "communication-table": "communication()",
    "cuda-memory": "cuda_memory()",
    "files": "infos",
    "flops-profile": "manifests",
    "gpu-metrics-table": "gpu_metrics()",
    "host": "host_iterations()",
    "kernel-counters": "kernel_counters()",
    "kernel-groups": "kernel_groups()",
    "kernels": "kernels(by_rank=False)",
    "memory-devices": "memory()",
    "message-sizes": "communication(by_size=True)",
    "operators": "operators()",
    "phase-memory": "manifests",
    "phases": "phases()",
    "pipeline": "pipeline()",
    "pipeline-waits": "pipeline_waits()",
    "products": "matrix_products()",
    "scorecard": "scorecard()",
    "spread": "attribution()",
    "stragglers": "stragglers()",
    "system-calls": "system_calls()",
    "wall-clock": "manifests",
}


_ROOFLINE = (
    "Speed by arithmetic intensity of matrix products, convolutions and attention, with areas as their device times. The lines"
    " are what the device's memory and its peak allow. Open diamonds: the bytes are those that hardware counters measured."
)

_COUNTERS = (
    "Kernels between the device's memory and its tensor cores, with areas as their device times. Memory limits those at the"
    " right, tensor cores those at the top, and neither those near the origin."
)


def run_tables(run: Run) -> list[TableView]:
    """The tables of `bridge-profiling analyze`."""
    breakdown, hosts = run.breakdown(), host_view.means(run.host_iterations().to_pylist())
    on_cpu = {
        (rank, source) for source in set(breakdown["source"].to_pylist()) for rank in ranks_without_work(breakdown, source)
    }
    all_on_cpu = len(on_cpu) == breakdown.num_rows > 0 and bool(hosts)
    iterations = len({row["iteration"] for row in run.iterations().to_pylist()}) or 1
    found = [
        *([] if all_on_cpu else [tables.device_time(breakdown.to_pylist())]),
        *([] if all_on_cpu else [tables.typical_iterations(run.typical_iteration().to_pylist(), on_cpu)]),
        host_view.host_table(hosts),
        phases_view.of_run(run.phases().to_pylist(), _TERMINAL_ROWS, of_device=not all_on_cpu),
        tables.kernel_groups(run.kernel_groups().to_pylist()),
        tables.kernels(run.kernels(by_rank=False).to_pylist(), _TERMINAL_ROWS),
        tables.operators(run.operators(), _TERMINAL_ROWS),
        products_view.matrix_products(run.matrix_products().to_pylist(), _TERMINAL_ROWS),
        tables.communication(run.communication().to_pylist(), iterations, _TERMINAL_ROWS),
        message_sizes_view.communication_by_size(run.communication(by_size=True).to_pylist(), iterations, _TERMINAL_ROWS),
        *([] if run.against_bench is None else bench_view.alone_tables(run.against_bench)),
        tables.iterations_by_rank(run.ranks().to_pylist()),
        tables.stragglers(run.stragglers().to_pylist()),
        tables.pipeline(run.pipeline().to_pylist()),
        tables.pipeline_waits(run.pipeline_waits().to_pylist()),
        tables.copies(run.copies().to_pylist(), _TERMINAL_ROWS),
        tables.gpu_metrics(run.gpu_metrics().to_pylist(), _TERMINAL_ROWS),
        counters_view.kernel_counters(run.kernel_counters().to_pylist(), _TERMINAL_ROWS),
        tables.system_calls(run.system_calls().to_pylist(), _TERMINAL_ROWS),
        tables.memory_devices(run.memory().to_pylist(), len(breakdown) + 1),
        tables.cuda_memory(run.cuda_memory().to_pylist(), _TERMINAL_ROWS),
    ]
    return [table for table in found if table.rows]


def summary_view(summary: Summary) -> PageView:
    """What a terminal shows of a run: the verdict, where the time goes, the findings, and benchmarks."""
    shown = ranks_to_show(summary, most=_ON_A_SCREEN, every=_ON_A_SCREEN)
    time = _on_cpus(summary) if summary.on_cpus else _attribution(summary, shown, _ON_A_SCREEN)
    sections = [time, _scorecard(summary), _phases_on_a_screen(summary), bench_view.section(summary.bench)]
    return PageView(
        "report",
        _title(summary),
        verdict(summary),
        sections,
        findings=findings_view(summary),
        notices=summary.notices,
        caveats=summary.limitations,
        errors=summary.errors,
    )


def page_view(run: Run, summary: Summary, output: Path) -> PageView:
    """A run's page, at `output`; its links to the traces are relative to that."""
    shown = ranks_to_show(summary)
    timeline = timeline_of(run, shown)
    rows = {
        "iterations": [row for row in run.iterations().to_pylist() if row["source"] == summary.source],
        "ranks": run.ranks().to_pylist(),
        "pipeline": run.pipeline().to_pylist(),
        "pipeline_waits": run.pipeline_waits().to_pylist(),
        "kernels": [row for row in run.kernels(by_rank=False).to_pylist() if row["source"] == summary.source],
        "memory": run.memory().to_pylist(),
    }
    pictures = Pictures(
        summary, rows["ranks"], rows["pipeline"], rows["kernels"], rows["memory"], timeline,
        {info.rank: entry for info, entry in run.entries()},
    )  # fmt: skip
    iterations = len({row["iteration"] for row in rows["iterations"]}) or 1
    products = run.matrix_products().to_pylist()
    roofline = products_view.roofline(products)
    manifests = {each.rank: each for each in summary.manifests if each.rank in shown}.values()
    groups = [row for row in run.kernel_groups().to_pylist() if row["source"] == summary.source]
    work = [
        tables.kernel_groups(groups),
        tables.kernels(rows["kernels"], _MOST_ROWS),
        tables.operators(_of_source(run.operators(), summary), _MOST_ROWS, _longest_calls(run, timeline)),
        products_view.matrix_products(products, _MOST_ROWS),
        tables.system_calls(run.system_calls().to_pylist(), _MOST_ROWS),
        measurements.wall_clock(manifests),
        measurements.flops_profile(manifests),
    ]
    memory_tables = [measurements.phase_memory(manifests), tables.cuda_memory(run.cuda_memory().to_pylist(), NAMED_RANKS)]
    sections = [
        _attribution(summary, shown, EVERY_RANK),
        _scorecard(summary),
        _phases(summary, shown, timeline),
        _iterations(rows["ranks"]),
        _waits(
            summary,
            run.waits().to_pylist(),
            len({row["iteration"] for row in rows["ranks"]}) or 1,
            [tables.pipeline(rows["pipeline"]), tables.pipeline_waits(rows["pipeline_waits"])],
        ),
        _section("findings", kind="findings"),
        _section(
            "operators" if summary.on_cpus else "work",
            figures=[] if roofline is None else [FigureView("roofline", {"roofline": roofline}, _ROOFLINE)],
            tables=[table for table in work if table.rows],
        ),
        *flame_graph_section(run, summary, rows["iterations"]),
        _communication(
            run.communication().to_pylist(),
            message_sizes_view.communication_by_size(run.communication(by_size=True).to_pylist(), iterations, _MOST_ROWS),
            iterations,
            bench_view.section(summary.bench),
        ),
        _timeline(timeline, ranks_to_show(summary, most=_ON_A_SCREEN, every=_ON_A_SCREEN)),
        *_gpu_metrics(run, shown),
        _memory(run, rows["memory"], memory_tables),
    ]
    if summary.on_cpus:
        without = {"budget", "iterations", "waits", "communication", "timeline", "memory"}
        sections = [_on_cpus(summary), *(each for each in sections if each.id not in without or not each.empty)]
    # Last: questions add to what the captures cannot show.
    sections += [_quality(run, summary, rows["iterations"]), _raw_traces(summary, shown, output)]
    sections = [_with_python(each, summary) for each in sections]
    return PageView(
        "report",
        _title(summary),
        verdict(summary),
        sections,
        facts=[*_facts(summary, rows["iterations"], rows["memory"]), *_training_facts(run)],
        findings=[_events_with_python(each, summary) for each in findings_view(summary, pictures)],
        notices=summary.notices,
        timeline=timeline.data() if timeline.segments else None,
    )


def _of_source(table: pa.Table, summary: Summary) -> pa.Table:
    """The rows from the profiler that captured the most ranks."""
    return table.filter(pc.equal(table["source"], summary.source))


def _with_python(section: SectionView, summary: Summary) -> SectionView:
    """The section with the line of Python behind each of its tables."""
    found = [
        replace(table, python=f"{_run(summary)}.{_PYTHON[table.id]}") if table.id in _PYTHON else table
        for table in section.tables
    ]
    return replace(section, tables=found, parts=[_with_python(part, summary) for part in section.parts])


def _events_with_python(finding: FindingView, summary: Summary) -> FindingView:
    """The finding with the line of Python behind its events."""
    if finding.events is None:
        return finding
    return replace(finding, events=replace(finding.events, python=f"{_run(summary)}.findings()[{finding.number - 1}].events"))


def _run(summary: Summary) -> str:
    """The line of Python that opens the run."""
    bench = f", bench={summary.bench.path!r}" if summary.bench and not summary.bench.found else ""
    return f"from bridge_profiling.run import Run; Run({str(summary.path.absolute())!r}{bench})"


def _longest_calls(run: Run, timeline: Timeline) -> dict[str, Target]:
    """Where the timeline shows the longest call of each operator; of those whose iteration is on the page."""
    found: dict[str, Target] = {}
    if not timeline.segments:
        return found
    calls = run.facts.longest_calls
    shown = pc.is_in(calls["rank"], pa.array(timeline.ranks, pa.int32()))
    rows = calls.filter(pc.and_(pc.equal(calls["source"], run.main_source), shown)).to_pylist()
    for row in sorted(rows, key=lambda row: -row["duration_us"]):
        if row["name"] not in found and (place := timeline.target_at(row["rank"], row["start_ns"], row["duration_us"])):
            found[row["name"]] = place
    return found


def ranks_to_show(summary: Summary, most: int = NAMED_RANKS, every: int = EVERY_RANK) -> list[int]:
    """The ranks with a row of their own: all up to `every`, else the `most` interesting ones.

    Those are the responsible ones of findings about few ranks, slow and fast ones, and the first of each pipeline stage.
    """
    everyone = [info.rank for info in summary.infos]
    if len(everyone) <= every:
        return everyone
    responsible = [rank for each in summary.findings if len(each.ranks) <= most // 2 for rank in each.ranks[:4]]
    slowest = [row["rank"] for row in summary.stragglers]
    first = [members[0] for members in stages(summary.infos).values()]
    wanted = [
        *responsible, *slowest[: most // 4], *slowest[-2:], *first[: most // 2], *slowest[most // 4 :], *everyone
    ]  # fmt: skip
    known = set(everyone)
    return sorted(list(dict.fromkeys(rank for rank in wanted if rank in known))[:most])


def stages(infos: Iterable[RankInfo]) -> dict[str, list[int]]:
    """Ranks by pipeline stage; one group of all where there is one stage, or none is known."""
    found: dict[str, list[int]] = defaultdict(list)
    for info in infos:
        stage, count = (info.coordinates or {}).get("pp", (0, 1))
        found[f"pipeline stage {stage}" if count > 1 else "all ranks"].append(info.rank)
    return dict(found)


def _title(summary: Summary) -> str:
    return summary.path.absolute().name or "run"


def _section(id: str, *paragraphs: str, **more: Any) -> SectionView:
    """A section with its explanation, or with the sentence that it has nothing to show."""
    texts = words.resource("sections")[id]
    section = SectionView(id, texts["title"], short=texts.get("short", ""), **more)
    text = texts.get("nothing" if section.empty else "text")
    return replace(section, paragraphs=[*([text] if text else []), *paragraphs])


def _attribution(summary: Summary, shown: Sequence[int], every: int) -> SectionView:
    rows = summary.attribution
    if not rows:
        return _section("budget")
    by_rank = {row["rank"]: row for row in rows}
    slow = {row["rank"] for row in summary.stragglers if row["verdict"] == "stable"}
    bars: Rows = []
    if len(rows) > every:
        for stage, members in list(stages(summary.infos).items())[:every]:
            mine = [by_rank[rank] for rank in members if rank in by_rank]
            if mine:
                means = {part: fmean(row[part] for row in mine) for part in ("duration_us", *{*BY_CAUSE, *BY_ACTIVITY})}
                bars.append({"label": f"{stage}, mean of {len(mine)}", **means})
    for rank in shown:
        if rank in by_rank:
            bars.append({**by_rank[rank], "label": f"rank {rank}{' (slow)' if rank in slow else ''}"})
    notes = []
    if not all(row["waiting_known"] for row in rows):
        notes.append(
            "Communication includes waiting for other ranks here: the captures do not show which operations belong together, "
            "or only one rank of a group was captured."
        )
    if len(rows) > every:
        notes.append(f"{len(rows):,} ranks: the bars are means, followed by single ranks. A table below shows how they differ.")
    labels = {view: f"by {view}" for view in figures.VIEWS}
    variants = {view: figures.attribution_figure(bars, view) for view in figures.VIEWS}
    caption = "The median iteration of each rank as a stacked bar, in milliseconds."
    found = [tables.attribution(bars, view) for view in figures.VIEWS]
    if len(rows) > every:
        found.insert(0, tables.spread(rows))
    return _section("budget", notes=notes, figures=[FigureView("budget", variants, caption, labels)], tables=found)


def _scorecard(summary: Summary) -> SectionView:
    known = any(row["value"] is not None for row in summary.scorecard)
    return _section("scorecard", tables=[scorecard_view.scorecard(summary.scorecard)] if known else [])


def _on_cpus(summary: Summary) -> SectionView:
    ranks = summary.on_cpus[:EVERY_RANK]
    caption = "The mean iteration of each rank as a stacked bar, in milliseconds."
    view = FigureView("host", {"cause": host_view.host_figure(ranks)}, caption)
    return _section("host", figures=[view], tables=[host_view.host_table(ranks)])


def _phases(summary: Summary, shown: Sequence[int], timeline: Timeline) -> SectionView:
    rows = [row for row in summary.phases if row["rank"] in set(shown)]
    found = [phases_view.of_ranks(rows, _MOST_ROWS, timeline, of_device=not summary.on_cpus)] if rows else []
    inside = "Device time is that of all work launched inside, by operators and ranges further in and by autograd meanwhile."
    return _section("phases", *([inside] if found and not summary.on_cpus else []), tables=found)


def _phases_on_a_screen(summary: Summary) -> SectionView:
    of_device = bool(summary.attribution) or not summary.without_device
    table = phases_view.of_run(summary.phases, _SCREEN_PHASES, of_device=of_device, library=False)
    return _section("phases", tables=[table] if table.rows else [])


def _iterations(rows: Rows) -> SectionView:
    measures = {name: text for name, text in figures.MEASURES.items() if any(row[name] is not None for row in rows)}
    if not measures:
        return _section("iterations")
    block = -(-len({row["rank"] for row in rows}) // figures.MOST_ROWS)
    slowest = Counter(row["rank"] for row in rows if row["place"] == "slowest")
    often = [f"rank {rank} in {count} of {slowest.total()}" for rank, count in slowest.most_common(4)]
    more = f", and {len(slowest) - 4} other ranks in the rest" if len(slowest) > 4 else ""
    said = [f"Slowest by own time: {', '.join(often)} iterations{more}."] if often else []
    note = f"A row is {block} neighboring ranks; its color is the highest value, and hovering shows that rank."
    variants = {name: figures.iterations_figure(rows, name) for name in measures}
    view = FigureView("iterations", variants, "A cell for each iteration of each rank, in milliseconds.", measures)
    return _section("iterations", *said, notes=[note] if block > 1 else [], figures=[view])


def _waits(summary: Summary, waits: Rows, iterations: int, pipeline: Sequence[TableView]) -> SectionView:
    ranks, drawn, said, notes, found = [info.rank for info in summary.infos], [], [], [], []
    if len(ranks) > 1:
        marked = [row for row in waits if row["iteration"] is not None]
        matrix = figures.wait_matrix(marked or waits, iterations, ranks)
        cells = zip(matrix.ranks, matrix.wait_us, strict=True)
        pairs = [(wait, rank, other) for rank, row in cells for other, wait in zip(matrix.ranks, row, strict=True) if wait > 0]
        longest = [f"rank {rank} for rank {other}, {words.milliseconds(wait)}" for wait, rank, other in sorted(pairs)[:-6:-1]]
        if longest:
            said = [f"Longest waits per iteration: {'; '.join(longest)}."]
            caption = "Rows wait, columns are waited for; milliseconds per iteration, mean of the captured iterations."
            drawn = [FigureView("waits", {"waits": figures.waits_figure(matrix)}, caption)]
        if longest and len(matrix.ranks) < len(ranks):
            shown = f"The {len(matrix.ranks)} ranks of {len(ranks):,} that wait or are waited for most"
            notes = [f"{shown}; {matrix.shown:.0%} of all waiting is between them."]
        slow, left = tables.most(summary.stragglers, NAMED_RANKS, "ranks")
        found = [tables.stragglers(slow, left)] if slow else []
    found += [each for each in pipeline if each.rows]
    return _section("waits", *said, notes=notes, figures=drawn, tables=found)


def _communication(rows: Rows, by_size: TableView, iterations: int, bench: SectionView) -> SectionView:
    shown = figures.by_group(rows, iterations)[: figures.MOST_GROUPS]
    caption = (
        "Transfer and waiting of each kind of communication per iteration; waiting is the mean of the group's captured ranks."
    )
    view = FigureView("communication", {"communication": figures.communication_figure(shown)}, caption)
    drawn = [view] if any(row["transfer_us"] is not None for row in shown) else []
    found = [tables.communication(rows, iterations), by_size] if shown else []
    return _section("communication", figures=drawn, tables=found, parts=[] if bench.empty else [bench])


def _timeline(timeline: Timeline, at_first: list[int]) -> SectionView:
    if not timeline.segments:
        return _section("timeline")
    left = f" {timeline.left_out} more captured iterations are not on this page." if timeline.left_out > 0 else ""
    shortest = f"{max(timeline.resolution_ns.values()) / 1e3:.3g} µs"
    data = {
        "iterations": [(iteration_name(number), number == timeline.typical) for number in timeline.windows],
        "ranks": timeline.ranks,
        "at_first": at_first,
        "caption": f"Work shorter than {shortest} is drawn together with its neighbors; the raw trace has all of it.{left}",
    }
    return _section("timeline", kind="timeline", data=data)


def _gpu_metrics(run: Run, shown: Sequence[int]) -> list[SectionView]:
    """The counters that nsys sampled: all as a table, those in percent over time; nothing where none were."""
    rows = run.gpu_metrics().to_pylist()
    if not rows:
        return []
    courses: dict[tuple[int, int], Rows] = defaultdict(list)
    for row in run.facts.gpu_metrics_over_time().to_pylist():
        if row["rank"] in shown[:_ON_A_SCREEN] and "%" in row["metric"]:
            courses[row["rank"], row["device"]].append(row)
    variants = {
        f"rank {rank}, device {device}": figures.counters_figure(course) for (rank, device), course in sorted(courses.items())
    }
    caption = "Counters in percent of their peak, in the marked iterations. Click a name to hide or show it."
    drawn = [FigureView("gpu-metrics-over-time", variants, caption)] if variants else []
    of_kernels = run.kernel_counters().to_pylist()
    if (figure := counters_view.counters_figure(of_kernels)) is not None:
        drawn.append(FigureView("kernel-counters-figure", {"counters": figure}, _COUNTERS))
    found = [tables.gpu_metrics(rows, _MOST_ROWS), counters_view.kernel_counters(of_kernels, _MOST_ROWS)]
    return [_section("gpu-metrics", figures=drawn, tables=[table for table in found if table.rows])]


def _memory(run: Run, rows: Rows, by_other_means: Sequence[TableView]) -> SectionView:
    more = [each for each in by_other_means if each.rows]
    if not rows:
        return _section("memory", tables=more)
    peaks = [row["rank"] for row in sorted(rows, key=lambda row: -(row["peak_bytes"] or 0))]
    growing = [row["rank"] for row in sorted(rows, key=lambda row: -(row["growth_bytes_per_iteration"] or 0))]
    drawn = set(list(dict.fromkeys([*peaks[:2], *growing[:2], *peaks]))[:_MEMORY_RANKS])
    view = memory_over_time_view(run, drawn, "memory")
    return _section("memory", figures=view, tables=[tables.memory_devices(rows, NAMED_RANKS), *more])


def memory_over_time_view(run: Run, ranks: set[int], id: str) -> list[FigureView]:
    """Memory over time of the devices of some ranks; none if none was recorded."""
    by_site: dict[Any, Rows] = defaultdict(list)
    timeline: dict[Any, Rows] = defaultdict(list)
    sites = run.facts.memory_over_time(tuple(sorted(ranks)))
    for found, rows in ((by_site, sites), (timeline, run.memory_timeline())):
        for row in rows.to_pylist():
            if row["rank"] in ranks:
                found[row["rank"], row["device"]].append(row)
    caption = "By allocation site." if by_site else "A trace does not show allocation sites; a memory snapshot does."
    variants = {
        f"rank {rank}, device {device}": figures.memory_figure(by_site[rank, device], timeline[rank, device])
        for rank, device in sorted({*by_site, *timeline})
    }
    return [FigureView(id, variants, f"Memory over time. {caption}")] if variants else []


def _quality(run: Run, summary: Summary, iterations: Rows) -> SectionView:
    infos = summary.infos
    offsets = {row["rank"]: row for row in run.clock_offsets().to_pylist()} if len(infos) > 1 else {}
    manifests = {manifest.rank: manifest for manifest in summary.manifests}
    table = tables.captures(infos, manifests, iterations, offsets, NAMED_RANKS if len(infos) > EVERY_RANK else None)
    versions = sorted({f"{name} {version}".replace("_", " ") for info in infos for name, version in info.versions.items()})
    data = {"errors": run.errors, "limitations": run.limitations, "versions": " · ".join(versions[:12])}
    return _section("quality", kind="quality", tables=[table] if table.rows else [], data=data)


def _raw_traces(summary: Summary, shown: Sequence[int], output: Path) -> SectionView:
    folder = output.absolute().parent
    rows = [
        [Cell(str(info.rank)), Cell("", copy=file), Cell(file, link=_link(Path(file), folder))]
        for info in summary.infos
        if info.rank in set(shown)
        for file in info.files
    ]
    left = len(summary.infos) - len({row[0].text for row in rows})
    note = f"{left:,} more ranks." if left else ""
    table = TableView("files", "Trace files, relative to this page", ["rank", "copy", "file"], rows, name_last=True, note=note)
    data = {"run": shell_path(summary.path), "perfetto": summary.source == "kineto"}
    return _section("raw", kind="raw", tables=[table] if rows else [], data=data)


def _link(file: Path, folder: Path) -> str:
    """From the page to a file; it stays valid if both are moved together."""
    try:
        relative = os.path.relpath(file, folder)
    except ValueError:  # another drive
        return file.as_uri()
    # The leading dot: otherwise a directory whose name has a colon would be read as a scheme.
    return "./" + quote(os.fsencode(Path(relative).as_posix()))


def _facts(summary: Summary, iterations: Rows, memory: Rows) -> list[tuple[str, str]]:
    infos = summary.infos
    world = max((info.world_size or 0 for info in infos), default=0)
    devices = sorted({name for info in infos for name in info.devices.values()})
    numbers = sorted({row["iteration"] for row in iterations if row["iteration"] is not None})
    marked = f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]) if numbers else "none marked"
    first = min((row["start_ns"] for row in iterations), default=0) if all(info.clock == "unix" for info in infos) else 0
    found = {
        "ranks": f"{len(infos):,}" + (f" of {world:,}" if world > len(infos) else ""),
        "layout": _layout(infos),
        "devices": ", ".join(devices[:3]),
        "iterations": marked,
        "captured by": {"kineto": "torch.profiler", "nsys": "nsys"}.get(summary.source, ""),
        "captured at": words.date(first) if first else "",
    }
    if not infos:
        found = {"ranks": str(len({row["rank"] for row in memory})), "captured by": "memory snapshot"}
    return [pair for pair in found.items() if pair[1]]


#: Integrations whose ranks count the parameters of their own part of the model.
_SHARDED = ("megatron-bridge", "recipe")


def _training_facts(run: Run) -> list[tuple[str, str]]:
    """Sizes of the first rank's model and data. Megatron's ranks hold parts of the model, and each counts its own."""
    sizes = next(iter(measurements.training_rows(run.manifests)), {})
    parts = any((each.manifest.framework or {}).get("name") in _SHARDED for each in run.manifests)
    part = f" of rank {sizes['rank']}" if parts and sizes else ""
    if sizes.get("trainable_parameters") == sizes.get("parameters"):
        sizes = {name: size for name, size in sizes.items() if name != "trainable_parameters"}
    named = {name: word + part * name.endswith("parameters") for name, word in measurements.TRAINING_SIZES.items()}
    return [(word, f"{sizes[name]:,}") for name, word in named.items() if sizes.get(name) is not None]


def _layout(infos: Sequence[RankInfo]) -> str:
    coordinates = next((info.coordinates for info in infos if info.coordinates), None)
    if coordinates:
        return " ".join(f"{name}={count}" for name, (_, count) in coordinates.items() if count > 1) or "one rank per group"
    sizes = {group.description: len(group.ranks) for info in infos[:1] for group in info.groups if len(group.ranks) > 1}
    return " ".join(f"{short}={sizes[name]}" for name, short in figures.GROUPS.items() if name in sizes)
