"""What is known of a training besides its times: ranks, layout and devices, and what an integration measured.

Integrations write it into the manifests: sizes of the model and its data, and memory of phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bridge_profiling.common.typed_json import read_typed
from bridge_profiling.compare.comparability import parallel_sizes
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.words import written
from bridge_profiling.manifest import RankCapture
from bridge_profiling.report.figures import SIZES
from bridge_profiling.report.rows import Rows
from bridge_profiling.traces.types import RankInfo


@dataclass
class PhaseMemory:
    """`framework.phase_memory`: a row for each phase of each captured iteration."""

    phase: list[str]
    before_bytes: list[int]
    after_bytes: list[int]
    peak_bytes: list[int]

    def __post_init__(self) -> None:
        if len({len(self.phase), len(self.before_bytes), len(self.after_bytes), len(self.peak_bytes)}) > 1:
            raise ValueError("its columns have different lengths")


def training(manifests: Iterable[RankCapture]) -> list[dict[str, Any]]:
    """Sizes of each rank's model and data, as its integration reports them; ranks that report none are left out."""
    rows = []
    for capture in manifests:
        facts = capture.manifest.framework or {}
        known = {name: facts.get(name) for name in SIZES}
        sizes = {name: size if type(size) is int and 0 <= size < 1 << 53 else None for name, size in known.items()}
        if any(size is not None for size in sizes.values()):
            rows.append({"rank": capture.rank, **sizes})
    return rows


def phase_memory(manifests: Iterable[RankCapture]) -> list[dict[str, Any]]:
    """Device memory of each rank's phases: means before and after, and the highest peak."""
    rows = []
    for capture in manifests:
        try:
            found = read_typed((capture.manifest.framework or {}).get("phase_memory"), PhaseMemory, "phase_memory")
        except ValueError:
            continue  # not measured, or not as we write it
        for phase in dict.fromkeys(found.phase):
            columns = (found.before_bytes, found.after_bytes, found.peak_bytes)
            mine = [row for name, *row in zip(found.phase, *columns, strict=False) if name == phase]
            before, after, peak = zip(*mine, strict=True)
            known = {"before_bytes": fmean(before), "after_bytes": fmean(after), "peak_bytes": max(peak)}
            rows.append({"rank": capture.rank, "phase": phase, "count": len(mine), **known})
    return rows


def capture_facts(facts: RunFacts, iterations: Rows, memory: Rows) -> list[tuple[str, str]]:
    """What was captured, from rows of `RunFacts.iterations` and `RunFacts.memory`."""
    infos = facts.infos
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
        "captured by": {"kineto": "torch.profiler", "nsys": "nsys"}.get(facts.source, ""),
        "captured at": written("date", first) if first else "",
    }
    if not infos:
        found = {"ranks": str(len({row["rank"] for row in memory})), "captured by": "memory snapshot"}
    return [pair for pair in found.items() if pair[1]]


#: Integrations whose ranks count the parameters of their own part of the model.
_SHARDED = ("megatron-bridge", "recipe")


def training_facts(facts: RunFacts) -> list[tuple[str, str]]:
    """Sizes of the first rank's model and data. Megatron's ranks hold parts of the model, and each counts its own."""
    sizes = next(iter(training(facts.manifests)), {})
    parts = any((each.manifest.framework or {}).get("name") in _SHARDED for each in facts.manifests)
    part = f" of rank {sizes['rank']}" if parts and sizes else ""
    if sizes.get("trainable_parameters") == sizes.get("parameters"):
        sizes = {name: size for name, size in sizes.items() if name != "trainable_parameters"}
    named = {name: word + part * name.endswith("parameters") for name, word in SIZES.items()}
    return [(word, f"{sizes[name]:,}") for name, word in named.items() if sizes.get(name) is not None]


def _layout(infos: Sequence[RankInfo]) -> str:
    known = [info for info in infos if info.coordinates]
    sizes = next(map(parallel_sizes, known or infos), {})
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or ("one rank per group" if known else "")
