"""Which unit of a sharded model a collective is for: the range around its launch, on the launching thread."""

from __future__ import annotations

import pyarrow as pa
import pytest

from bridge_profiling.analysis.attribution.operators import units

US = 1000


def host(*rows):
    """Ranges: category, thread, name, begin and end in microseconds."""
    names = ("category", "thread", "name", "start_ns", "end_ns")
    columns = list(zip(*rows, strict=True)) or [()] * 5
    columns[3:] = [[time * US for time in column] for column in columns[3:]]
    kinds = (pa.string(), pa.int64(), pa.string(), pa.int64(), pa.int64())
    return pa.table({name: pa.array(column, kind) for name, column, kind in zip(names, columns, kinds, strict=True)})


def device(*rows):
    """Events: kind, launching thread and time, begin and end in microseconds."""
    names = ("kind", "launch_thread", "launch_start_ns", "start_ns", "end_ns")
    columns = list(zip(*rows, strict=True)) or [()] * 5
    columns[2:] = [[None if time is None else time * US for time in column] for column in columns[2:]]
    kinds = (pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.int64())
    return pa.table({name: pa.array(column, kind) for name, column, kind in zip(names, columns, kinds, strict=True)})


def test_a_collective_belongs_to_the_unit_whose_range_it_was_launched_in():
    ranges = host(
        ("annotation", 1, "FSDP::all_gather (layers.0)", 0, 10),
        ("annotation", 1, "FSDP::all_gather (layers.1)", 20, 30),
        ("annotation", 1, "FSDP::all_gather_copy_out (layers.1)", 40, 50),
        # The backward pass of a device has a thread of its own.
        ("annotation", 2, "FSDP::all_gather (layers.1) [pg=4]", 100, 110),
        ("annotation", 2, "FSDP::post_backward_reduce (layers.1)", 120, 135),
        ("operator", 1, "FSDP::all_gather (layers.0)", 0, 10),
    )
    events = device(
        ("communication", 1, 5, 100, 140),
        ("communication", 1, 25, 140, 150),
        ("compute", 1, 26, 150, 900),
        ("communication", 1, 45, 160, 900),
        ("communication", 2, 105, 200, 300),
        ("communication", 2, 125, 300, 307),
        # Launched before any of the thread's ranges, and one whose launch was not recorded.
        ("communication", 2, 50, 0, 900),
        ("communication", None, None, 0, 900),
    )
    assert units(ranges, events).to_pylist() == [
        {"unit": "layers.1", "step": "all_gather", "count": 2, "host_us": 20, "communication_count": 2, "device_us": 110},
        {"unit": "layers.0", "step": "all_gather", "count": 1, "host_us": 10, "communication_count": 1, "device_us": 40},
        {"unit": "layers.1", "step": "reduce", "count": 1, "host_us": 15, "communication_count": 1, "device_us": 7},
    ]


def test_without_a_device_the_hosts_time_is_told_and_the_devices_is_not_zero():
    ranges = host(("annotation", 1, "ZeRO::reduce", 0, 3), ("annotation", 1, "FSDP::all_gather", 5, 6))
    assert units(ranges, device()).to_pylist() == [
        {"unit": "", "step": "reduce", "count": 1, "host_us": 3, "communication_count": 0, "device_us": None},
        {"unit": "", "step": "all_gather", "count": 1, "host_us": 1, "communication_count": 0, "device_us": None},
    ]


@pytest.mark.parametrize("rows", [(), (("annotation", 1, "forward", 0, 3),)])
def test_a_model_that_is_not_sharded_has_no_units(rows):
    assert units(host(*rows), device()).num_rows == 0
