"""The documents of `compare --json`, which `compare.Comparison` makes of two runs, and `compare.Series` of more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta, json

from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.report.schemas.run import Confidence
from bridge_profiling.report.schemas.units import Bytes, Count, MeanBytes, Microseconds, Nanoseconds, Rank, Share, doc

#: A part of an iteration as a key: `compute_us`.
PartKey = Annotated[str, Meta(pattern="_us$")]


class Difference(TypedDict):
    """Something that differs between the sides."""

    topic: Annotated[str, doc('Such as "layout" or "torch"')]
    concerns: Annotated[
        Literal["work", "conditions", "measurement"],
        doc("Different work is timed, the same work under other conditions, or the profiler's cost differs"),
    ]
    base: Annotated[str, doc("Value of the base")]
    other: Annotated[str, doc("Value of the other side")]
    means: Annotated[str, doc("Consequence for the comparison")]


class Change(TypedDict):
    """A change of a time, with its confidence interval if that is known."""

    base_us: Annotated[Microseconds, doc("Before")]
    other_us: Annotated[Microseconds, doc("After")]
    change_us: Annotated[Microseconds, doc("Difference between after and before")]
    low_us: Annotated[Microseconds | None, doc("Lower bound of the change; null if unknown")]
    high_us: Annotated[Microseconds | None, doc("Upper bound of the change; null if unknown")]
    relative: Annotated[Share | None, doc("The change as a share of the value before; null if that is 0")]
    speedup: Annotated[float | None, doc("Time before divided by time after: above 1 is faster; null if that is 0")]
    significant: Annotated[bool | None, doc("Whether the bounds exclude 0; null without bounds")]


class StepChange(Change):
    """The change of the median iteration."""

    verdict: Annotated[
        Literal["slower", "faster", "unchanged", "unknown"], doc("`unchanged` is within chance; `unknown` has a `reason`")
    ]
    evidence: Annotated[
        Literal["unprofiled", "profiled"], doc("Iterations outside the profiler's window, or those in the captures")
    ]
    method: Annotated[Literal["median", "welch"], doc("Iterations of one run per side, or medians of several runs")]
    reason: Annotated[str | None, doc("Why the bounds are unknown; null if they are known")]
    samples: Annotated[tuple[int, int], doc("Iterations or runs of each side")]
    level: Annotated[Share, doc("Probability with which the bounds hold the change")]


_SIDES = {"base": "before", "other": "after", "change": "the change"}


def _changes(text: str, keys: Mapping[str, Any], amounts: Mapping[str, Any]) -> Meta:
    """The properties of a row: its keys, and `base_`, `other_` and `change_` of each amount."""
    properties = {name: json.schema(kind) for name, kind in keys.items()}
    for name, kind in amounts.items():
        own = json.schema(kind)
        properties |= {
            f"{side}_{name}": own | {"description": f"{own['description']}: {when}"} for side, when in _SIDES.items()
        }
    return Meta(description=text, extra_json_schema={"properties": properties, "required": list(properties)})


_CHANGE: dict[str, Any] = {
    "change": Annotated[
        Literal["came", "went", "slower", "faster", "more", "fewer"],
        doc("Only on the other side, only on the base, more or less time per call, or more or fewer calls"),
    ],
}
_MEANS: dict[str, Any] = {
    "base_mean_us": Annotated[Microseconds | None, doc("Mean time per call before; null without calls")],
    "other_mean_us": Annotated[Microseconds | None, doc("Mean time per call after; null without calls")],
    "relative_mean": Annotated[Share | None, doc("Change of that mean as a share of the mean before; null if either is null")],
}
_AMOUNTS: dict[str, Any] = {
    "count": Annotated[float, doc("Calls per iteration and rank")],
    "us": Annotated[Microseconds, doc("Time per iteration and rank")],
}
_BYTES: dict[str, Any] = {"bytes": Annotated[MeanBytes, doc("Bytes per iteration and rank")]}
_NAME = Annotated[str | None, doc("Name; null if the captures do not record it")]


def _event(text: str, keys: Mapping[str, Any], **more: Any) -> Meta:
    """The properties of an event that changed."""
    return _changes(f"{text} that changed beyond noise.", {**_CHANGE, **keys, **_MEANS}, {**_AMOUNTS, **more})


KernelChange = Annotated[
    dict[str, Any],
    _event(
        "Kernels of one name",
        {"kind": Annotated[Literal["compute", "communication"], doc("What the kernel does")], "name": _NAME},
    ),
]
CopyChange = Annotated[
    dict[str, Any],
    _event(
        "Copies or memsets of one kind",
        {
            "kind": Annotated[Literal["memcpy", "memset"], doc("A copy or a memset")],
            "direction": Annotated[str | None, doc("Of a copy: `HtoD`, `DtoH`, `DtoD`, …; null if unknown")],
            "from_memory": Annotated[str | None, doc("Of a copy: `pageable`, `pinned`, `device`, …; null if unknown")],
            "to_memory": Annotated[str | None, doc("The same at the other end")],
        },
        **_BYTES,
    ),
]
CommunicationChange = Annotated[
    dict[str, Any],
    _event(
        "Communication of one operation in groups of one name and size",
        {
            "operation": Annotated[str | None, doc("`all_reduce`, `all_gather`, …; null if unknown")],
            "group": Annotated[str, doc("The program's name of the group; empty if unknown")],
            "group_size": Annotated[Count, doc("Number of ranks in the group; 0 if unknown")],
        },
        **_BYTES,
        wait_us=Annotated[Microseconds, doc("Waiting for other ranks per iteration and rank")],
        kernel_us=Annotated[Microseconds, doc("Time of the kernels, with waiting, per iteration and rank")],
    ),
]
OperatorChange = Annotated[
    dict[str, Any],
    _event(
        "Host operators of one name",
        {"name": _NAME},
        device_us=Annotated[Microseconds, doc("Device time that they launched, per iteration and rank")],
    ),
]
RankChange = Annotated[
    dict[str, Any],
    _changes(
        "A rank's mean iteration on both sides.",
        {
            "rank": Annotated[Rank, doc("Global rank")],
            "largest": Annotated[str, doc("The part of `by_cause` that changed most")],
        },
        {"duration_us": Annotated[Microseconds, doc("The mean iteration")]}
        | {part: Annotated[Microseconds, doc("A part of the mean iteration, as in `by_cause`")] for part in BY_CAUSE},
    ),
]
MemoryChange = Annotated[
    dict[str, Any],
    _changes(
        "Memory of one device of a rank on both sides.",
        {"rank": Annotated[Rank, doc("Global rank")], "device": Annotated[int, doc("Number of the device in the process")]},
        {
            "peak_bytes": Annotated[MeanBytes | None, doc("Most memory allocated at a time")],
            "peak_reserved_bytes": Annotated[MeanBytes | None, doc("Most memory reserved at a time; null if unknown")],
            "growth_bytes_per_iteration": Annotated[MeanBytes | None, doc("Median growth per iteration; null if unknown")],
        },
    ),
]


class SiteChange(TypedDict):
    """Memory of one allocation site on both sides. Amounts are means over ranks and devices."""

    site: Annotated[str, doc("The allocation site")]
    before_bytes_at_peak: Annotated[MeanBytes, doc("At the device's peak: before")]
    after_bytes_at_peak: Annotated[MeanBytes, doc("At the device's peak: after")]
    change_bytes_at_peak: Annotated[MeanBytes, doc("At the device's peak: the change")]
    before_end_bytes: Annotated[MeanBytes, doc("At the end: before")]
    after_end_bytes: Annotated[MeanBytes, doc("At the end: after")]
    change_end_bytes: Annotated[MeanBytes, doc("At the end: the change")]
    before_allocations: Annotated[float, doc("Number of allocations before")]
    after_allocations: Annotated[float, doc("Number of allocations after")]


class ShortFinding(TypedDict):
    """A finding of one side only."""

    id: Annotated[str, doc("Stable name, such as `data_loading`. Releases may add findings")]
    title: Annotated[str, doc("One sentence with the most important number")]
    ranks: Annotated[list[Rank], doc("The responsible ranks")]
    confidence: Annotated[Confidence, doc("How certain the finding is")]


class ComparisonDocument(TypedDict):
    """What changed from one side to another, as `bridge-profiling compare BASE OTHER --json` prints it."""

    schema_version: Annotated[Literal[1], doc("Keys may be added; within a version none changes its meaning")]
    base: Annotated[list[str], doc("Paths of the runs compared with")]
    other: Annotated[list[str], doc("Paths of the runs compared")]
    same_work: Annotated[bool, doc("Whether no difference concerns `work`")]
    differences: Annotated[list[Difference], doc("Differences of work and conditions, the most serious first")]
    step: Annotated[StepChange | None, doc("Change of the median iteration, from the better evidence; null without iterations")]
    profiled_step: Annotated[Change | None, doc("Change of the captures' median iteration, which the parts split")]
    by_cause: Annotated[
        dict[PartKey, Change],
        doc("By cause: the parts, and `outlying_iterations_us`, add up to `profiled_step`; empty without iterations"),
    ]
    by_activity: Annotated[dict[PartKey, Change], doc("The same by activity: compute, exposed communication, copying, idle")]
    ranks: Annotated[list[RankChange], doc("By rank, the largest change first; empty without iterations")]
    communication: Annotated[list[CommunicationChange], doc("Communication; times are of the transfers")]
    kernels: Annotated[list[KernelChange], doc("Kernels; the time of one that communicates contains waiting")]
    copies: Annotated[list[CopyChange], doc("Copies and memsets")]
    operators: Annotated[list[OperatorChange], doc("Host operators; times are their own")]
    memory: Annotated[list[MemoryChange], doc("Memory by rank and device; empty unless both sides record it")]
    memory_sites: Annotated[list[SiteChange], doc("Changes of 1 MiB or more by allocation site")]
    findings_came: Annotated[list[ShortFinding], doc("Findings of the other side only")]
    findings_went: Annotated[list[ShortFinding], doc("Findings of the base only")]
    limitations: Annotated[list[str], doc("Sentences; those about one side begin with it")]


class Median(TypedDict):
    """An estimate with its confidence interval, in microseconds."""

    value: Annotated[Microseconds, doc("The estimate")]
    low: Annotated[Microseconds | None, doc("Lower bound; null if unknown")]
    high: Annotated[Microseconds | None, doc("Upper bound; null if unknown")]


class Explanation(TypedDict):
    """The part of an iteration that changed most in the direction of the whole."""

    part: Annotated[str, doc("Its key in `by_cause` of a comparison of the two runs")]
    change_us: Annotated[Microseconds, doc("Its change")]
    significant: Annotated[bool | None, doc("Whether that is more than chance; null if unknown")]


class Against(TypedDict):
    """A run compared with an earlier one."""

    step: Annotated[StepChange | None, doc("Change of the median iteration; null without iterations")]
    same_work: Annotated[bool, doc("Whether no difference concerns `work`")]
    differences: Annotated[list[Difference], doc("Differences of work and conditions, the most serious first")]
    explains_most: Annotated[Explanation | None, doc("What changed most; null if the parts are unknown")]
    undecided: Annotated[str | None, doc("Why no limit can be judged; null if one can")]


class Spread(TypedDict):
    """How much values differ, in the unit of the key."""

    n: Annotated[Count, doc("Number of values")]
    mean: Annotated[float, doc("Mean")]
    std: Annotated[float | None, doc("Standard deviation of a sample; null for one value")]
    min: Annotated[float, doc("Lowest")]
    max: Annotated[float, doc("Highest")]


class OneOfSeries(TypedDict):
    """One run among several."""

    name: Annotated[str, doc("Path of the run")]
    captured_unix_ns: Annotated[Nanoseconds | None, doc("Nanoseconds since 1970; null without manifests")]
    step_us: Annotated[Median | None, doc("Median iteration; null without iterations")]
    samples: Annotated[Count, doc("Iterations that the median is of")]
    spread_us: Annotated[Spread | None, doc("How much these iterations differ; null without iterations")]
    parts: Annotated[dict[PartKey, Microseconds], doc("Parts of the mean captured iteration, and its `duration_us`")]
    peak_bytes: Annotated[Bytes | None, doc("Peak of the device with the most allocated memory; null if not recorded")]
    against_first: Annotated[Against | None, doc("Compared with the first run; null for the first")]
    against_previous: Annotated[Against | None, doc("Compared with the previous run; null for the first")]


class SeriesDocument(TypedDict):
    """Three or more runs in order, as `bridge-profiling compare BASE OTHER MORE... --json` prints them."""

    schema_version: Annotated[Literal[1], doc("Keys may be added; within a version none changes its meaning")]
    evidence: Annotated[Literal["unprofiled", "profiled"], doc("Which iterations all medians are of")]
    level: Annotated[Share, doc("Probability with which bounds hold a value")]
    runs: Annotated[list[OneOfSeries], doc("The runs in order")]
    over_runs_us: Annotated[Spread | None, doc("How much their median iterations differ; null without iterations")]
    trend_us_per_run: Annotated[Median | None, doc("Change of the median iteration per run; null if none is supported")]
    no_trend: Annotated[str | None, doc("Why no trend is supported; null otherwise")]
    limitations: Annotated[list[str], doc("Sentences; those about one run begin with it")]
