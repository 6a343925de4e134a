"""A run's answers as a view: for a page, and for a terminal. Chooses the ranks that have a row of their own."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.answers import Answers
from bridge_profiling.facts.device import ranks_without_work
from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.findings import Event
from bridge_profiling.printable import shell_path
from bridge_profiling.report import bench_view, figures, measurements, rows, tables, words
from bridge_profiling.report.findings_view import Pictures, findings_view
from bridge_profiling.report.flame_graph import flame_graph_section
from bridge_profiling.report.rows import Rows
from bridge_profiling.report.timeline import Timeline, iteration_name, timeline_of
from bridge_profiling.report.verdict import Summary, verdict
from bridge_profiling.report.views import Cell, FigureView, PageView, SectionView, TableView, Target, captioned, section
from bridge_profiling.traces.types import RankInfo

#: Up to the first number of ranks, each has a row. Beyond, ranks are aggregated, and the second number have rows of their own.
EVERY_RANK, NAMED_RANKS = 64, 16

#: Ranks on a terminal, and in the timeline at first: as many as fit a screen.
_ON_A_SCREEN = 8

#: Ranks whose memory is drawn, and rows of kernels and of operators.
_MEMORY_RANKS, _MOST_ROWS = 4, 250

#: Rows of a table on a terminal, and phases below a verdict.
_TERMINAL_ROWS, _SCREEN_PHASES = 10, 6


def run_tables(run: Answers) -> list[TableView]:
    """The tables of `bridge-profiling analyze`."""
    breakdown, hosts = run.breakdown(), rows.mean_host_iterations(run.host_iterations().to_pylist())
    on_cpu = {
        (rank, source) for source in set(breakdown["source"].to_pylist()) for rank in ranks_without_work(breakdown, source)
    }
    all_on_cpu = len(on_cpu) == breakdown.num_rows > 0 and bool(hosts)
    of_device = [] if all_on_cpu else [
        tables.view("device", breakdown.to_pylist()), tables.typical(run.typical_iteration().to_pylist(), on_cpu)
    ]  # fmt: skip
    iterations = len({row["iteration"] for row in run.iterations().to_pylist()}) or 1
    communication = rows.by_group(run.communication().to_pylist(), iterations)
    found = [
        *of_device,
        tables.host(hosts),
        tables.phases(run.phases().to_pylist(), _TERMINAL_ROWS, of_device=not all_on_cpu),
        tables.view("kernel-groups", rows.kernel_groups(run.kernel_groups().to_pylist())),
        tables.kernels(run.kernels(by_rank=False).to_pylist(), _TERMINAL_ROWS),
        tables.operators(run.operators(), _TERMINAL_ROWS),
        tables.view("products", rows.matrix_products(run.matrix_products().to_pylist()), _TERMINAL_ROWS),
        tables.view("communication-table", communication, _TERMINAL_ROWS),
        tables.view("message-sizes", rows.by_size(run.communication(by_size=True).to_pylist(), iterations), _TERMINAL_ROWS),
        *([] if run.against_bench is None else bench_view.alone_tables(run.against_bench)),
        tables.view("ranks", run.ranks().to_pylist()),
        tables.view("stragglers", run.stragglers().to_pylist()),
        tables.view("pipeline", run.pipeline().to_pylist()),
        tables.view("pipeline-waits", run.pipeline_waits().to_pylist()),
        tables.view("copies", run.copies().to_pylist(), _TERMINAL_ROWS),
        tables.view("gpu-metrics-table", run.gpu_metrics().to_pylist(), _TERMINAL_ROWS),
        tables.kernel_counters(run.kernel_counters().to_pylist(), _TERMINAL_ROWS),
        tables.system_calls(run.system_calls().to_pylist(), _TERMINAL_ROWS),
        tables.view("memory-devices", run.memory().to_pylist(), len(breakdown) + 1),
        tables.view("cuda-memory", run.cuda_memory().to_pylist(), _TERMINAL_ROWS),
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


def page_view(run: Answers, summary: Summary, output: Path) -> PageView:
    """A run's page, at `output`; its links to the traces are relative to that."""
    shown = ranks_to_show(summary)
    timeline = timeline_of(run, shown)

    def of_source(table: pa.Table) -> pa.Table:
        return table.filter(pc.equal(table["source"], summary.source))

    captured, kernels = (of_source(table).to_pylist() for table in (run.iterations(), run.kernels(by_rank=False)))
    ranks, pipeline, memory = (answer().to_pylist() for answer in (run.ranks, run.pipeline, run.memory))
    entries = {info.rank: entry for info, entry in run.entries()}
    pictures = Pictures(summary, ranks, pipeline, kernels, memory, timeline, entries)
    iterations = len({row["iteration"] for row in captured}) or 1
    products = run.matrix_products().to_pylist()
    manifests = [each for each in summary.manifests if each.rank in shown]
    sections = [
        _attribution(summary, shown, EVERY_RANK),
        _scorecard(summary),
        _phases(summary, shown, timeline),
        _iterations(ranks),
        _waits(
            summary,
            run.waits().to_pylist(),
            len({row["iteration"] for row in ranks}) or 1,
            [tables.view("pipeline", pipeline), tables.view("pipeline-waits", run.pipeline_waits().to_pylist())],
        ),
        section("findings", kind="findings"),
        section(
            "operators" if summary.on_cpus else "work",
            figures=captioned("roofline", {"roofline": figures.roofline_figure(products)}),
            tables=[
                tables.view("kernel-groups", rows.kernel_groups(of_source(run.kernel_groups()).to_pylist())),
                tables.kernels(kernels, _MOST_ROWS),
                tables.operators(of_source(run.operators()), _MOST_ROWS, _longest_calls(run, timeline)),
                tables.view("products", rows.matrix_products(products), _MOST_ROWS),
                tables.system_calls(run.system_calls().to_pylist(), _MOST_ROWS),
                tables.view("wall-clock", measurements.wall_clock_rows(manifests)),
                tables.view("flops-profile", measurements.flops_rows(manifests)),
            ],
        ),
        *flame_graph_section(run, summary, captured),
        _communication(
            rows.by_group(run.communication().to_pylist(), iterations),
            rows.by_size(run.communication(by_size=True).to_pylist(), iterations),
            bench_view.section(summary.bench),
        ),
        _timeline(timeline, ranks_to_show(summary, most=_ON_A_SCREEN, every=_ON_A_SCREEN)),
        *_gpu_metrics(run, shown),
        _memory(
            run,
            memory,
            [
                tables.view("phase-memory", measurements.phase_memory_rows(manifests)),
                tables.view("cuda-memory", run.cuda_memory().to_pylist(), NAMED_RANKS),
            ],
        ),
    ]
    if summary.on_cpus:
        without = {"budget", "iterations", "waits", "communication", "timeline", "memory"}
        sections = [_on_cpus(summary), *(each for each in sections if each.id not in without or not each.empty)]
    # Last: questions add to what the captures cannot show.
    sections += [_quality(run, summary, captured), _raw_traces(summary, shown, output)]
    bench = f", bench={summary.bench.path!r}" if summary.bench and not summary.bench.found else ""
    return PageView(
        "report",
        _title(summary),
        verdict(summary),
        sections,
        facts=[*measurements.capture_facts(summary, captured, memory), *measurements.training_facts(run)],
        findings=findings_view(summary, pictures),
        notices=summary.notices,
        timeline=timeline.data() if timeline.segments else None,
        opened=f"from bridge_profiling.run import Run; Run({str(summary.path.absolute())!r}{bench})",
    )


def _longest_calls(run: Answers, timeline: Timeline) -> dict[str, Target]:
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


def _attribution(summary: Summary, shown: Sequence[int], every: int) -> SectionView:
    attribution = summary.attribution
    if not attribution:
        return section("budget")
    by_rank = {row["rank"]: row for row in attribution}
    slow = {row["rank"] for row in summary.stragglers if row["verdict"] == "stable"}
    bars: Rows = []
    if len(by_rank) > every:
        for stage, members in list(stages(summary.infos).items())[:every]:
            mine = [by_rank[rank] for rank in members if rank in by_rank]
            if mine:
                means = {part: fmean(row[part] for row in mine) for part in ("duration_us", *{*BY_CAUSE, *BY_ACTIVITY})}
                bars.append({"label": f"{stage}, mean of {len(mine)}", **means})
    for rank in shown:
        if rank in by_rank:
            bars.append({**by_rank[rank], "label": f"rank {rank}{' (slow)' if rank in slow else ''}"})
    notes = []
    if not all(row["waiting_known"] for row in attribution):
        notes.append(
            "Communication includes waiting for other ranks here: the captures do not show which operations belong together, "
            "or only one rank of a group was captured."
        )
    if len(by_rank) > every:
        notes.append(
            f"{len(by_rank):,} ranks: the bars are means, followed by single ranks. A table below shows how they differ."
        )
    labels = {view: f"by {view}" for view in figures.VIEWS}
    variants = {view: figures.attribution_figure(bars, view) for view in figures.VIEWS}
    found = [tables.attribution(bars, view) for view in figures.VIEWS]
    if len(by_rank) > every:
        found.insert(0, tables.spread(attribution))
    return section("budget", notes=notes, figures=captioned("budget", variants, labels), tables=found)


def _scorecard(summary: Summary) -> SectionView:
    known = any(row["value"] is not None for row in summary.scorecard)
    return section("scorecard", tables=[tables.view("scorecard", summary.scorecard if known else [])])


def _on_cpus(summary: Summary) -> SectionView:
    ranks = summary.on_cpus[:EVERY_RANK]
    return section("host", figures=captioned("host", {"cause": figures.host_figure(ranks)}), tables=[tables.host(ranks)])


def _phases(summary: Summary, shown: Sequence[int], timeline: Timeline) -> SectionView:
    found = [row for row in summary.phases if row["rank"] in set(shown)]
    named = ("rank", "name", "longest_iteration", "longest_start_ns", "longest_us")
    places = [timeline.target(Event(*(row[name] for name in named))) for row in found]
    view = tables.phases_of_ranks(found, _MOST_ROWS, places, of_device=not summary.on_cpus)
    inside = "Device time is that of all work launched inside, by operators and ranges further in and by autograd meanwhile."
    return section("phases", *([inside] if found and not summary.on_cpus else []), tables=[view])


def _phases_on_a_screen(summary: Summary) -> SectionView:
    of_device = bool(summary.attribution) or not summary.without_device
    return section("phases", tables=[tables.phases(summary.phases, _SCREEN_PHASES, of_device=of_device, library=False)])


def _iterations(ranks: Rows) -> SectionView:
    measures = {name: text for name, text in figures.MEASURES.items() if any(row[name] is not None for row in ranks)}
    if not measures:
        return section("iterations")
    block = -(-len({row["rank"] for row in ranks}) // figures.MOST_ROWS)
    slowest = Counter(row["rank"] for row in ranks if row["place"] == "slowest")
    often = [f"rank {rank} in {count} of {slowest.total()}" for rank, count in slowest.most_common(4)]
    more = f", and {len(slowest) - 4} other ranks in the rest" if len(slowest) > 4 else ""
    said = [f"Slowest by own time: {', '.join(often)} iterations{more}."] if often else []
    note = f"A row is {block} neighboring ranks; its color is the highest value, and hovering shows that rank."
    variants = {name: figures.iterations_figure(ranks, name) for name in measures}
    drawn = captioned("iterations", variants, measures)
    return section("iterations", *said, notes=[note] if block > 1 else [], figures=drawn)


def _waits(summary: Summary, waits: Rows, iterations: int, pipeline: Sequence[TableView]) -> SectionView:
    ranks, drawn, said, notes = [info.rank for info in summary.infos], [], [], []
    if len(ranks) > 1:
        marked = [row for row in waits if row["iteration"] is not None]
        matrix = rows.wait_matrix(marked or waits, iterations, ranks)
        cells = zip(matrix.ranks, matrix.wait_us, strict=True)
        pairs = [(wait, rank, other) for rank, row in cells for other, wait in zip(matrix.ranks, row, strict=True) if wait > 0]
        longest = [f"rank {rank} for rank {other}, {words.milliseconds(wait)}" for wait, rank, other in sorted(pairs)[:-6:-1]]
        if longest:
            said = [f"Longest waits per iteration: {'; '.join(longest)}."]
            drawn = captioned("waits", {"waits": figures.waits_figure(matrix)})
        if longest and len(matrix.ranks) < len(ranks):
            shown = f"The {len(matrix.ranks)} ranks of {len(ranks):,} that wait or are waited for most"
            notes = [f"{shown}; {matrix.shown:.0%} of all waiting is between them."]
    slow = tables.view("stragglers", summary.stragglers if len(ranks) > 1 else [], NAMED_RANKS)
    return section("waits", *said, notes=notes, figures=drawn, tables=[slow, *pipeline])


def _communication(by_group: Rows, by_size: Rows, bench: SectionView) -> SectionView:
    shown = by_group[: rows.MOST_GROUPS]
    known = any(row["transfer_us"] is not None for row in shown)
    drawn = captioned("communication", {"communication": figures.communication_figure(shown) if known else None})
    found = [
        tables.view("communication-table", by_group, rows.MOST_GROUPS),
        tables.view("message-sizes", by_size if shown else [], _MOST_ROWS),
    ]
    return section("communication", figures=drawn, tables=found, parts=[] if bench.empty else [bench])


def _timeline(timeline: Timeline, at_first: list[int]) -> SectionView:
    if not timeline.segments:
        return section("timeline")
    left = f" {timeline.left_out} more captured iterations are not on this page." if timeline.left_out > 0 else ""
    shortest = f"{max(timeline.resolution_ns.values()) / 1e3:.3g} µs"
    data = {
        "iterations": [(iteration_name(number), number == timeline.typical) for number in timeline.windows],
        "ranks": timeline.ranks,
        "at_first": at_first,
        "caption": f"Work shorter than {shortest} is drawn together with its neighbors; the raw trace has all of it.{left}",
    }
    return section("timeline", kind="timeline", data=data)


def _gpu_metrics(run: Answers, shown: Sequence[int]) -> list[SectionView]:
    """The counters that nsys sampled: all as a table, those in percent over time; nothing where none were."""
    sampled = run.gpu_metrics().to_pylist()
    if not sampled:
        return []
    over_time = run.facts.gpu_metrics_over_time().to_pylist()
    drawn = [row for row in over_time if row["rank"] in shown[:_ON_A_SCREEN] and "%" in row["metric"]]
    variants = {
        f"rank {rank}, device {device}": figures.counters_figure(course)
        for (rank, device), course in sorted(grouped(drawn, "rank", "device").items())
    }
    of_kernels = run.kernel_counters().to_pylist()
    pictures = [
        *captioned("gpu-metrics-over-time", variants),
        *captioned("kernel-counters-figure", {"counters": figures.kernel_counters_figure(of_kernels)}),
    ]
    found = [tables.view("gpu-metrics-table", sampled, _MOST_ROWS), tables.kernel_counters(of_kernels, _MOST_ROWS)]
    return [section("gpu-metrics", figures=pictures, tables=found)]


def _memory(run: Answers, devices: Rows, by_other_means: Sequence[TableView]) -> SectionView:
    peaks = [row["rank"] for row in sorted(devices, key=lambda row: -(row["peak_bytes"] or 0))]
    growing = [row["rank"] for row in sorted(devices, key=lambda row: -(row["growth_bytes_per_iteration"] or 0))]
    drawn = set(list(dict.fromkeys([*peaks[:2], *growing[:2], *peaks]))[:_MEMORY_RANKS])
    view = memory_over_time_view(run, drawn, "memory") if drawn else []
    return section("memory", figures=view, tables=[tables.view("memory-devices", devices, NAMED_RANKS), *by_other_means])


def memory_over_time_view(run: Answers, ranks: set[int], id: str) -> list[FigureView]:
    """Memory over time of the devices of some ranks; none if none was recorded."""
    by_site, timeline = (
        grouped((row for row in answer.to_pylist() if row["rank"] in ranks), "rank", "device")
        for answer in (run.facts.memory_over_time, run.memory_timeline())
    )
    caption = "By allocation site." if by_site else "A trace does not show allocation sites; a memory snapshot does."
    variants = {
        f"rank {rank}, device {device}": figures.memory_figure(
            by_site.get((rank, device), []), timeline.get((rank, device), [])
        )
        for rank, device in sorted({*by_site, *timeline})
    }
    return [FigureView(id, variants, f"Memory over time. {caption}")] if variants else []


def _quality(run: Answers, summary: Summary, iterations: Rows) -> SectionView:
    infos = summary.infos
    offsets = {row["rank"]: row for row in run.clock_offsets().to_pylist()} if len(infos) > 1 else {}
    manifests = {manifest.rank: manifest for manifest in summary.manifests}
    table = tables.captures(infos, manifests, iterations, offsets, NAMED_RANKS if len(infos) > EVERY_RANK else None)
    versions = sorted({f"{name} {version}".replace("_", " ") for info in infos for name, version in info.versions.items()})
    data = {"errors": run.errors, "limitations": run.limitations, "versions": " · ".join(versions[:12])}
    return section("quality", kind="quality", tables=[table], data=data)


def _raw_traces(summary: Summary, shown: Sequence[int], output: Path) -> SectionView:
    folder = output.absolute().parent
    files = [
        [Cell(str(info.rank)), Cell("", copy=file), Cell(file, link=_link(Path(file), folder))]
        for info in summary.infos
        if info.rank in set(shown)
        for file in info.files
    ]
    left = len(summary.infos) - len({row[0].text for row in files})
    note = f"{left:,} more ranks." if left else ""
    headings = ["rank", "copy", "file"]
    title = "Trace files, relative to this page"
    table = TableView("files", title, headings, files, name_last=True, note=note, python="infos")
    data = {"run": shell_path(summary.path), "perfetto": summary.source == "kineto"}
    return section("raw", kind="raw", tables=[table], data=data)


def _link(file: Path, folder: Path) -> str:
    """From the page to a file; it stays valid if both are moved together."""
    try:
        relative = os.path.relpath(file, folder)
    except ValueError:  # another drive
        return file.as_uri()
    # The leading dot: otherwise a directory whose name has a colon would be read as a scheme.
    return "./" + quote(os.fsencode(Path(relative).as_posix()))
