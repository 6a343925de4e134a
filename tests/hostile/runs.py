"""Runs of two ranks as a training writes them, with manifests that list the traces."""

import json
from pathlib import Path
from typing import Any

from bridge_profiling import manifest
from tests.traces.kineto_files import steps, write_capture

FOLDER = "iter-0-2"


def trace_of(root: Path, rank: int) -> Path:
    return root / "torch" / FOLDER / f"rank-{rank}.pt.trace.json.gz"


def manifest_of(root: Path, rank: int) -> Path:
    return root / "manifest" / FOLDER / f"rank-{rank}.json"


def write_run(root: Path) -> Path:
    """Two ranks of two iterations."""
    for rank in (0, 1):
        path = write_capture(root, steps(250, 300 + rank), range(2), rank, 2)
        manifest.write_manifest(manifest_of(root, rank), manifest_with_everything(rank, path.relative_to(root)))
    return root


def change_manifest(root: Path, rank: int, /, **changed: Any) -> None:
    """Replace entries of a rank's manifest; `a__b` is the entry `b` of `a`."""
    path = manifest_of(root, rank)
    content = json.loads(path.read_text())
    for name, value in changed.items():
        entry, (*outer, last) = content, name.split("__")
        for each in outer:
            entry = entry[int(each) if isinstance(entry, list) else each]
        entry[last] = value
    path.write_text(json.dumps(content))


def manifest_with_everything(rank: int, trace: Path) -> manifest.Manifest:
    """A manifest that has a value for each of its keys."""
    return manifest.Manifest(
        status="complete",
        window=manifest.Window(0, 2),
        trigger=manifest.Trigger(number=1),
        other_windows=[[20, 22]],
        captured=manifest.Captured(first=0, last=1, iterations=[0, 1]),
        interrupted=[5],
        profilers=[manifest.ProfilerRecord(name="torch", artifacts=[manifest.Artifact(path=str(trace), bytes=1)], notes=["n"])],
        rank=rank,
        world_size=2,
        local_rank=rank,
        coordinates={"dp": [rank, 2]},
        host="node",
        pid=5,
        command=["python", "t.py"],
        config={"profile_ranks": "all"},
        versions={"torch": "2.15.0"},
        framework={"name": "ddp", "phase_memory": {"phase": ["f"], "before_bytes": [1], "after_bytes": [1], "peak_bytes": [1]}},
        work=manifest.Work(model_flops=1e12, tokens=4, devices=2, precision="bf16"),
        durations_ns=manifest.Durations(iteration=list(range(9)), duration_ns=[900_000] * 9, mfu=[0.5] * 9),
        garbage_collection=manifest.GarbageCollection(),
        clock=manifest.Clock(unix_ns=10**18, perf_counter_ns=5),
    )
