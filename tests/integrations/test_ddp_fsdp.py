"""The examples of DDP, the FSDP wrapper and fully_shard on two ranks: the window, the phases, and what is sent."""

from __future__ import annotations

import functools
import math

import pytest

from bridge_profiling.analysis import Run
from tests.integrations.example_run import ExampleRun

pytestmark = pytest.mark.system

PHASES = ["host-to-device", "forward", "backward", "optimizer", "data-loading"]

#: Parameters of the examples' models: Linear(32, 64) and Linear(64, 4); two Linear(32, 32).
DDP_PARAMETERS = (32 * 64 + 64) + (64 * 4 + 4)
UNITS = {
    "fully_shard": {"0": 32 * 64 + 64, "2": 64 * 4 + 4},
    "fsdp": {"0": 32 * 32 + 32, "1": 32 * 32 + 32},
}
#: How each gathers and reduces its units.
OPERATORS = {
    "fully_shard": ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"),
    "fsdp": ("c10d::allgather_", "c10d::_reduce_scatter_base_"),
}

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


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Each example by its name, run once."""
    return functools.cache(lambda name: ExampleRun(f"{name}.py", tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fully_shard"])
def test_an_example_is_captured_whole_and_trains_as_without(name, examples):
    examples(name).check(name, PHASES)
    memory = examples(name).captured.manifest(0)["framework"]["phase_memory"]
    assert memory == "unavailable: this process trains on no CUDA device"


def test_ddp_reduces_every_gradient_once(examples):
    for rank in (0, 1):
        assert messages(examples("ddp"), rank, "c10d::allreduce_") == [4 * DDP_PARAMETERS]
        framework = examples("ddp").captured.manifest(rank)["framework"]
        assert (framework["parameters"], framework["bucket_bytes"]) == (DDP_PARAMETERS, [4 * DDP_PARAMETERS])
        assert (framework["backend"], framework["world_size"], framework["notes"]) == ("gloo", 2, [])


@pytest.mark.parametrize("name", UNITS)
def test_each_unit_is_gathered_for_each_pass_and_reduced_once_and_ranges_name_it(name, examples):
    example, (gather, reduce) = examples(name), OPERATORS[name]
    (first, one), (last, other) = UNITS[name].items()
    for rank in (0, 1):
        assert messages(example, rank, gather) == [4 * one, 4 * other, 4 * other, 4 * one]
        assert messages(example, rank, reduce) == [4 * other, 4 * one]
        # In the order of both passes; torch itself names no unit of the wrapper.
        found = [range_ for range_ in example.captured.ranges(rank) if range_.startswith("FSDP::all_gather (")]
        assert found == [f"FSDP::all_gather ({unit})" for unit in (first, last, last, first)] * 2
        framework = example.captured.manifest(rank)["framework"]
        assert {unit["name"]: unit["parameters"] for unit in framework["units"]} == UNITS[name]
        if name == "fsdp":
            assert framework["sharding_strategy"] == "FULL_SHARD"
            found = [range_ for range_ in example.captured.ranges(rank) if range_.startswith("FSDP::post_backward_reduce")]
            assert found == ["FSDP::post_backward_reduce (1)", "FSDP::post_backward_reduce (0)"] * 2
        else:
            assert (framework["mesh"], framework["sharded_over"]) == ({"dp": 2}, {"dp": 2})
            assert framework["reshard_after_forward"] == {"units": 2, "of": 2}


@pytest.mark.parametrize("name", UNITS)
def test_the_analysis_distinguishes_the_units(name, examples):
    with Run(examples(name).captured.root) as run:
        rows = [row for row in run.units().to_pylist() if row["rank"] == 1]
    counts = {(row["unit"], row["step"]): row["count"] for row in rows}
    assert counts == {(unit, "all_gather"): 4 for unit in UNITS[name]} | {(unit, "reduce"): 2 for unit in UNITS[name]}
    assert all(row["host_us"] > 0 and row["device_us"] is None for row in rows)
