"""On every real capture, device times agree with an independent reference, and what must add up does."""

import gzip
import json
from collections import Counter
from decimal import Decimal
from itertools import pairwise

import pytest

FOLDERS = ("tp2_dp2", "tp2_dp2_overlap", "pp2_dp2", "plant_data", "plant_straggler")


@pytest.mark.integration
@pytest.mark.parametrize("folder", FOLDERS)
def test_device_times_are_exactly_those_of_a_sweep_over_all_events(real, captures, folder):
    """A second reading of the files that shares no code: counting what is open at each start and end, in order."""
    edges, counts = [], Counter()
    raw = gzip.decompress((captures / "kineto" / folder / "rank-3.json.gz").read_bytes())
    for event in json.loads(raw, parse_float=Decimal)["traceEvents"]:
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
