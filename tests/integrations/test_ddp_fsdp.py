"""The examples of DDP, the FSDP wrapper and fully_shard on two ranks: the window, the phases, and what is sent."""

from __future__ import annotations

import math

import pytest

from bridge_profiling.analysis import Run
from tests.integrations.example_run import ExampleRun

pytestmark = pytest.mark.system

PHASES = ["host-to-device", "forward", "backward", "optimizer", "data-loading"]

#: Of the examples' models: Linear(32, 64) and Linear(64, 4); two Linear(32, 32).
DDP_PARAMETERS = (32 * 64 + 64) + (64 * 4 + 4)
FULLY_SHARD_UNITS = {"0": 32 * 64 + 64, "2": 64 * 4 + 4}
FSDP_UNITS = {"0": 32 * 32 + 32, "1": 32 * 32 + 32}

#: Operators with which torch sends, in any backend, and which of their inputs is the whole message.
_WHOLE = {"c10d::allreduce_": 0, "c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}


def messages(example: ExampleRun, rank: int, operator: str) -> list[int]:
    """Bytes of each call of a collective in iteration 3: of float32, from the shapes in the trace."""
    events = example.captured.events(rank)
    step = next(event for event in events if event["name"] == "ProfilerStep#3")
    found = []
    for event in events:
        if event["name"] == operator and step["ts"] <= event["ts"] < step["ts"] + step["dur"]:
            shapes = event["args"]["Input Dims"]
            if operator == "c10d::allgather_":
                # The wrapper gathers equal shards on gloo: its input is one of two.
                found.append(4 * 2 * math.prod(shapes[1][0]))
            else:
                shape = shapes[_WHOLE[operator]]
                found.append(4 * math.prod(shape[0] if isinstance(shape[0], list) else shape))
    return found


def ranges(example: ExampleRun, rank: int, begin: str) -> list[str]:
    events = [event for event in example.captured.events(rank) if event["name"].startswith(begin)]
    return [event["name"] for event in events]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return ExampleRun("ddp.py", tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    return ExampleRun("fsdp.py", tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def fully_shard(tmp_path_factory):
    return ExampleRun("fully_shard.py", tmp_path_factory.mktemp("fully_shard"))


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fully_shard"])
def test_an_example_is_captured_whole_and_trains_as_without(name, request):
    request.getfixturevalue(name).check(name, PHASES)


def test_ddp_reduces_every_gradient_once(ddp):
    for rank in (0, 1):
        assert messages(ddp, rank, "c10d::allreduce_") == [4 * DDP_PARAMETERS]
        framework = ddp.captured.manifest(rank)["framework"]
        assert (framework["parameters"], framework["bucket_bytes"]) == (DDP_PARAMETERS, [4 * DDP_PARAMETERS])
        assert (framework["backend"], framework["world_size"], framework["notes"]) == ("gloo", 2, [])


def test_the_wrapper_gathers_each_unit_for_each_pass_and_reduces_it_once(fsdp):
    one, other = FSDP_UNITS.values()
    for rank in (0, 1):
        assert messages(fsdp, rank, "c10d::allgather_") == [4 * one, 4 * other, 4 * other, 4 * one]
        assert messages(fsdp, rank, "c10d::_reduce_scatter_base_") == [4 * other, 4 * one]
        framework = fsdp.captured.manifest(rank)["framework"]
        assert framework["sharding_strategy"] == "FULL_SHARD"
        assert {unit["name"]: unit["parameters"] for unit in framework["units"]} == FSDP_UNITS


def test_the_wrappers_ranges_name_the_unit_that_is_sent(fsdp):
    """In the order of both passes; torch itself names no unit of the wrapper."""
    gathered = ["FSDP::all_gather (0)", "FSDP::all_gather (1)", "FSDP::all_gather (1)", "FSDP::all_gather (0)"]
    for rank in (0, 1):
        assert ranges(fsdp, rank, "FSDP::all_gather") == 2 * gathered
        reduced = ["FSDP::post_backward_reduce (1)", "FSDP::post_backward_reduce (0)"]
        assert ranges(fsdp, rank, "FSDP::post_backward_reduce") == 2 * reduced


def test_fully_shard_gathers_each_unit_for_each_pass_and_reduces_it_once(fully_shard):
    first, last = FULLY_SHARD_UNITS.values()
    for rank in (0, 1):
        assert messages(fully_shard, rank, "c10d::_allgather_base_") == [4 * first, 4 * last, 4 * last, 4 * first]
        assert messages(fully_shard, rank, "c10d::_reduce_scatter_base_") == [4 * last, 4 * first]
        framework = fully_shard.captured.manifest(rank)["framework"]
        assert (framework["mesh"], framework["sharded_over"]) == ({"dp": 2}, {"dp": 2})
        assert {unit["name"]: unit["parameters"] for unit in framework["units"]} == FULLY_SHARD_UNITS
        assert framework["reshard_after_forward"] == {"units": 2, "of": 2}


def test_fully_shards_own_ranges_are_in_the_trace_once_each(fully_shard):
    gathered = ["FSDP::all_gather (0)", "FSDP::all_gather (2)", "FSDP::all_gather (2)", "FSDP::all_gather (0)"]
    for rank in (0, 1):
        found = [name for name in ranges(fully_shard, rank, "FSDP::all_gather") if "copy_out" not in name]
        assert found == 2 * gathered


@pytest.mark.parametrize("name", ["fsdp", "fully_shard"])
def test_the_analysis_tells_the_units_apart(name, request):
    example = request.getfixturevalue(name)
    with Run(example.captured.root) as run:
        rows = [row for row in run.units().to_pylist() if row["rank"] == 1]
    counts = {(row["unit"], row["step"]): row["count"] for row in rows}
    units = FSDP_UNITS if name == "fsdp" else FULLY_SHARD_UNITS
    assert counts == {(unit, "all_gather"): 4 for unit in units} | {(unit, "reduce"): 2 for unit in units}
    assert all(row["host_us"] > 0 and row["device_us"] is None for row in rows)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fully_shard"])
def test_memory_that_a_cpu_does_not_count_is_unavailable_and_not_zero(name, request):
    memory = request.getfixturevalue(name).captured.manifest(0)["framework"]["phase_memory"]
    assert memory == "unavailable: this process trains on no CUDA device"
