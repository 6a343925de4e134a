"""What is known of a training besides its times: ranks, layout and devices, and what an integration measured.

Integrations write it into the manifests: sizes of the model and its data, memory of phases, and DeepSpeed's timers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, TypeVar

from bridge_profiling.common.typed_json import read_typed
from bridge_profiling.compare.comparability import parallel_sizes
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.words import written
from bridge_profiling.manifest import RankCapture
from bridge_profiling.report.figures import SIZES
from bridge_profiling.report.rows import Rows
from bridge_profiling.traces.types import RankInfo

#: DeepSpeed's timers of the forward pass, the engine's first.
_FORWARD = ("fwd", "forward", "fwd_microstep")

Measured = TypeVar("Measured")


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


@dataclass
class FlopsProfile:
    """`framework.flops_profiler.result`: what DeepSpeed's FLOPs profiler counted in one forward pass of a rank."""

    iteration: int
    forward_flops: int
    parameters: int
    timers_ms: dict[str, float] = field(default_factory=dict)


def training(manifests: Iterable[RankCapture]) -> list[dict[str, Any]]:
    """Sizes of each rank's model and data, as its integration reports them; ranks that report none are left out."""
    rows = []
    for capture in manifests:
        facts = capture.manifest.framework or {}
        known = {name: facts.get(name, facts.get(f"{name}_steps")) for name in SIZES}  # DeepSpeed's name
        sizes = {name: size if type(size) is int and 0 <= size < 1 << 53 else None for name, size in known.items()}
        if any(size is not None for size in sizes.values()):
            rows.append({"rank": capture.rank, **sizes})
    return rows


def flops_profile(manifests: Iterable[RankCapture]) -> list[dict[str, Any]]:
    """DeepSpeed's FLOPs profile: operations of a forward pass, and its speed where the engine timed that pass."""
    rows = []
    for capture, found in _measured(manifests, FlopsProfile, "flops_profiler", "result"):
        forward_ms, flops = next(filter(None, map(found.timers_ms.get, _FORWARD)), None), found.forward_flops
        known = {"iteration": found.iteration, "forward_flops": flops, "parameters": found.parameters}
        timed = {"forward_ns": forward_ms and forward_ms * 1e6, "tflops": forward_ms and flops / forward_ms / 1e9}
        rows.append({"rank": capture.rank, **known, **timed})
    return rows


def phase_memory(manifests: Iterable[RankCapture]) -> list[dict[str, Any]]:
    """Device memory of each rank's phases: means before and after, and the highest peak."""
    rows = []
    for capture, found in _measured(manifests, PhaseMemory, "phase_memory"):
        for phase in dict.fromkeys(found.phase):
            columns = (found.before_bytes, found.after_bytes, found.peak_bytes)
            mine = [row for name, *row in zip(found.phase, *columns, strict=False) if name == phase]
            before, after, peak = zip(*mine, strict=True)
            known = {"before_bytes": fmean(before), "after_bytes": fmean(after), "peak_bytes": max(peak)}
            rows.append({"rank": capture.rank, "phase": phase, "count": len(mine), **known})
    return rows


def wall_clock(manifests: Iterable[RankCapture]) -> list[dict[str, Any]]:
    """DeepSpeed's wall-clock breakdown: mean, deviation and share of the captured iterations."""
    rows = []
    for capture, timers_ms in _measured(manifests, dict[str, list[float]], "wall_clock_breakdown", "timers_ms"):
        iterations_ns = capture.durations_ns(profiled=True)
        for name, values_ms in timers_ms.items():
            if values_ms:
                mean_ns = fmean(values_ms) * 1e6
                share = mean_ns / fmean(iterations_ns) if iterations_ns else None
                known: dict[str, Any] = {"mean_ns": mean_ns, "deviation_ns": pstdev(values_ms) * 1e6, "share": share}
                rows.append({"rank": capture.rank, "timer": name, **known})
    return rows


def _measured(manifests: Iterable[RankCapture], kind: type[Measured], *keys: str) -> Iterator[tuple[RankCapture, Measured]]:
    """What each rank measured, by its keys; ranks without it, or where it is not as we write it, are left out."""
    for capture in manifests:
        content: Any = capture.manifest.framework
        for key in keys:
            content = content.get(key) if isinstance(content, dict) else None
        try:
            yield capture, read_typed(content, kind, keys[-1])
        except ValueError:
            continue


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
