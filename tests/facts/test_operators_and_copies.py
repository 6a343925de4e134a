"""What operators and the units of a sharded model cost, how fast copies are, and that torch and nsys count the same."""

import json
import lzma
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from bridge_profiling.facts.device import breakdown, device_work
from bridge_profiling.facts.kernels import copies, device_sums
from bridge_profiling.facts.operators import MEMORY, operators, units
from bridge_profiling.facts.types import connect
from bridge_profiling.run import Run
from tests.facts.ranks_in_hand import answer, rank, span, table, values, work


@pytest.mark.parametrize("rows", [1, 1 << 20])
def test_own_time_is_without_operators_inside(monkeypatch, rows):
    """However many calls are summed up at a time."""
    monkeypatch.setattr("bridge_profiling.facts.operators._BLOCK_ROWS", rows)
    events = [
        span("aten::linear", 0, 10_000, "operator", operator=1),
        span("aten::mm", 2000, 8000, "operator", operator=2),
        span("aten::mm", 0, 1000, "operator", operator=3, thread=2),
        span("cudaLaunchKernel", 3000, 4000, "runtime", operator=2),
        span("aten::add", 10_000, 11_000, "operator", operator=4),
        span("aten::mul", 10_500, 11_000, "operator", operator=5),
        span("aten::add", 11_000, 13_000, "operator", operator=6),
    ]
    launch = {"launch_thread": 1, "launch_start_ns": 3000}
    launched = [
        work("compute", 5000, 9000, operator=2, **launch),
        work("compute", 9000, 9500, operator=3),
        work("compute", 9500, 9600),
        work("compute", 9600, 9700, operator=6, launch_thread=1, launch_start_ns=12_000),
    ]
    found = answer(rank(host_events=events, device_events=launched), "operators")
    of_add, of_mul = ("aten::add", 2, 2500, 3000, 100, 100), ("aten::mul", 1, 500, 500, 0, 0)
    expected = [("aten::mm", 2, 7000, 7000, 4500, 4500), ("aten::linear", 1, 4000, 10_000, 0, 4000), of_add, of_mul]
    assert values(found, "name", "count", "self_ns", "total_ns", "device_self_ns", "device_total_ns") == expected
    of_each = [("aten::mm", 3500, 6000), ("aten::linear", 10_000, 10_000), ("aten::add", 1500, 2000), ("aten::mul", 500, 500)]
    assert values(found, "name", "mean_ns", "max_ns") == of_each


def test_calls_are_separated_by_shapes_or_call_stacks_and_other_ranges_counted_when_asked():
    shapes, stack = "[[2,3],[3,4]]", "forward model.py:7\nmain train.py:3"
    events = [
        span("aten::mm", 0, 1000, "operator", shapes=shapes, stack=stack),
        span("aten::mm", 2000, 3000, "operator", shapes="[[9,9],[9,9]]", stack=stack),
        span("aten::mm", 4000, 5000, "operator"),
        span("dataloader", 6000, 11_000, "annotation"),
    ]
    found = partial(operators, lambda: [table("host_events", events)], table("device_events", []), table("memory_events", []))
    assert found()["count"].to_pylist() == [3]
    assert dict(values(found(shapes=True), "shapes", "count")) == {shapes: 1, "[[9,9],[9,9]]": 1, None: 1}
    assert dict(values(found(stacks=True), "stack", "count")) == {stack: 2, None: 1}
    assert values(found(category="annotation"), "name", "self_ns") == [("dataloader", 5000)]


def test_modules_are_those_of_torch(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as used:
        model(torch.randn(32, 64)).backward(torch.ones(32, 64))
    used.export_chrome_trace(str(tmp_path / "rank-0.json"))
    with Run(tmp_path, parquet=tmp_path) as run:
        found = values(run.operators(by="module"), "name", "module", "count")
    assert set(found) >= {("aten::addmm", "Linear_0", 1), ("aten::addmm", "Linear_1", 1), ("aten::relu", "ReLU_0", 1)}


def test_copies_by_direction_and_memory_with_their_bandwidth():
    def copy(direction, source, start_ns, size):
        known = {"direction": direction, "from_memory": source, "to_memory": "device", "bytes": size}
        return work("memcpy", start_ns, start_ns + 1000, **known)

    events = [
        copy("HtoD", "pageable", 0, 4000),
        copy("HtoD", "pageable", 2000, 6000),
        # Its bytes are unknown: it takes no part in the bandwidth.
        copy("HtoD", "pageable", 3000, None),
        copy("HtoD", "pinned", 4000, 50_000),
        copy("DtoD", "device", 6000, 900_000),
        work("memset", 0, 500, bytes=7000),
    ]
    names = ("kind", "direction", "from_memory", "host_memory", "count", "bytes", "total_ns", "bandwidth_gbs")
    sums = device_sums(table("device_events", events), marked=False)
    of_rank = {"rank": [0] * len(sums), "source": ["kineto"] * len(sums)}
    with connect() as connection:
        found = copies(connection, pa.table(of_rank | {name: sums[name] for name in sums.column_names}))
    assert sorted(values(found, *names)) == [
        ("memcpy", "DtoD", "device", None, 1, 900_000, 1000, pytest.approx(900)),
        ("memcpy", "HtoD", "pageable", "pageable", 3, 10_000, 3000, pytest.approx(5)),
        ("memcpy", "HtoD", "pinned", "pinned", 1, 50_000, 1000, pytest.approx(50)),
        ("memset", None, None, None, 1, 7000, 500, pytest.approx(14)),
    ]


def test_work_on_several_devices_is_counted_as_that_of_one():
    busy = [work("compute", 0, 15_000), work("compute", 10_000, 20_000, device=1)]
    one, both = (breakdown(device_work(table("device_events", events))) for events in (busy[:1], busy))
    assert (values(one.table, "busy_ns", "least_busy_ns"), one.caveats) == ([(15_000, 15_000)], ())
    assert values(both.table, "busy_ns", "least_busy_ns") == [(20_000, 10_000)]
    assert "(0: 75%, 1: 50%)" in both.caveats[0].text


def test_a_collective_belongs_to_the_unit_whose_range_it_was_launched_in():
    def found(ranges, events):
        rows = units(table("host_events", ranges), table("device_events", events))
        return values(rows, "unit", "step", "count", "host_ns", "communication_count", "device_ns")

    ranges = [
        span("FSDP::all_gather (layers.0)", 0, 10_000, thread=1),
        span("FSDP::all_gather (layers.1)", 20_000, 30_000, thread=1),
        span("FSDP::all_gather_copy_out (layers.1)", 40_000, 50_000, thread=1),
        # The backward pass of a device has a thread of its own.
        span("FSDP::all_gather (layers.1) [pg=4]", 100_000, 110_000, thread=2),
        span("FSDP::post_backward_reduce (layers.1)", 120_000, 135_000, thread=2),
        span("FSDP::all_gather (layers.0)", 0, 10_000, "operator", thread=1),
    ]
    events = [
        work("communication", 100_000, 140_000, launch_thread=1, launch_start_ns=5000),
        work("communication", 140_000, 150_000, launch_thread=1, launch_start_ns=25_000),
        work("compute", 150_000, 900_000, launch_thread=1, launch_start_ns=26_000),
        work("communication", 160_000, 900_000, launch_thread=1, launch_start_ns=45_000),
        work("communication", 200_000, 300_000, launch_thread=2, launch_start_ns=105_000),
        work("communication", 300_000, 307_000, launch_thread=2, launch_start_ns=125_000),
        # Launched before any of the thread's ranges, and one whose launch was not recorded.
        work("communication", 0, 900_000, launch_thread=2, launch_start_ns=50_000),
        work("communication", 0, 900_000),
    ]
    assert found(ranges, events) == [
        ("layers.1", "all_gather", 2, 20_000, 2, 110_000),
        ("layers.0", "all_gather", 1, 10_000, 1, 40_000),
        ("layers.1", "reduce", 1, 15_000, 1, 7000),
    ]
    # Without a device the host's time is known, and the device's is not zero.
    ranges = [span("ZeRO::reduce", 0, 3000, thread=1), span("FSDP::all_gather", 5000, 6000, thread=1)]
    assert found(ranges, []) == [("", "reduce", 1, 3000, 0, None), ("", "all_gather", 1, 1000, 0, None)]


RECORDED = Path(__file__).parent / "gpu_tables"

#: torch adds this to cudaStreamIsCapturing, for device work that its trace does not hold.
UNTRACED_US = {"host-to-device": 20.289, "iteration_6": 20.289}


def test_device_time_and_memory_of_operators_and_ranges_are_those_of_torch_and_both_profilers_count_the_same(tmp_path, run_of):
    for kind in ("pt.trace.json", "sqlite"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"rank-0.{kind}").write_bytes(lzma.decompress((RECORDED / f"rank-0.{kind}.xz").read_bytes()))
    runs = [run_of(tmp_path / kind) for kind in ("pt.trace.json", "sqlite")]
    theirs = json.loads((RECORDED / "key_averages.json").read_text())
    rows = [row for category in ("operator", "annotation") for row in runs[0].facts.operators_by(category=category).to_pylist()]
    assert {row["name"] for row in rows} == set(theirs)
    for row in rows:
        count, own_us, total_us, *memory = theirs[row["name"]]
        total_us -= UNTRACED_US.get(row["name"], 0)
        ours = [row[name] for name in ("count", "device_self_ns", "device_total_ns", *MEMORY)]
        assert ours == [count, pytest.approx(1e3 * own_us, abs=20), pytest.approx(1e3 * total_us, abs=20), *memory], row["name"]
    # Both profilers, torch.profiler and nsys, count the same calls and kernels.
    calls, phases = (
        [{row["name"]: row for row in table(run).to_pylist() if not row["name"].startswith("cub::")} for run in runs]
        for table in (Run.operators, Run.phases)
    )
    by_kineto, by_nsys = ({name: row["count"] for name, row in of.items()} for of in calls)
    assert by_kineto == by_nsys
    assert phases[0].keys() == phases[1].keys()
    for name, row in phases[0].items():
        theirs = phases[1][name]
        assert theirs["kernel_count"] == row["kernel_count"]
        for column in ("device_ns", "backward_device_ns"):
            assert theirs[column] == (row[column] and pytest.approx(row[column], rel=0.01, abs=1000)), (name, column)
