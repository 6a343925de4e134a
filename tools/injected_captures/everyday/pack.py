"""Packs what `make.py` left as the repository keeps it: a file for each group, with a table of what was measured.

    python tools/injected_captures/everyday/pack.py WHOLE tests/everyday --round 2

Traces lose arguments that no reader reads, names of tracks and flow arrows. They keep every host event, because the profiler's
cost is estimated from their number.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from tools.injected_captures import lean, pack
from tools.injected_captures.everyday import columns
from tools.injected_captures.everyday.setting import BEFORE, Case, Group
from tools.injected_captures.everyday.table import FOR_DEVELOPMENT, GROUPS, ROUNDS, SET_ASIDE_WHOLE

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

_PACKING = {".gz": gzip.decompress, ".xz": lzma.decompress}

#: Which of the iterations that a plant strikes now and then these are, modulo their distance.
PHASES = {
    "GarbageCollection": 1, "Checkpoint": 2, "PartialBatches": 4, "SavedOptimizer": 2, "Evaluation": 2, "ChangingNumber": 4,
    "AspectBuckets": 4, "WholeState": 2, "DropRate": 4, "LocalShards": 2,
}  # fmt: skip

#: What a capture shows only by stacks or by ranges of our hook.
_GARBAGE = ("GarbageCollection", "Objects")

#: Groups whose baseline is kept as both recorders captured it; the others keep that of their own recorder.
_BOTH_RECORDERS = ("convolution_1", "gpt_ddp", "experts_2", "sharded")

#: Captures, and groups of them, that are not kept. Of the second round, for size: causes whose measured gain is less than 2%
#: of the iteration or lost in the spread of the blocks, and a baseline of one. Of the third: causes whose gain is less than
#: 2%, or whose blocks overlap with those of the baseline, and what was meant to be harmless and costs 2% or more; and, for
#: size, two of the group that takes most: a cause that another group has too, and a variant without a cause. Of the fourth:
#: causes that the blocks do not show, and the largest traces, which did not come back from the machine. All of these were
#: chosen before any finding on them was seen. Not so three groups of the fourth round, the largest ones, which were analyzed
#: once and are left out for size.
LEFT_OUT = frozenset({
    "llama_sharded_sync", "llama_sharded_busy", "llama_sharded_lengths", "llama_1_tight", "llama_1_lengths",
    "encoder_ddp_sync", "vision_ddp_buckets",
    "diffusion_1_guard", "translate_sharded_lion", "contrast_2_norms", "routed_2_pageable", "routed_2_reads",
    "gpt_sharded_busy", "gpt_sharded_extra", "llama_ddp_average", "routed_ddp_buckets", "vision_1_cache",
    "compiled_3_item", "compiled_3_loop", "compiled_3_shapes", "graph_2_written", "vision_1_tiny",
    "translate_1", "diffusion_ddp", "gpt_sharded",
})  # fmt: skip


def pack_group(job: tuple[str, Path, Path]) -> tuple[str, int, dict[str, float]]:
    """Pack one group; returns its name, the bytes of its file, and each capture's `busy_ms` of an iteration."""
    name, whole, target = job
    group = GROUPS[name]
    neutral = pack.Neutral.of(json.loads((whole / "names.json").read_text(encoding="utf-8")))
    traces, manifests = {}, {}
    for kept in _kept(group):
        folder = whole / name / kept
        for path in sorted(path for path in folder.rglob("*.json.*z") if path.suffix in _PACKING):
            raw = _PACKING[path.suffix](path.read_bytes())
            small = lean.lean(raw, ".json", neutral)
            if told := pack.TELLING.search(small.decode("utf-8", "replace")):
                raise ValueError(f"{path} names what is of one machine: {told[0]!r}")
            traces[f"{kept}/{path.relative_to(folder).with_suffix('')}"] = json.loads(small)
        for path in sorted(folder.rglob("manifest/*/rank-*.json")):
            manifests[f"{kept}/{path.relative_to(folder)}"] = _manifest(path, neutral)
    data = columns.encode(traces)
    (target / f"{name}.columns").write_bytes(data)
    (target / f"{name}.manifests.json").write_text(json.dumps(manifests, separators=(",", ":")) + "\n", encoding="utf-8")
    if not manifests:
        (target / f"{name}.manifests.json").unlink()
    busy: dict[str, list[float]] = {}
    for path, trace in traces.items():
        busy.setdefault(path.partition("/")[0], []).append(busy_ms(trace) / group.iterations)
    return name, len(data), {capture: mean(each) for capture, each in busy.items()}


def busy_ms(trace: dict[str, Any]) -> float:
    """Milliseconds in which the device of a trace computes or copies; communication aside, which waits for others."""
    events = [event for event in trace["traceEvents"] if event.get("cat") in _WORK and "nccl" not in event["name"]]
    busy_us = end = 0.0
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        busy_us += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy_us / 1e3


def _kept(group: Group) -> list[str]:
    own = group.recorder.replace(".", "_")
    recorders = ("hook", "torch_profiler") if group.name in _BOTH_RECORDERS else (own,)
    cases = [case.name for case in group.cases if case.name not in LEFT_OUT]
    return [*(f"{group.name}_{recorder}" for recorder in recorders), *cases]


def _manifest(path: Path, neutral: pack.Neutral) -> dict[str, Any]:
    manifest = json.loads(neutral(path.read_text(encoding="utf-8")))
    manifest["host"] = "node-0"
    for profiler in manifest["profilers"]:
        profiler["artifacts"] = [
            artifact | {"path": artifact["path"].removesuffix(".gz")}
            for artifact in profiler["artifacts"]
            if artifact["path"].endswith(".trace.json.gz")
        ]
    return manifest


def describe(whole: Path, number: int, busy: dict[str, float]) -> list[dict[str, Any]]:
    """The table of captures: what was injected, where, what must be found, and the measured iterations.

    Args:
        whole: where the archives of `make.py` are unpacked.
        number: of the round.
        busy: for each capture, how long devices are busy in an iteration.
    """
    rows = []
    for group in _made(whole, number):
        measured = json.loads((whole / group.name / "measured-rank-0.json").read_text(encoding="utf-8"))
        own = [case.name for case in group.cases if case.over is None]
        blocks = [ms for case in own for ms in measured[case]["blocks_ms"]["baseline"]]
        for name in _kept(group):
            case = next((case for case in group.cases if case.name == name), None)
            row = _row(group, name, case, measured, blocks) | ({"round": number} if number > 1 else {})
            if not row["findings"]:
                row["busy_share"] = round(busy[name] / row["unprofiled_ms"]["median"], 2)
            if number in SET_ASIDE_WHOLE:
                row["set_aside"] = True
            rows.append(row)
    return rows


def _made(whole: Path, number: int) -> list[Group]:
    """Groups of a round that were captured, and are kept: a run that was cut short leaves some out."""
    made = [group for group in ROUNDS[number] if (whole / group.name / "measured-rank-0.json").is_file()]
    return [group for group in made if group.name not in LEFT_OUT]


def _row(group: Group, name: str, case: Case | None, measured: dict[str, Any], blocks: list[float]) -> dict[str, Any]:
    setting = group.setting
    row: dict[str, Any] = {
        "name": name,
        "group": group.name,
        "model": setting.model,
        "strategy": setting.strategy,
        "compiled": setting.compiled,
        "world_size": setting.ranks,
        "recorder": group.recorder if case else ("hook" if name.endswith("_hook") else "torch.profiler"),
        "record": group.record | (case.record if case else {}),
    }
    if case is None:
        return row | {"findings": [], "ranks": [], "unprofiled_ms": _summary(blocks)}
    found = measured[name]["blocks_ms"]
    row |= {"findings": list(case.findings), "ranks": list(case.ranks), "unprofiled_ms": _summary(found["injected"])}
    if case.findings:
        row |= {
            "set_aside": name not in FOR_DEVELOPMENT,
            "cause": {"setting": case.change, "code": case.plant, "numbers": case.numbers},
            "baseline": case.over or f"{group.name}_{group.recorder.replace('.', '_')}",
            "baseline_unprofiled_ms": _summary(found["baseline"]),
            "comparable": case.comparable,
        }
        if case.plant in _GARBAGE and row["recorder"] == "torch.profiler" and not row["record"].get("with_stack"):
            row["pause_alone"] = True
        if (every := case.numbers.get("every", 1)) > 1:
            first = BEFORE[group.recorder]
            struck = sum(iteration % every == PHASES[case.plant] for iteration in range(first, first + group.iterations))
            row["strikes"] = {"every": every, "in_window": struck, "of": group.iterations}
    return row


def _summary(blocks: list[float]) -> dict[str, float]:
    """Milliseconds of an iteration: the median of blocks of nine, and the fastest and the slowest block."""
    return {"median": round(median(blocks), 2), "lowest": round(min(blocks), 2), "highest": round(max(blocks), 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("whole", type=Path, help="where the archives of make.py are unpacked")
    parser.add_argument("target", type=Path)
    parser.add_argument("--round", type=int, default=1, choices=ROUNDS)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.target.mkdir(parents=True, exist_ok=True)
    jobs = [(group.name, options.whole, options.target) for group in _made(options.whole, options.round)]
    busy: dict[str, float] = {}
    with ProcessPoolExecutor(options.workers) as workers:
        for name, size, of_group in workers.map(pack_group, jobs):
            busy |= of_group
            print(name, size, flush=True)
    path = options.target / "cases.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"machines": {}, "captures": []}
    machines = known["machines"] | {str(options.round): json.loads((options.whole / "machine.json").read_text("utf-8"))}
    others = [row for row in known["captures"] if row.get("round", 1) != options.round]
    rows = ",\n".join(json.dumps(row) for row in [*others, *describe(options.whole, options.round, busy)])
    path.write_text(f'{{"machines": {json.dumps(machines)},\n"captures": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
