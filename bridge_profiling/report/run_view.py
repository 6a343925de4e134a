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

from bridge_profiling.compare.bench import AgainstBench, with_alone
from bridge_profiling.facts.device import ranks_without_work
from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.findings import Event
from bridge_profiling.findings.scorecard import scorecard
from bridge_profiling.printable import shell_path
from bridge_profiling.report import bench_view, figures, measurements, rows, tables, words
from bridge_profiling.report.findings_view import Pictures, findings_view
from bridge_profiling.report.flame_graph import flame_graph_section
from bridge_profiling.report.rows import Rows, of_source
from bridge_profiling.report.timeline import Timeline, iteration_name, timeline_of
from bridge_profiling.report.verdict import Conclusion, notices, verdict
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


def run_tables(facts: RunFacts, bench: AgainstBench | None) -> list[TableView]:
    """The tables of `bridge-profiling analyze`."""
    breakdown, hosts = facts.breakdown, rows.mean_host_iterations(facts.host_iterations.to_pylist())
    on_cpu = {
        (rank, source) for source in set(breakdown["source"].to_pylist()) for rank in ranks_without_work(breakdown, source)
    }
    all_on_cpu = len(on_cpu) == breakdown.num_rows > 0 and bool(hosts)
    of_device = [] if all_on_cpu else [
        tables.view("device", breakdown.to_pylist()), tables.typical(facts.typical_iteration.to_pylist(), on_cpu)
    ]  # fmt: skip
    iterations = len({row["iteration"] for row in facts.iterations.to_pylist()}) or 1
    communication = rows.by_group(facts.communication.to_pylist(), iterations)
    found = [
        *of_device,
        tables.host(hosts),
        tables.phases(facts.phases.to_pylist(), _TERMINAL_ROWS, of_device=not all_on_cpu),
        tables.view("kernel-groups", rows.kernel_groups(facts.kernel_groups.to_pylist())),
        tables.kernels(facts.kernels.to_pylist(), _TERMINAL_ROWS),
        tables.operators(facts.operators, _TERMINAL_ROWS),
        tables.view("products", rows.matrix_products(facts.matrix_products.to_pylist()), _TERMINAL_ROWS),
        tables.view("communication-table", communication, _TERMINAL_ROWS),
        tables.view("message-sizes", rows.by_size(with_alone(facts).to_pylist(), iterations), _TERMINAL_ROWS),
        *([] if bench is None else bench_view.alone_tables(bench)),
        tables.view("ranks", facts.ranks.to_pylist()),
        tables.view("stragglers", facts.stragglers.to_pylist()),
        tables.view("pipeline", facts.pipeline.to_pylist()),
        tables.view("pipeline-waits", facts.pipeline_waits.to_pylist()),
        tables.view("copies", facts.copies.to_pylist(), _TERMINAL_ROWS),
        tables.view("gpu-metrics-table", facts.gpu_metrics.to_pylist(), _TERMINAL_ROWS),
        tables.kernel_counters(facts.kernel_counters.to_pylist(), _TERMINAL_ROWS),
        tables.system_calls(facts.system_calls.to_pylist(), _TERMINAL_ROWS),
        tables.view("memory-devices", facts.memory.to_pylist(), len(breakdown) + 1),
        tables.view("cuda-memory", facts.cuda_memory.to_pylist(), _TERMINAL_ROWS),
    ]
    return [table for table in found if table.rows]


def screen_view(facts: RunFacts, found: Conclusion) -> PageView:
    """What a terminal shows of a run: the verdict, where the time goes, the findings, and benchmarks."""
    shown = ranks_to_show(facts, found, most=_ON_A_SCREEN, every=_ON_A_SCREEN)
    time = _on_cpus(found) if found.on_cpus else _attribution(facts, found, shown, _ON_A_SCREEN)
    of_device = bool(found.on_devices) or not found.without_device
    phases = tables.phases(of_source(facts, facts.phases).to_pylist(), _SCREEN_PHASES, of_device=of_device, library=False)
    sections = [time, _scorecard(facts), section("phases", tables=[phases]), bench_view.section(found.bench)]
    findings = findings_view(facts, found)
    return PageView("report", _title(facts), verdict(facts, found), sections, findings=findings, notices=notices(facts))


def page_view(facts: RunFacts, found: Conclusion, output: Path) -> PageView:
    """A run's page, at `output`; its links to the traces are relative to that."""
    shown = ranks_to_show(facts, found)
    timeline = timeline_of(facts, shown)
    captured, kernels = (of_source(facts, table).to_pylist() for table in (facts.iterations, facts.kernels))
    memory, iterations = facts.memory.to_pylist(), len({row["iteration"] for row in captured}) or 1
    products, bench = facts.matrix_products.to_pylist(), found.bench
    manifests = [each for each in facts.manifests if each.rank in shown]
    sections = [
        _attribution(facts, found, shown, EVERY_RANK),
        _scorecard(facts),
        _phases(facts, found, shown, timeline),
        _iterations(facts.ranks.to_pylist()),
        _waits(facts),
        section("findings", kind="findings"),
        section(
            "operators" if found.on_cpus else "work",
            figures=captioned("roofline", {"roofline": figures.roofline_figure(products)}),
            tables=[
                tables.view("kernel-groups", rows.kernel_groups(of_source(facts, facts.kernel_groups).to_pylist())),
                tables.kernels(kernels, _MOST_ROWS),
                tables.operators(of_source(facts, facts.operators), _MOST_ROWS, _longest_calls(facts, timeline)),
                tables.view("products", rows.matrix_products(products), _MOST_ROWS),
                tables.system_calls(facts.system_calls.to_pylist(), _MOST_ROWS),
                tables.view("wall-clock", measurements.wall_clock_rows(manifests)),
                tables.view("flops-profile", measurements.flops_rows(manifests)),
            ],
        ),
        *flame_graph_section(facts, captured),
        _communication(
            rows.by_group(facts.communication.to_pylist(), iterations),
            rows.by_size(with_alone(facts).to_pylist(), iterations),
            bench_view.section(bench),
        ),
        _timeline(timeline, ranks_to_show(facts, found, most=_ON_A_SCREEN, every=_ON_A_SCREEN)),
        *_gpu_metrics(facts, shown),
        _memory(
            facts,
            memory,
            [
                tables.view("phase-memory", measurements.phase_memory_rows(manifests)),
                tables.view("cuda-memory", facts.cuda_memory.to_pylist(), NAMED_RANKS),
            ],
        ),
    ]
    if found.on_cpus:
        without = {"budget", "iterations", "waits", "communication", "timeline", "memory"}
        sections = [_on_cpus(found), *(each for each in sections if each.id not in without or not each.empty)]
    # Last: questions add to what the captures cannot show.
    sections += [_quality(facts, captured), _raw_traces(facts, shown, output)]
    named = f", bench={bench.file!r}" if bench and not bench.found_beside_captures else ""
    return PageView(
        "report",
        _title(facts),
        verdict(facts, found),
        sections,
        facts=[*measurements.capture_facts(facts, captured, memory), *measurements.training_facts(facts)],
        findings=findings_view(facts, found, Pictures(facts, found, timeline)),
        notices=notices(facts),
        timeline=timeline.data() if timeline.segments else None,
        opened=f"from bridge_profiling.run import Run; Run({str(facts.path.absolute())!r}{named})",
    )


def _longest_calls(facts: RunFacts, timeline: Timeline) -> dict[str, Target]:
    """Where the timeline shows the longest call of each operator; of those whose iteration is on the page."""
    found: dict[str, Target] = {}
    if not timeline.segments:
        return found
    calls = facts.longest_calls
    shown = pc.is_in(calls["rank"], pa.array(timeline.ranks, pa.int32()))
    rows = calls.filter(pc.and_(pc.equal(calls["source"], facts.source), shown)).to_pylist()
    for row in sorted(rows, key=lambda row: -row["duration_ns"]):
        if row["name"] not in found and (place := timeline.target_at(row["rank"], row["start_ns"], row["duration_ns"])):
            found[row["name"]] = place
    return found


def ranks_to_show(facts: RunFacts, found: Conclusion, most: int = NAMED_RANKS, every: int = EVERY_RANK) -> list[int]:
    """The ranks with a row of their own: all up to `every`, else the `most` interesting ones.

    Those are the responsible ones of findings about few ranks, slow and fast ones, and the first of each pipeline stage.
    """
    everyone = [info.rank for info in facts.infos]
    if len(everyone) <= every:
        return everyone
    responsible = [rank for each in found.findings if len(each.ranks) <= most // 2 for rank in each.ranks[:4]]
    slowest = facts.stragglers["rank"].to_pylist()
    first = [members[0] for members in stages(facts.infos).values()]
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


def _title(facts: RunFacts) -> str:
    return facts.path.absolute().name or "run"


def _attribution(facts: RunFacts, found: Conclusion, shown: Sequence[int], every: int) -> SectionView:
    attribution = found.on_devices
    if not attribution:
        return section("budget")
    by_rank = {row["rank"]: row for row in attribution}
    slow = {row["rank"] for row in facts.stragglers.to_pylist() if row["verdict"] == "stable"}
    bars: Rows = []
    if len(by_rank) > every:
        for stage, members in list(stages(facts.infos).items())[:every]:
            if mine := [by_rank[rank] for rank in members if rank in by_rank]:
                means = {part: fmean(row[part] for row in mine) for part in ("duration_ns", *{*BY_CAUSE, *BY_ACTIVITY})}
                bars.append({"label": f"{stage}, mean of {len(mine)}", **means})
    bars += [{**by_rank[rank], "label": f"rank {rank}{' (slow)' if rank in slow else ''}"} for rank in shown if rank in by_rank]
    notes = []
    if not all(row["waiting_known"] for row in attribution):
        notes.append(words.say("with_waiting"))
    if len(by_rank) > every:
        notes.append(words.say("means", len(by_rank)))
    variants = {f"by {view}": figures.attribution_figure(bars, view) for view in figures.VIEWS}
    numbers = [tables.attribution(bars, view) for view in figures.VIEWS]
    if len(by_rank) > every:
        numbers.insert(0, tables.spread(attribution))
    return section("budget", notes=notes, figures=captioned("budget", variants), tables=numbers)


def _scorecard(facts: RunFacts) -> SectionView:
    checks = scorecard(facts).to_pylist()
    known = any(row["value"] is not None for row in checks)
    return section("scorecard", tables=[tables.view("scorecard", checks if known else [])])


def _on_cpus(found: Conclusion) -> SectionView:
    ranks = found.on_cpus[:EVERY_RANK]
    return section("host", figures=captioned("host", {"by cause": figures.host_figure(ranks)}), tables=[tables.host(ranks)])


def _phases(facts: RunFacts, found: Conclusion, shown: Sequence[int], timeline: Timeline) -> SectionView:
    phases = [row for row in of_source(facts, facts.phases).to_pylist() if row["rank"] in set(shown)]
    named = ("rank", "name", "longest_iteration", "longest_start_ns", "longest_ns")
    places = [timeline.target(Event(*(row[name] for name in named))) for row in phases]
    view = tables.phases_of_ranks(phases, _MOST_ROWS, places, of_device=not found.on_cpus)
    return section("phases", *([words.say("device_time_inside")] if phases and not found.on_cpus else []), tables=[view])


def _iterations(ranks: Rows) -> SectionView:
    measures = {name: text for name, text in figures.MEASURES.items() if any(row[name] is not None for row in ranks)}
    if not measures:
        return section("iterations")
    block = -(-len({row["rank"] for row in ranks}) // figures.MOST_ROWS)
    slowest = Counter(row["rank"] for row in ranks if row["place"] == "slowest")
    often = [f"rank {rank} in {count} of {slowest.total()}" for rank, count in slowest.most_common(4)]
    more = f", and {len(slowest) - 4} other ranks in the rest" if len(slowest) > 4 else ""
    said = [f"Slowest by own time: {', '.join(often)} iterations{more}."] if often else []
    drawn = captioned("iterations", {text: figures.iterations_figure(ranks, name) for name, text in measures.items()})
    return section("iterations", *said, notes=[words.say("rows_of_ranks", block)] if block > 1 else [], figures=drawn)


def _waits(facts: RunFacts) -> SectionView:
    ranks, drawn, said, notes = [info.rank for info in facts.infos], [], [], []
    if len(ranks) > 1:
        waits, iterations = facts.waits.to_pylist(), len(set(facts.ranks["iteration"].to_pylist())) or 1
        marked = [row for row in waits if row["iteration"] is not None]
        matrix = rows.wait_matrix(marked or waits, iterations, ranks)
        cells = zip(matrix.ranks, matrix.wait_ns, strict=True)
        pairs = [(wait, rank, other) for rank, row in cells for other, wait in zip(matrix.ranks, row, strict=True) if wait > 0]
        longest = [f"rank {rank} for rank {other}, {words.ms(wait)}" for wait, rank, other in sorted(pairs)[:-6:-1]]
        if longest:
            said = [f"Longest waits per iteration: {'; '.join(longest)}."]
            drawn = captioned("waits", {"waits": figures.waits_figure(matrix)})
        if longest and len(matrix.ranks) < len(ranks):
            notes = [words.say("most_waiting", shown=len(matrix.ranks), all=len(ranks), share=matrix.shown)]
    found = [
        tables.view("stragglers", facts.stragglers.to_pylist() if len(ranks) > 1 else [], NAMED_RANKS),
        tables.view("pipeline", facts.pipeline.to_pylist()),
        tables.view("pipeline-waits", facts.pipeline_waits.to_pylist()),
    ]
    return section("waits", *said, notes=notes, figures=drawn, tables=found)


def _communication(by_group: Rows, by_size: Rows, bench: SectionView) -> SectionView:
    shown = by_group[: rows.MOST_GROUPS]
    known = any(row["transfer_ns"] is not None for row in shown)
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
    data = {
        "iterations": [(iteration_name(number), number == timeline.typical) for number in timeline.windows],
        "ranks": timeline.ranks,
        "at_first": at_first,
        "caption": words.say("timeline", shortest_us=max(timeline.resolution_ns.values()) / 1e3, left=left),
    }
    return section("timeline", kind="timeline", data=data)


def _gpu_metrics(facts: RunFacts, shown: Sequence[int]) -> list[SectionView]:
    """The counters that nsys sampled: all as a table, those in percent over time; nothing where none were."""
    sampled = facts.gpu_metrics.to_pylist()
    if not sampled:
        return []
    over_time = facts.gpu_metrics_over_time().to_pylist()
    drawn = [row for row in over_time if row["rank"] in shown[:_ON_A_SCREEN] and "%" in row["metric"]]
    variants = {
        f"rank {rank}, device {device}": figures.counters_figure(course)
        for (rank, device), course in sorted(grouped(drawn, "rank", "device").items())
    }
    of_kernels = facts.kernel_counters.to_pylist()
    pictures = [
        *captioned("gpu-metrics-over-time", variants),
        *captioned("kernel-counters-figure", {"counters": figures.kernel_counters_figure(of_kernels)}),
    ]
    found = [tables.view("gpu-metrics-table", sampled, _MOST_ROWS), tables.kernel_counters(of_kernels, _MOST_ROWS)]
    return [section("gpu-metrics", figures=pictures, tables=found)]


def _memory(facts: RunFacts, devices: Rows, by_other_means: Sequence[TableView]) -> SectionView:
    peaks = [row["rank"] for row in sorted(devices, key=lambda row: -(row["peak_bytes"] or 0))]
    growing = [row["rank"] for row in sorted(devices, key=lambda row: -(row["growth_bytes_per_iteration"] or 0))]
    drawn = set(list(dict.fromkeys([*peaks[:2], *growing[:2], *peaks]))[:_MEMORY_RANKS])
    view = memory_over_time_view(facts, drawn, "memory") if drawn else []
    return section("memory", figures=view, tables=[tables.view("memory-devices", devices, NAMED_RANKS), *by_other_means])


def memory_over_time_view(facts: RunFacts, ranks: set[int], id: str) -> list[FigureView]:
    """Memory over time of the devices of some ranks; none if none was recorded."""
    by_site, timeline = (
        grouped((row for row in answer.to_pylist() if row["rank"] in ranks), "rank", "device")
        for answer in (facts.memory_over_time, facts.memory_timeline)
    )
    variants = {
        f"rank {rank}, device {device}": figures.memory_figure(
            by_site.get((rank, device), []), timeline.get((rank, device), [])
        )
        for rank, device in sorted({*by_site, *timeline})
    }
    return captioned("memory-by-site" if by_site else "memory-over-time", variants, shown_as=id)


def _quality(facts: RunFacts, iterations: Rows) -> SectionView:
    infos = facts.infos
    offsets = {row["rank"]: row for row in facts.clock_offsets.to_pylist()} if len(infos) > 1 else {}
    manifests = {manifest.rank: manifest for manifest in facts.manifests}
    table = tables.captures(infos, manifests, iterations, offsets, NAMED_RANKS if len(infos) > EVERY_RANK else None)
    versions = sorted({f"{name} {version}".replace("_", " ") for info in infos for name, version in info.versions.items()})
    data = {"errors": facts.errors, "limitations": facts.limitations, "versions": " · ".join(versions[:12])}
    return section("quality", kind="quality", tables=[table], data=data)


def _raw_traces(facts: RunFacts, shown: Sequence[int], output: Path) -> SectionView:
    infos = facts.infos
    folder = output.absolute().parent
    files = [
        {"rank": info.rank, "copy": Cell("", copy=file), "file": Cell(file, link=_link(Path(file), folder))}
        for info in infos
        if info.rank in set(shown)
        for file in info.files
    ]
    left = len(infos) - len({row["rank"] for row in files})
    table = tables.view("files", files, note=f"{left:,} more ranks." if left else "")
    data = {"run": shell_path(facts.path), "perfetto": facts.source == "kineto"}
    return section("raw", kind="raw", tables=[table], data=data)


def _link(file: Path, folder: Path) -> str:
    """From the page to a file; it stays valid if both are moved together."""
    try:
        relative = os.path.relpath(file, folder)
    except ValueError:  # another drive
        return file.as_uri()
    # The leading dot: otherwise a directory whose name has a colon would be read as a scheme.
    return "./" + quote(os.fsencode(Path(relative).as_posix()))
