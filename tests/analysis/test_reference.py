"""On every real capture, device times agree with an independent reference, and what must add up does."""

import gzip
import json
from collections import Counter, defaultdict
from decimal import Decimal
from functools import cache
from itertools import pairwise

import pytest

FOLDERS = ("tp2_dp2", "tp2_dp2_overlap", "pp2_dp2", "plant_data", "plant_straggler")


@cache
def _events(path):
    """A file's events by the standard library's parser, which takes seconds."""
    return json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]


@pytest.mark.integration
@pytest.mark.parametrize("folder", FOLDERS)
def test_device_times_are_exactly_those_of_a_sweep_over_all_events(real, captures, folder):
    """A second reading of the files that shares no code: counting what is open at each start and end, in order."""
    edges, counts = [], Counter()
    for event in _events(captures / "kineto" / folder / "rank-3.json.gz"):
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


@pytest.mark.integration
@pytest.mark.parametrize("folder", FOLDERS)
def test_operators_device_times_are_those_that_torchs_key_averages_defines(real, captures, folder):
    """`self_device_time_total`: kernels with the operator's External id; `device_time_total`: its own and its children's."""
    own_ns, threads = Counter(), defaultdict(list)
    for event in _events(captures / "kineto" / folder / "rank-3.json.gz"):
        category, args = event.get("cat"), event.get("args", {})
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            own_ns[args.get("External id")] += int(event["dur"] * 1000)
        elif category in ("cpu_op", "user_annotation"):
            start = int(event["ts"] * 1000)
            threads[event["tid"]].append(
                (start, -start - int(event["dur"] * 1000), event["name"], args.get("External id"), category)
            )
    own, total = Counter(), Counter()
    for events in threads.values():
        opened = []
        for start, minus_end, name, identifier, category in sorted(events, key=lambda event: event[:2]):
            while opened and opened[-1][0] <= start:
                opened.pop()
            opened.append((-minus_end, name, category))
            own[name, category] += own_ns[identifier]
            for _, each, kind in opened:
                total[each, kind] += own_ns[identifier]
    expected = {name: (own[name, "cpu_op"], time) for (name, kind), time in total.items() if kind == "cpu_op"}
    rows = [row for row in real(f"kineto/{folder}").operators().to_pylist() if row["rank"] == 3]
    found = {row["name"]: (row["device_self_us"] * 1000, row["device_total_us"] * 1000) for row in rows}
    assert found == {name: pytest.approx(times, abs=1) for name, times in expected.items()}
    assert sum(time > 0 for _, time in expected.values()) > 20
