"""Whether two sides did the same work under the same conditions: the differences, and their meaning for a comparison.

From captures and manifests: layout, devices, versions, profiler and its options, window, work per iteration, shapes of matrix
products, bytes communicated. A property that one side does not record is not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bridge_profiling.compare.events import Events
from bridge_profiling.compare.steps import Comparable, Side, captured_iterations, unprofiled_ns
from bridge_profiling.layout import name_ranks, number_ranges
from bridge_profiling.manifest import RankCapture
from bridge_profiling.traces.types import RankInfo, filled, texts

_text = partial(filled, __package__, "text.toml")

#: Kinds of differences, the most serious first.
WORK, CONDITIONS, MEASUREMENT = "work", "conditions", "measurement"

#: Most different shapes shown.
_SHOWN = 4

#: Amounts per iteration that differ by less are equal: an occasional flag is not different work.
_SAME = 0.01

#: Operators whose shapes are those of the model.
_PRODUCTS = re.compile(
    r"^aten::(?:mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|convolution|_flash_attention_forward|_efficient_attention_forward|"
    r"_scaled_dot_product_\w+|_cudnn_attention_forward)$"
)

#: Dimensions by the names of groups, settings that do not change a profile's cost, and topics of what a training reports.
_GROUPS, _PLACES, _WORDS = (texts(__package__, "text.toml")[name] for name in ("groups", "places", "reported"))


@dataclass(frozen=True)
class Difference:
    """Something that differs between the sides.

    Args:
        topic: "layout", "torch".
        concerns: `work` (different work is timed), `conditions` (the same work elsewhere or with other software) or
            `measurement` (the profiler's cost differs).
        base: value of the base.
        other: value of the other side.
        means: consequence for the comparison.
    """

    topic: str
    concerns: str
    base: str
    other: str
    means: str


def differences(base: Side, other: Side, communication: tuple[Events, Events]) -> list[Difference]:
    """All differences, the most serious first: work, then conditions, then measurement.

    Args:
        base: runs of one side.
        other: runs of the other side.
        communication: `events_of` each side.
    """
    sides = (base, other)
    infos = [[info for run, _ in side for info in run.facts.every_info] for side in sides]
    manifests = [[capture for run, _ in side for capture in run.facts.manifests] for side in sides]

    def of_infos(topic: str, concerns: str, values: Callable[[RankInfo], Iterable[Any]], means: str) -> Difference | None:
        found = [sorted({str(value) for info in each for value in values(info) if value is not None}) for each in infos]
        return _differs(topic, concerns, [", ".join(each) or None for each in found], means)

    versions = [{name: version for info in side for name, version in info.versions.items()} for side in infos]
    captured = [name_ranks([info.rank for info in each]) if each else None for each in infos]
    found = [
        of_infos("ranks of the job", WORK, lambda info: [info.world_size], "spread"),
        _differs("layout", WORK, [_layout(each) for each in infos], "spread"),
        *_work_of_manifests(manifests),
        _products([run for run, _ in base], [run for run, _ in other]),
        *_bytes_communicated(*communication),
        _differs("ranks captured", MEASUREMENT, captured, "ranks"),
        of_infos("devices", CONDITIONS, lambda info: info.devices.values(), "conditions"),
        *_settings(CONDITIONS, versions, "conditions"),
        of_infos("hosts", CONDITIONS, lambda info: [info.host], "conditions"),
        of_infos("profiler", MEASUREMENT, lambda info: [info.source], "profiler"),
        *_settings(MEASUREMENT, [side[0].manifest.config if side else {} for side in manifests], "profiler"),
        _differs("iterations", MEASUREMENT, [_iterations(side) for side in sides], "window"),
        _differs("completeness", MEASUREMENT, [_completeness(each) for each in infos], "partial"),
    ]
    order = (WORK, CONDITIONS, MEASUREMENT)
    return sorted((each for each in found if each is not None), key=lambda each: order.index(each.concerns))


def _differs(topic: str, concerns: str, sides: Sequence[str | None], means: str) -> Difference | None:
    """A difference between two values, unless one is unknown."""
    base, other = sides
    if base is None or other is None or base == other:
        return None
    return Difference(topic, concerns, base, other, _text("means", means))


def _layout(infos: Sequence[RankInfo]) -> str | None:
    """Parallel sizes of the first rank that knows any: "tp=2 pp=1 dp=2"."""
    sizes = next(filter(None, map(parallel_sizes, infos)), {})
    return " ".join(f"{name}={sizes[name]}" for name in sorted(sizes, key=lambda name: (len(name), name))) or None


def parallel_sizes(info: RankInfo) -> dict[str, int]:
    """The size of each parallel dimension, from the manifest, else from the process groups."""
    if info.coordinates:
        return {name: size for name, (_, size) in info.coordinates.items()}
    named = {group.description: len(group.ranks) for group in info.groups}
    return {dimension: named[group] for group, dimension in _GROUPS.items() if group in named}


def _completeness(infos: Sequence[RankInfo]) -> str:
    cut = [info.rank for info in infos if info.partial or info.error]
    return f"{name_ranks(cut)} incomplete" if cut else "complete"


def _settings(concerns: str, sides: Sequence[Mapping[str, Any]], means: str) -> list[Difference | None]:
    """Differences of the named values that both sides have."""
    names = sorted(sides[0].keys() & sides[1].keys() - set(_PLACES["settings"]))
    return [_differs(name, concerns, [str(side[name]) for side in sides], means) for name in names]


def _work_of_manifests(manifests: Sequence[Sequence[RankCapture]]) -> Iterator[Difference | None]:
    """Differences of the work per iteration as the training reported it."""
    works = [vars(side[0].manifest.work) if side and side[0].manifest.work is not None else {} for side in manifests]
    for name, topic in _WORDS.items():
        yield _differs(topic, WORK, [None if work.get(name) is None else _number(work[name]) for work in works], "work")


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _iterations(side: Side) -> str | None:
    numbers = dict.fromkeys(number_ranges(steps.iterations) for _, steps in side if steps is not None)
    return "; ".join(numbers) or None


def _products(base: Sequence[Comparable], other: Sequence[Comparable]) -> Difference | None:
    """Matrix products and attention by shapes of their inputs, per iteration and rank, if shapes were recorded."""
    first, second = _shapes(base), _shapes(other)
    if not first or not second:
        return None
    apart = sorted(key for key in first.keys() | second.keys() if not _alike(first.get(key, 0.0), second.get(key, 0.0)))
    if not apart:
        return None
    ratios = {round(second[key] / first[key], 2) for key in first.keys() & second.keys()}
    if first.keys() == second.keys() and len(ratios) == 1:
        means = _text("means", "repeated", factor=ratios.pop())
    else:
        means = _text("means", "work")
    return Difference("shapes of matrix products", WORK, _some(apart, first), _some(apart, second), means)


def _shapes(side: Sequence[Comparable]) -> dict[str, float]:
    found: dict[str, float] = {}
    for run in side:
        amount = captured_iterations(run) * max(len({info.rank for info in run.facts.every_info}), 1) * len(side)
        for row in run.facts.operators_by(shapes=True).to_pylist():
            if row["shapes"] and _PRODUCTS.match(row["name"]):
                key = f"{row['name'].removeprefix('aten::')} {row['shapes']}"
                found[key] = found.get(key, 0.0) + row["count"] / amount
    return found


def _some(keys: Sequence[str], counts: Mapping[str, float]) -> str:
    shown = ", ".join(f"{counts.get(key, 0):g} × {key}" for key in keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more kinds" if len(keys) > _SHOWN else shown


def _bytes_communicated(base: Events, other: Events) -> Iterator[Difference]:
    """Bytes of each operation of each group. The number of messages is not compared: it is not work, but its organization."""
    sides = [
        {key: event.amounts["bytes"] for key, event in events.items() if event.amounts["bytes"] and key[1]}
        for events in (base, other)
    ]
    if not all(sides):
        return
    for key in sorted(sides[0].keys() | sides[1].keys()):
        amounts = [side.get(key, 0.0) for side in sides]
        if not _alike(*amounts):
            operation, group, members = key
            first, second = (f"{amount / 1e6:.1f} MB an iteration and rank" for amount in amounts)
            yield Difference(f"bytes of {operation}, {group} of {members}", WORK, first, second, _text("means", "bytes"))


def _alike(first: float, second: float) -> bool:
    return abs(first - second) <= _SAME * max(first, second)


def limitations(sides: Sequence[Side], *, marked: bool, merged: bool) -> list[str]:
    """Caveats of a comparison of two sides.

    Args:
        sides: the base and the other side.
        marked: whether all runs have marked iterations.
        merged: whether waiting counts as communication.
    """
    found = [_text("limitations", case) for case, holds in (("merged", merged), ("unmarked", not marked)) if holds]
    for word, side in zip(("base", "other"), sides, strict=True):
        for run, steps in side:
            if steps is not None and steps.with_boundary:
                found.append(_text("limitations", "boundary", side=word, path=run.facts.path))
            found += [f"{word}: {sentence}" for sentence in run.facts.limitations]
    return list(dict.fromkeys(found))


def limitations_of_series(runs: Side, captured_ns: Sequence[int | None], evidence: str) -> list[str]:
    """Caveats of a series.

    Args:
        runs: in order.
        captured_ns: when each was captured; None if unknown.
        evidence: iterations that are compared, as of `steps.step_change`.
    """
    found = []
    unprofiled = [bool(unprofiled_ns(*run)) for run in runs]
    if evidence == "profiled" and any(unprofiled):
        missing = [str(run.facts.path) for (run, _), known in zip(runs, unprofiled, strict=True) if not known]
        have = "have" if len(missing) > 1 else "has"
        lacking = f"{', '.join(missing)} {have} no iterations" if missing else "not every run has enough iterations"
        found.append(_text("limitations", "without", lacking=lacking))
    captured = [each for each in captured_ns if each is not None]
    if captured != sorted(captured):
        found.append(_text("limitations", "unordered"))
    caveats = [(run.facts.path, run.facts.limitations) for run, _ in runs]
    of_all = [sentence for sentence in caveats[0][1] if all(sentence in each for _, each in caveats)]
    found += [f"all runs: {sentence}" for sentence in of_all]
    return found + [f"{path}: {sentence}" for path, each in caveats for sentence in each if sentence not in of_all]
