"""On every real capture, device times agree with an independent reference, and what must add up does."""

from __future__ import annotations

import gzip
import json
import lzma
import sqlite3
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest

from bridge_profiling.analysis import Run

_DEVICE = (
    "span_us",
    "busy_us",
    "compute_us",
    "communication_us",
    "exposed_communication_us",
    "memcpy_us",
    "memset_us",
    "kernel_count",
    "communication_kernel_count",
)

#: Of the captures' README: milliseconds with one decimal, and kernels.
README = {
    ("kineto/tp2_dp2", 0): (454.0, 371.5, 145.3, 233.8, 221.7, 4.3, 7456),
    ("kineto/tp2_dp2", 1): (455.3, 184.9, 139.8, 40.8, 40.7, 4.2, 7406),
    ("kineto/tp2_dp2", 2): (453.8, 376.8, 144.0, 238.0, 228.1, 4.3, 7456),
    ("kineto/tp2_dp2", 3): (455.3, 208.3, 140.7, 65.5, 63.1, 4.2, 7406),
    ("kineto/plant_straggler", 2): (459.3, 282.5, 195.9, 84.7, 81.7, 4.3, 7776),
    ("kineto/plant_data", 0): (663.0, 164.5, 140.5, 19.7, 19.5, 4.3, 7456),
    ("kineto/pp2_dp2", 0): (227.6, 186.9, 121.2, 61.2, 61.2, 4.2, 3506),
    ("nsys/tp2_dp2", 0): (361.5, 167.8, 141.1, 23.1, 22.1, 4.4, 7456),
}

FOLDERS = (
    "kineto/tp2_dp2",
    "kineto/tp2_dp2_overlap",
    "kineto/pp2_dp2",
    "kineto/plant_data",
    "kineto/plant_straggler",
    "nsys/tp2_dp2",
)


@pytest.fixture(scope="module")
def runs(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every folder, read once; whoever asks for one gets all answers of it."""
    return {folder: Run(captures / folder, parquet=tmp_path_factory.mktemp(folder.replace("/", "-"))) for folder in FOLDERS}


@pytest.mark.parametrize(("folder", "rank"), README)
def test_device_times_are_those_of_the_readme(runs: dict[str, Run], folder: str, rank: int) -> None:
    found = {row["rank"]: row for row in runs[folder].breakdown().to_pylist()}[rank]
    *expected_ms, kernels = README[folder, rank]
    names = ("span_us", "busy_us", "compute_us", "communication_us", "exposed_communication_us", "memcpy_us")
    # Half of the last digit printed, besides the agreement that is asked for.
    assert [found[name] / 1e3 for name in names] == [pytest.approx(value, rel=1e-4, abs=0.0501) for value in expected_ms]
    assert found["kernel_count"] == kernels


@pytest.mark.parametrize("ranks", [(0, 3), pytest.param((1, 2), marks=pytest.mark.system)])
@pytest.mark.parametrize("folder", FOLDERS)
def test_device_times_are_exactly_those_of_a_sweep_over_all_events(
    runs: dict[str, Run], captures: Path, folder: str, ranks: tuple[int, ...]
) -> None:
    """A second reading of each file that shares no code: the standard library's parsers, and a sweep over starts and ends."""
    found = {row["rank"]: row for row in runs[folder].breakdown().to_pylist()}
    assert sorted(found) == [0, 1, 2, 3]
    for rank in ranks:
        row = found[rank]
        events = _nsys_events(captures / folder, rank) if folder.startswith("nsys") else _kineto_events(captures / folder, rank)
        assert {name: row[name] for name in _DEVICE} == pytest.approx(_swept(events), rel=1e-9), (folder, rank)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_must_add_up_does(runs: dict[str, Run], folder: str) -> None:
    run = runs[folder]
    for row in run.breakdown().to_pylist():
        assert row["busy_us"] + row["idle_us"] == pytest.approx(row["span_us"])
        hidden = row["communication_us"] - row["exposed_communication_us"]
        # Hidden by copies alone is neither exposed nor overlapped.
        assert 0 <= row["overlapped_communication_us"] <= hidden + 1e-6
    iterations = run.iterations().to_pylist()
    assert {row["iteration"] for row in iterations} == {9, 10}
    for row in iterations:
        absent = row["launch_starved_us"] + row["blocked_us"] + row["dependency_stalled_us"]
        assert absent == pytest.approx(row["duration_us"] - row["compute_us"], rel=1e-9)
        assert min(row["launch_starved_us"], row["blocked_us"], row["dependency_stalled_us"], row["idle_us"]) >= 0
    for row, same in zip(run.idle_gaps().to_pylist(), iterations, strict=True):
        assert row["non_compute_us"] == pytest.approx(same["duration_us"] - same["compute_us"], rel=1e-9)


@pytest.mark.parametrize("folder", FOLDERS)
def test_kernel_statistics_count_every_kernel_once(runs: dict[str, Run], folder: str) -> None:
    run = runs[folder]
    by_rank: dict[int, int] = {}
    for row in run.kernels().to_pylist():
        by_rank[row["rank"]] = by_rank.get(row["rank"], 0) + row["count"]
        assert row["min_us"] <= row["mean_us"] <= row["max_us"]
        assert row["mean_us"] * row["count"] == pytest.approx(row["total_us"])
    assert by_rank == {row["rank"]: row["kernel_count"] for row in run.breakdown().to_pylist()}
    together = run.kernels(by_rank=False)
    assert sum(together["count"].to_pylist()) == sum(by_rank.values())


def test_the_planted_data_loading_starves_the_device(runs: dict[str, Run]) -> None:
    """Eight sleeps of 30 ms in two iterations of four micro-batches."""
    planted, baseline = (
        max(row["launch_starved_us"] for row in runs[folder].typical_iteration().to_pylist() if row["rank"] == 0)
        for folder in ("kineto/plant_data", "kineto/tp2_dp2")
    )
    assert planted - baseline > 100_000


def _kineto_events(folder: Path, rank: int) -> list[tuple[str, str, int, int]]:
    trace = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()), parse_float=Decimal)
    kinds = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
    return [
        (kinds[event["cat"]], event["name"], int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000))
        for event in trace["traceEvents"]
        if event.get("cat") in kinds
    ]


def _nsys_events(folder: Path, rank: int) -> list[tuple[str, str, int, int]]:
    connection = sqlite3.connect(":memory:")
    connection.deserialize(lzma.decompress((folder / f"rank{rank}.sqlite.xz").read_bytes()))
    names = dict(connection.execute("select id, value from StringIds"))
    kernels = connection.execute("select demangledName, start, end from CUPTI_ACTIVITY_KIND_KERNEL")
    events = [("kernel", names[name], start, end) for name, start, end in kernels]
    for kind in ("memcpy", "memset"):
        rows = connection.execute(f"select start, end from CUPTI_ACTIVITY_KIND_{kind.upper()}")
        events += [(kind, kind, start, end) for start, end in rows]
    return events


def _swept(events: list[tuple[str, str, int, int]]) -> dict[str, float]:
    """Device times by walking through all starts and ends in order, counting what is open."""
    edges = []
    counts = {"kernel_count": 0, "communication_kernel_count": 0}
    for kind, name, start, end in events:
        communicates = kind == "kernel" and name.startswith("nccl")
        counts["kernel_count"] += kind == "kernel"
        counts["communication_kernel_count"] += communicates
        what = "communication" if communicates else "compute" if kind == "kernel" else kind
        edges += [(start, 1, what), (end, -1, what)]
    edges.sort()
    spent = dict.fromkeys(("busy", "compute", "communication", "exposed_communication", "memcpy", "memset"), 0)
    running = dict.fromkeys(("compute", "communication", "memcpy", "memset"), 0)
    for (time, step, what), (following, *_) in pairwise(edges):
        running[what] += step
        length = following - time
        active = {name for name, count in running.items() if count}
        for name in active:
            spent[name] += length
        spent["busy"] += length if active else 0
        spent["exposed_communication"] += length if active == {"communication"} else 0
    span = max(end for *_, end in events) - min(start for *_, start, _ in events)
    return {"span_us": span / 1e3, **{f"{name}_us": length / 1e3 for name, length in spent.items()}, **counts}
