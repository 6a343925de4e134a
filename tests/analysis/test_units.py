"""Which unit of a sharded model a collective is for: the range around its launch, on the launching thread."""

import pytest

from bridge_profiling.analysis.attribution.operators import units
from tests.analysis.ranks_in_hand import table, values

US = 1000
COLUMNS = ("unit", "step", "count", "host_us", "communication_count", "device_us")


def host(thread, name, start_us, end_us, category="annotation"):
    return {"category": category, "thread": thread, "name": name, "start_ns": start_us * US, "end_ns": end_us * US}


def device(thread, launched_us, start_us, end_us, kind="communication"):
    launch = {} if thread is None else {"launch_thread": thread, "launch_start_ns": launched_us * US}
    return {"kind": kind, "start_ns": start_us * US, "end_ns": end_us * US, **launch}


def found(ranges, events):
    return values(units(table("host_events", ranges), table("device_events", events)), *COLUMNS)


def test_a_collective_belongs_to_the_unit_whose_range_it_was_launched_in():
    ranges = [
        host(1, "FSDP::all_gather (layers.0)", 0, 10),
        host(1, "FSDP::all_gather (layers.1)", 20, 30),
        host(1, "FSDP::all_gather_copy_out (layers.1)", 40, 50),
        # The backward pass of a device has a thread of its own.
        host(2, "FSDP::all_gather (layers.1) [pg=4]", 100, 110),
        host(2, "FSDP::post_backward_reduce (layers.1)", 120, 135),
        host(1, "FSDP::all_gather (layers.0)", 0, 10, "operator"),
    ]
    events = [
        device(1, 5, 100, 140),
        device(1, 25, 140, 150),
        device(1, 26, 150, 900, "compute"),
        device(1, 45, 160, 900),
        device(2, 105, 200, 300),
        device(2, 125, 300, 307),
        # Launched before any of the thread's ranges, and one whose launch was not recorded.
        device(2, 50, 0, 900),
        device(None, 0, 0, 900),
    ]
    assert found(ranges, events) == [
        ("layers.1", "all_gather", 2, 20, 2, 110),
        ("layers.0", "all_gather", 1, 10, 1, 40),
        ("layers.1", "reduce", 1, 15, 1, 7),
    ]


def test_without_a_device_the_hosts_time_is_known_and_the_devices_is_not_zero():
    ranges = [host(1, "ZeRO::reduce", 0, 3), host(1, "FSDP::all_gather", 5, 6)]
    assert found(ranges, []) == [("", "reduce", 1, 3, 0, None), ("", "all_gather", 1, 1, 0, None)]


@pytest.mark.parametrize("ranges", [[], [host(1, "forward", 0, 3)]])
def test_a_model_that_is_not_sharded_has_no_units(ranges):
    assert found(ranges, []) == []
