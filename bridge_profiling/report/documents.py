"""The documents that commands print with --json, but for that of `analyze`, and the JSON Schemas of all of them.

`compare.Comparison` and `compare.series.Series` make those of `compare --json`, `report.memory_view` that of `memory --json`,
and the benchmarks those of `bench … --json`, which are also the entries of `results` in the file that `-o` writes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from bridge_profiling.facts.columns import DeviceMemory, IterationEnd, OfDevice, OfRank, Site, SiteChange
from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.facts.types import (
    Bytes,
    Count,
    Flag,
    Float,
    Gbs,
    MeanBytes,
    Ns,
    Number,
    Row,
    Share,
    Text,
    Us,
    changes,
    choice,
    many,
    mapping,
    one,
)
from bridge_profiling.report.run_document import CONFIDENCE, PAIR, RANKS, Document, RunDocument

#: Parts of an iteration as keys: `compute_us`.
_PARTS = "_us$"


class Difference(Row):
    """Something that differs between the sides."""

    topic = Text('Such as "layout" or "torch"')
    concerns = choice("work", "conditions", "measurement")(
        "Different work is timed, the same work under other conditions, or the profiler's cost differs"
    )
    base = Text("Value of the base")
    other = Text("Value of the other side")
    means = Text("Consequence for the comparison")


class Change(Row):
    """A change of a time, with its confidence interval if that is known."""

    base_us = Us("Before")
    other_us = Us("After")
    change_us = Us("Difference between after and before")
    low_us = Us.or_null("Lower bound of the change; null if unknown")
    high_us = Us.or_null("Upper bound of the change; null if unknown")
    relative = Share.or_null("The change as a share of the value before; null if that is 0")
    speedup = Float.or_null("Time before divided by time after: above 1 is faster; null if that is 0")
    significant = Flag.or_null("Whether the bounds exclude 0; null without bounds")


class StepChange(Change):
    """The change of the median iteration."""

    verdict = choice("slower", "faster", "unchanged", "unknown")("`unchanged` is within chance; `unknown` has a `reason`")
    evidence = choice("unprofiled", "profiled")("Iterations outside the profiler's window, or those in the captures")
    method = choice("median", "welch")("Iterations of one run per side, or medians of several runs")
    reason = Text.or_null("Why the bounds are unknown; null if they are known")
    samples = PAIR("Iterations or runs of each side")
    level = Share("Probability with which the bounds hold the change")


class EventChange(Row):
    """An event that changed beyond noise."""

    change = choice("came", "went", "slower", "faster", "more", "fewer")(
        "Only on the other side, only on the base, more or less time per call, or more or fewer calls"
    )


#: Further columns of every event.
_AMOUNTS = {
    "base_mean_us": Us.or_null("Mean time per call before; null without calls"),
    "other_mean_us": Us.or_null("Mean time per call after; null without calls"),
    "relative_mean": Share.or_null("Change of that mean as a share of the mean before; null if either is null"),
    **changes(count=Float("Calls per iteration and rank"), us=Us("Time per iteration and rank")),
}
_BYTES = MeanBytes("Bytes per iteration and rank")


class KernelChange(EventChange):
    """Kernels of one name that changed beyond noise."""

    kind = choice("compute", "communication")("What the kernel does")
    name = Text.or_null("Name; null if the captures do not record it")
    amounts = _AMOUNTS


class CopyChange(EventChange):
    """Copies or memsets of one kind that changed beyond noise."""

    kind = choice("memcpy", "memset")("A copy or a memset")
    direction = Text.or_null("Of a copy: `HtoD`, `DtoH`, `DtoD`, …; null if unknown")
    from_memory = Text.or_null("Of a copy: `pageable`, `pinned`, `device`, …; null if unknown")
    to_memory = Text.or_null("The same at the other end")
    amounts = _AMOUNTS | changes(bytes=_BYTES)


class CommunicationChange(EventChange):
    """Communication of one operation in groups of one name and size that changed beyond noise."""

    operation = Text.or_null("`all_reduce`, `all_gather`, …; null if unknown")
    group = Text("The program's name of the group; empty if unknown")
    group_size = Count("Number of ranks in the group; 0 if unknown")
    amounts = _AMOUNTS | changes(
        bytes=_BYTES,
        wait_us=Us("Waiting for other ranks per iteration and rank"),
        kernel_us=Us("Time of the kernels, with waiting, per iteration and rank"),
    )


class OperatorChange(EventChange):
    """Host operators of one name that changed beyond noise."""

    name = KernelChange.name
    amounts = _AMOUNTS | changes(device_us=Us("Device time that they launched, per iteration and rank"))


class RankChange(OfRank):
    """A rank's mean iteration on both sides."""

    largest = Text("The part of `by_cause` that changed most")
    amounts = changes(
        duration_us=Us("The mean iteration"),
        **{part: Us("A part of the mean iteration, as in `by_cause`") for part in BY_CAUSE},
    )


class MemoryChange(OfDevice):
    """Memory of one device of a rank on both sides."""

    amounts = changes(
        peak_bytes=MeanBytes.or_null("Most memory allocated at a time"),
        peak_reserved_bytes=MeanBytes.or_null("Most memory reserved at a time; null if unknown"),
        growth_bytes_per_iteration=MeanBytes.or_null("Median growth per iteration; null if unknown"),
    )


class ShortFinding(Row):
    """A finding of one side only."""

    id = Text("Stable name, such as `data_loading`. Releases may add findings")
    title = Text("One sentence with the most important number")
    ranks = many(Number)("The responsible ranks")
    confidence = CONFIDENCE("How certain the finding is")


class ComparisonDocument(Document):
    """What changed from one side to another, as `bridge-profiling compare BASE OTHER --json` prints it."""

    base = many(Text)("Paths of the runs compared with")
    other = many(Text)("Paths of the runs compared")
    same_work = Flag("Whether no difference concerns `work`")
    differences = many(Difference)("Differences of work and conditions, the most serious first")
    step = one(StepChange).or_null("Change of the median iteration, from the better evidence; null without iterations")
    profiled_step = one(Change).or_null("Change of the captures' median iteration, which the parts split")
    by_cause = mapping(Change, _PARTS)(
        "By cause: the parts, and `outlying_iterations_us`, add up to `profiled_step`; empty without iterations"
    )
    by_activity = mapping(Change, _PARTS)("The same by activity: compute, exposed communication, copying, idle")
    ranks = many(RankChange)("By rank, the largest change first; empty without iterations")
    communication = many(CommunicationChange)("Communication; times are of the transfers")
    kernels = many(KernelChange)("Kernels; the time of one that communicates contains waiting")
    copies = many(CopyChange)("Copies and memsets")
    operators = many(OperatorChange)("Host operators; times are their own")
    memory = many(MemoryChange)("Memory by rank and device; empty unless both sides record it")
    memory_sites = many(SiteChange)("Changes of 1 MiB or more by allocation site")
    findings_came = many(ShortFinding)("Findings of the other side only")
    findings_went = many(ShortFinding)("Findings of the base only")
    limitations = many(Text)("Sentences; those about one side begin with it")


class Median(Row):
    """An estimate with its confidence interval, in microseconds."""

    value = Us("The estimate")
    low = Us.or_null("Lower bound; null if unknown")
    high = Us.or_null("Upper bound; null if unknown")


class Explanation(Row):
    """The part of an iteration that changed most in the direction of the whole."""

    part = Text("Its key in `by_cause` of a comparison of the two runs")
    change_us = Us("Its change")
    significant = Flag.or_null("Whether that is more than chance; null if unknown")


class Against(Row):
    """A run compared with an earlier one."""

    step = one(StepChange).or_null("Change of the median iteration; null without iterations")
    same_work = Flag("Whether no difference concerns `work`")
    differences = many(Difference)("Differences of work and conditions, the most serious first")
    explains_most = one(Explanation).or_null("What changed most; null if the parts are unknown")
    undecided = Text.or_null("Why no limit can be judged; null if one can")


class Spread(Row):
    """How much values differ, in the unit of the key."""

    n = Count("Number of values")
    mean = Float("Mean")
    std = Float.or_null("Standard deviation of a sample; null for one value")
    min = Float("Lowest")
    max = Float("Highest")


class OneOfSeries(Row):
    """One run among several."""

    name = Text("Path of the run")
    captured_unix_ns = Ns.or_null("Nanoseconds since 1970; null without manifests")
    step_us = one(Median).or_null("Median iteration; null without iterations")
    samples = Count("Iterations that the median is of")
    spread_us = one(Spread).or_null("How much these iterations differ; null without iterations")
    parts = mapping(Us, _PARTS)("Parts of the mean captured iteration, and its `duration_us`")
    peak_bytes = Bytes.or_null("Peak of the device with the most allocated memory; null if not recorded")
    against_first = one(Against).or_null("Compared with the first run; null for the first")
    against_previous = one(Against).or_null("Compared with the previous run; null for the first")


class SeriesDocument(Document):
    """Three or more runs in order, as `bridge-profiling compare BASE OTHER MORE... --json` prints them."""

    evidence = choice("unprofiled", "profiled")("Which iterations all medians are of")
    level = Share("Probability with which bounds hold a value")
    runs = many(OneOfSeries)("The runs in order")
    over_runs_us = one(Spread).or_null("How much their median iterations differ; null without iterations")
    trend_us_per_run = one(Median).or_null("Change of the median iteration per run; null if none is supported")
    no_trend = Text.or_null("Why no trend is supported; null otherwise")
    limitations = many(Text)("Sentences; those about one run begin with it")


class RunMemory(Row):
    """Device memory of one run."""

    path = Text("Path of the run")
    devices = many(DeviceMemory)("By rank and device")
    sites = many(Site)("By allocation site, the largest at the peak first; empty without a snapshot")
    growth = many(IterationEnd)("At the end of each iteration")
    limitations = many(Text)("Sentences: what these captures cannot show")


class MemoryDocument(Document):
    """Device memory of one run, or of two, as `bridge-profiling memory A [B] --json` prints it."""

    runs = many(RunMemory)("One or two runs")
    difference = many(SiteChange)("By allocation site, the largest change first; empty for one run")


class Estimate(Row):
    """Statistics of a repeated measurement, in the unit of the key."""

    count = Count("Number of samples")
    median = Float("Median")
    mean = Float("Mean")
    low = Float.or_null("Lower bound of the median at 95%; null with too few samples")
    high = Float.or_null("Upper bound of the median at 95%; null with too few samples")


class Result(Row):
    """A result of a benchmark."""

    measured_unix_ns = Ns("Time of the measurement, since 1970")
    host = Text("Name of the host")
    device = Text("Name of the GPU, or `cpu`")
    devices_of_host = Count("Number of GPUs of the host")
    subject = Text.or_null("The measured function, as it was typed; null for links and copies")
    versions = mapping(Text.or_null)("Versions of Python, torch, CUDA, …")
    limitations = many(Text)("Sentences: what was not measured, and why")


class CollectivesRow(Row):
    """One operation with messages of one size."""

    operation = choice("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "send_recv")("The operation")
    message_bytes = Bytes("The larger of one rank's input and output")
    operations_per_sample = Count("Operations that were timed together")
    time_us = one(Estimate)("Microseconds of one operation, on the slowest rank")
    algorithm_bandwidth_gbs = Gbs("Message size over the median time")
    bus_bandwidth_gbs = Gbs("As in nccl-tests, comparable with the speed of the link")
    correct = Flag("Whether every rank received the right data")


class Link(Row):
    """What selects the links between the ranks."""

    environment = mapping(Text)("Variables that select links")
    peer_access = replace(mapping(Flag, RANKS), optional=True)("Whether a GPU can access each other one; only with GPUs")
    topology = replace(many(Text).or_null, optional=True)("Lines of `nvidia-smi topo -m`; only with GPUs")


class CollectivesResult(Result):
    """Communication by operation and size."""

    kind = choice("collectives")("The benchmark")
    world_size = Count("Number of ranks")
    hosts = Count("Number of hosts")
    ranks_per_host = Count("Most ranks on one host")
    backend = Text("`nccl` or `gloo`")
    link = one(Link)("What selects the links")
    dtype = Text("Element type")
    rows = many(CollectivesRow)("By operation and size")


class CopiesRow(Row):
    """Copies of one kind and size."""

    direction = choice("HtoD", "DtoH")("From host to device, or from device to host")
    host_memory = choice("pinned", "pageable")("The host's memory")
    bytes = Bytes("Size of the copy")
    time_us = one(Estimate)("Microseconds of one copy")
    bandwidth_gbs = Gbs("Size over the median time")
    correct = Flag("Whether the right data arrived")


class CopiesResult(Result):
    """Copies between host and device."""

    kind = choice("copies")("The benchmark")
    rows = many(CopiesRow)("By direction, memory of the host and size")


class LoaderSetting(Row):
    """A setting of the data loader."""

    workers = Count("Worker processes")
    pin_memory = Flag("Whether batches are pinned")
    prefetch = Count.or_null("Batches that each worker prefetches; null without workers")


class LoaderRow(LoaderSetting):
    """The data loader with one setting. Without a measurement, rates are null."""

    status = Text("`measured`, or why it is not")
    batches = Count("Number of batches loaded")
    samples_per_batch = Count.or_null("Samples of a batch; null if unknown")
    first_batch_s = Float.or_null("Seconds until the first batch")
    batches_per_s = one(Estimate).or_null("Batches per second")
    samples_per_s = one(Estimate).or_null("Samples per second; null if the size of a batch is unknown")


class LoaderAdvice(LoaderSetting):
    """The cheapest of the settings that are as fast as the fastest."""

    reason = Text("Why this setting")


class DataLoaderResult(Result):
    """A data loader by workers, pinning and prefetching."""

    kind = choice("data_loader")("The benchmark")
    rows = many(LoaderRow)("By setting")
    recommendation = one(LoaderAdvice).or_null("The recommended setting; null if none can be set, or none was measured")


class StepRow(Row):
    """The step's measurement."""

    warmup = Count("Iterations before the first one measured")
    iterations = Count("Iterations measured")
    time_us = one(Estimate)("Microseconds of one iteration")
    iterations_per_s = one(Estimate)("Iterations per second")
    samples_per_iteration = Count.or_null("Value of --samples; null without it")
    samples_per_s = one(Estimate).or_null("Samples per second; null without --samples")


class StepResult(Result):
    """A step on its own."""

    kind = choice("step")("The benchmark")
    rows = many(StepRow)("One row")


#: The document of each command: one of these.
DOCUMENTS: dict[str, tuple[type[Row], ...]] = {
    "analyze": (RunDocument,),
    "compare": (ComparisonDocument, SeriesDocument),
    "memory": (MemoryDocument,),
    "bench": (CollectivesResult, CopiesResult, DataLoaderResult, StepResult),
}


def schema_text(command: str) -> str:
    """The JSON Schema (draft 2020-12) of the document that a command prints with --json, as text.

    Args:
        command: its name: `analyze`, `report`, `compare`, `memory` or `bench`.
    """
    name = "analyze" if command == "report" else command
    rows, definitions = DOCUMENTS[name], dict[str, Any]()
    for row in rows:
        _define(row, definitions)
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:bridge-profiling:schema:{name}:1",
        "title": f"bridge-profiling {name} --json",
        **(one(rows[0]).json if len(rows) == 1 else {"oneOf": [one(row).json for row in rows]}),
        "$defs": definitions,
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _define(row: type[Row], definitions: dict[str, Any]) -> None:
    """Add the schemas of such objects, and of those inside."""
    if row.__name__ not in definitions:
        definitions[row.__name__] = {
            "description": row.__doc__,
            "type": "object",
            "properties": {name: {"description": column.about, **column.kind.json} for name, column in row.columns.items()},
            "required": [name for name, column in row.columns.items() if not column.kind.optional],
        }
        for column in row.columns.values():
            if column.kind.row is not None:
                _define(column.kind.row, definitions)
