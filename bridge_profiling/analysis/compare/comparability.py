"""Whether two sides did the same work under the same conditions: what differs, and what that means for comparing them.

From what captures and manifests say: layout, devices, versions, profiler and its options, window, work of an iteration, shapes
of matrix products, bytes communicated. What neither side says is not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge_profiling.analysis.caveats import name_ranks
from bridge_profiling.analysis.compare.events import Sides
from bridge_profiling.analysis.compare.steps import RunSteps
from bridge_profiling.analysis.run import Run
from bridge_profiling.manifest import RankCapture
from bridge_profiling.traces.types import RankInfo

#: What a difference concerns, the gravest first.
WORK, CONDITIONS, MEASUREMENT = "work", "conditions", "measurement"

#: Names and shapes shown of those that differ.
_SHOWN = 4

#: Amounts of an iteration that differ by less are the same: a flag now and then is no other work.
_SAME = 0.01

#: Operators whose shapes are those of the model.
_PRODUCTS = re.compile(
    r"^aten::(?:mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|convolution|_flash_attention_forward|_efficient_attention_forward|"
    r"_scaled_dot_product_\w+|_cudnn_attention_forward)$"
)

#: How Megatron and torch call the groups whose sizes are the layout.
_GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
}

#: Settings of a profile that say where and when, not how.
_PLACES = (
    "profile_step_start",
    "profile_step_end",
    "profile_ranks",
    "output_dir",
    "memory_snapshot_path",
    "nsys_export_sqlite",
    "peak_tflops",
)


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on both sides.

    Args:
        topic: what: "layout", "torch".
        concerns: `work` (other work is timed), `conditions` (the same work elsewhere or with other software) or `measurement`
            (what the profiler adds differs).
        base: how it is there.
        other: how it is there.
        means: what follows for the comparison.
    """

    topic: str
    concerns: str
    base: str
    other: str
    means: str


_MEANS_WORK = "an iteration is not the same work: its duration may change for that reason alone"
_MEANS_SPREAD = "the same work is spread over other ranks: compare the whole job's throughput, not a rank's time"
_MEANS_CONDITIONS = "may be the cause of a change, and need not be what was meant to be compared"
_MEANS_PROFILER = "profilers cost different amounts: trust iterations outside the window, and device times, before host times"
_MEANS_WINDOW = "iterations of other ages are compared: caches, learning-rate warm-up and data may differ"
_MEANS_RANKS = "only ranks that both sides captured are compared"
_MEANS_PARTIAL = "an incomplete capture may lack iterations and events"


def differences(
    base: Sequence[Run],
    other: Sequence[Run],
    steps: tuple[Sequence[RunSteps | None], Sequence[RunSteps | None]],
    communication: tuple[Sides, Sides],
) -> list[Difference]:
    """What differs, the gravest first: work, then conditions, then measurement.

    Args:
        base: the runs of one side.
        other: the runs of the other.
        steps: the iterations of each run that are compared.
        communication: `compare_events.communication_sides` of each.
    """
    infos = [_infos(side) for side in (base, other)]
    manifests = [[capture for run in side for capture in run.manifests] for side in (base, other)]
    found = [
        _differs("ranks of the job", WORK, [_one_of(_world_size, each) for each in infos], _MEANS_SPREAD),
        _differs("layout", WORK, [_layout(each) for each in infos], _MEANS_SPREAD),
        *_work_of_manifests(manifests),
        _products(base, other),
        *_bytes_communicated(*communication),
        _differs("ranks captured", MEASUREMENT, [_captured(each) for each in infos], _MEANS_RANKS),
        _differs("devices", CONDITIONS, [_devices(each) for each in infos], _MEANS_CONDITIONS),
        *_versions(infos),
        _differs("hosts", CONDITIONS, [_hosts(each) for each in infos], _MEANS_CONDITIONS),
        _differs("profiler", MEASUREMENT, [_sources(each) for each in infos], _MEANS_PROFILER),
        *_options(manifests),
        _differs("iterations", MEASUREMENT, [_iterations(side) for side in steps], _MEANS_WINDOW),
        _differs("completeness", MEASUREMENT, [_partial(each) for each in infos], _MEANS_PARTIAL),
    ]
    order = (WORK, CONDITIONS, MEASUREMENT)
    return sorted((each for each in found if each is not None), key=lambda each: order.index(each.concerns))


def _differs(topic: str, concerns: str, sides: Sequence[str | None], means: str) -> Difference | None:
    """A difference between two texts, unless a side does not say."""
    base, other = sides
    return None if base is None or other is None or base == other else Difference(topic, concerns, base, other, means)


def _infos(side: Sequence[Run]) -> list[RankInfo]:
    return [info for run in side for info in run.infos]


def _one_of(what: Callable[[RankInfo], str | None], infos: Sequence[RankInfo]) -> str | None:
    found = sorted({text for info in infos if (text := what(info)) is not None})
    return ", ".join(found) or None


def _world_size(info: RankInfo) -> str | None:
    return None if info.world_size is None else str(info.world_size)


def _layout(infos: Sequence[RankInfo]) -> str | None:
    """Parallel sizes as the manifests, else the process groups, give them: "tp=2 pp=1 dp=2"."""
    for info in infos:
        if info.coordinates:
            sizes = {name: size for name, (_, size) in info.coordinates.items()}
        else:
            sizes = {_GROUPS[group.description]: len(group.ranks) for group in info.groups if group.description in _GROUPS}
        if sizes:
            return " ".join(f"{name}={sizes[name]}" for name in sorted(sizes, key=lambda name: (len(name), name)))
    return None


def _captured(infos: Sequence[RankInfo]) -> str | None:
    return name_ranks([info.rank for info in infos]) if infos else None


def _devices(infos: Sequence[RankInfo]) -> str | None:
    return ", ".join(sorted({name for info in infos for name in info.devices.values()})) or None


def _hosts(infos: Sequence[RankInfo]) -> str | None:
    return _one_of(lambda info: info.host, infos)


def _sources(infos: Sequence[RankInfo]) -> str | None:
    return _one_of(lambda info: info.source, infos)


def _partial(infos: Sequence[RankInfo]) -> str | None:
    cut = [info.rank for info in infos if info.partial or info.error]
    return f"{name_ranks(cut)} incomplete" if cut else "complete"


def _versions(infos: Sequence[Sequence[RankInfo]]) -> list[Difference | None]:
    sides = [{name: version for info in side for name, version in info.versions.items()} for side in infos]
    return [
        _differs(name, CONDITIONS, [side[name] for side in sides], _MEANS_CONDITIONS)
        for name in sorted(sides[0].keys() & sides[1].keys())
    ]


def _options(manifests: Sequence[Sequence[RankCapture]]) -> list[Difference | None]:
    """Options of the profilers as the manifests' configs have them."""
    configs: list[Mapping[str, Any]] = [side[0].manifest.config if side else {} for side in manifests]
    return [
        _differs(name, MEASUREMENT, [str(config[name]) for config in configs], _MEANS_PROFILER)
        for name in sorted(configs[0].keys() & configs[1].keys())
        if name not in _PLACES
    ]


def _work_of_manifests(manifests: Sequence[Sequence[RankCapture]]) -> list[Difference | None]:
    """What the training says that one iteration computes."""
    found = [side[0].manifest.work if side else None for side in manifests]
    works = [vars(work) if work is not None else {} for work in found]
    words = {"tokens": "tokens of an iteration", "model_flops": "model FLOPs of an iteration", "precision": "precision"}
    return [
        _differs(words[name], WORK, [_number(work[name]) for work in works], _MEANS_WORK)
        for name in words
        if all(work.get(name) is not None for work in works)
    ]


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _iterations(side: Sequence[RunSteps | None]) -> str | None:
    numbers = [steps.iterations for steps in side if steps is not None]
    if not numbers:
        return None
    return "; ".join(dict.fromkeys(name_ranks(each).removeprefix("ranks ").removeprefix("rank ") for each in numbers))


def _products(base: Sequence[Run], other: Sequence[Run]) -> Difference | None:
    """Matrix products and attention by their inputs' shapes, per iteration and rank, where shapes were recorded."""
    first, second = _shapes(base), _shapes(other)
    if not first or not second:
        return None
    apart = sorted(key for key in first.keys() | second.keys() if not _alike(first.get(key, 0.0), second.get(key, 0.0)))
    if not apart:
        return None
    ratios = {round(second[key] / first[key], 2) for key in first.keys() & second.keys()}
    if first.keys() == second.keys() and len(ratios) == 1:
        factor = ratios.pop()
        means = f"the same shapes {factor:g} times as often: other numbers of micro-batches or of layers; {_MEANS_WORK}"
    else:
        means = _MEANS_WORK
    return Difference("shapes of matrix products", WORK, _some(apart, first), _some(apart, second), means)


def _shapes(side: Sequence[Run]) -> dict[str, float]:
    found: dict[str, float] = {}
    for run in side:
        table = run.operators(shapes=True)
        iterations = len(set(run.iterations()["iteration"].to_pylist())) if run.iterations().num_rows else 1
        amount = iterations * max(len({info.rank for info in run.infos}), 1) * len(side)
        for row in table.to_pylist() if table.num_rows else []:
            if row["shapes"] and _PRODUCTS.match(row["name"]):
                key = f"{row['name'].removeprefix('aten::')} {row['shapes']}"
                found[key] = found.get(key, 0.0) + row["count"] / amount
    return found


def _some(keys: Sequence[str], counts: Mapping[str, float]) -> str:
    shown = ", ".join(f"{counts.get(key, 0):g} × {key}" for key in keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more kinds" if len(keys) > _SHOWN else shown


def _bytes_communicated(base: Sides, other: Sides) -> list[Difference]:
    """Bytes of each operation of each group; in how many messages they go is not the work, but its organisation."""
    sides = [
        {key: side.extra["bytes"] for key, side in each.items() if side.extra.get("bytes") and key[1]} for each in (base, other)
    ]
    if not all(sides):
        return []
    apart = [key for key in sorted(sides[0].keys() | sides[1].keys()) if not _alike(*(side.get(key, 0.0) for side in sides))]
    found = []
    for operation, group, members in apart:
        base_text, other_text = (
            f"{side.get((operation, group, members), 0.0) / 1e6:.1f} MB an iteration and rank" for side in sides
        )
        means = "other tensors are communicated, or the same ones more or less often"
        found.append(Difference(f"bytes of {operation}, {group} of {members}", WORK, base_text, other_text, means))
    return found


def _alike(first: float, second: float) -> bool:
    return abs(first - second) <= _SAME * max(first, second)
