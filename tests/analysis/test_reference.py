"""On every real capture, device times agree with an independent reference, and what must add up does."""

import gzip
import json
from collections import Counter
from decimal import Decimal
from itertools import pairwise

import pytest

from bridge_profiling.analysis.attribution.parts import BY_ACTIVITY, BY_CAUSE

FOLDERS = ("tp2_dp2", "tp2_dp2_overlap", "pp2_dp2", "plant_data", "plant_straggler")


# The standard library's parser takes seconds.
@pytest.mark.integration
@pytest.mark.parametrize("folder", FOLDERS)
def test_device_times_are_exactly_those_of_a_sweep_over_all_events(real, captures, folder):
    """A second reading of the files that shares no code: counting what is open at each start and end, in order."""
    edges, counts = [], Counter()
    text = gzip.decompress((captures / "kineto" / folder / "rank-3.json.gz").read_bytes())
    for event in json.loads(text, parse_float=Decimal)["traceEvents"]:
        kind = event.get("cat", "").removeprefix("gpu_")
        if kind in ("kernel", "memcpy", "memset"):
            kind = "communication" if event["name"].startswith("nccl") else "compute" if kind == "kernel" else kind
            counts[kind] += 1
            edges += [(int(event["ts"] * 1000), 1, kind), (int((event["ts"] + event["dur"]) * 1000), -1, kind)]
    edges.sort()
    spent, running = Counter(), Counter()
    for (time, step, kind), (following, *_) in pairwise(edges):
        running[kind] += step
        spent[frozenset(+running)] += following - time
    expected = {
        "span_us": edges[-1][0] - edges[0][0],
        "busy_us": sum(time for active, time in spent.items() if active),
        "exposed_communication_us": spent[frozenset(["communication"])],
    }
    for kind in ("compute", "communication", "memcpy", "memset"):
        expected[f"{kind}_us"] = sum(time for active, time in spent.items() if kind in active)
    found = real(f"kineto/{folder}").breakdown().to_pylist()[3]
    assert {name: found[name] * 1000 for name in expected} == pytest.approx(expected, rel=1e-9)
    communicating = counts["communication"]
    assert (found["kernel_count"], found["communication_kernel_count"]) == (counts["compute"] + communicating, communicating)


@pytest.mark.parametrize("folder", ["kineto/tp2_dp2", "nsys/tp2_dp2"])
def test_what_must_add_up_does(real, folder):
    run = real(folder)
    kernels = {row["rank"]: row["kernel_count"] for row in run.breakdown().to_pylist()}
    for row in run.breakdown().to_pylist():
        assert row["busy_us"] + row["idle_us"] == pytest.approx(row["span_us"])
        hidden = row["communication_us"] - row["exposed_communication_us"]
        # Hidden by copies alone is neither exposed nor overlapped.
        assert 0 <= row["overlapped_communication_us"] <= hidden + 1e-6
    iterations = run.iterations().to_pylist()
    assert {row["iteration"] for row in iterations} == {9, 10}
    for row, gaps in zip(iterations, run.idle_gaps().to_pylist(), strict=True):
        parts = [row["launch_starved_us"], row["blocked_us"], row["dependency_stalled_us"]]
        assert min(*parts, row["idle_us"]) >= 0
        assert sum(parts) == pytest.approx(row["duration_us"] - row["compute_us"], rel=1e-9)
        assert gaps["non_compute_us"] == pytest.approx(sum(parts), rel=1e-9)
    durations = {row["rank"]: row["duration_us"] for row in run.typical_iteration().to_pylist()}
    for row in run.attribution().to_pylist():
        for parts in (BY_CAUSE, BY_ACTIVITY):
            assert min(row[part] for part in parts) >= 0
            assert sum(row[part] for part in parts) == pytest.approx(durations[row["rank"]], rel=1e-9)
    counted = Counter()
    for row in run.kernels().to_pylist():
        counted[row["rank"]] += row["count"]
        assert row["min_us"] <= row["mean_us"] <= row["max_us"]
        assert row["mean_us"] * row["count"] == pytest.approx(row["total_us"])
    assert counted == kernels
    assert sum(run.kernels(by_rank=False)["count"].to_pylist()) == sum(kernels.values())
