"""The examples of DDP, the FSDP wrapper and fully_shard on two ranks: the window, the phases, and the units."""

from __future__ import annotations

import functools

import pytest

from bridge_profiling.analysis import Run
from tests.integrations.example_run import ExampleRun

pytestmark = pytest.mark.system

PHASES = ["host-to-device", "forward", "backward", "optimizer", "data-loading"]

#: Parameters of the examples' models: Linear(32, 64) and Linear(64, 4); two Linear(32, 32).
DDP_PARAMETERS = (32 * 64 + 64) + (64 * 4 + 4)
UNITS = {"fully_shard": {"0": 32 * 64 + 64, "2": 64 * 4 + 4}, "fsdp": {"0": 32 * 32 + 32, "1": 32 * 32 + 32}}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Each example by its name, run once."""
    return functools.cache(lambda name: ExampleRun(f"{name}.py", tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fully_shard"])
def test_an_example_is_captured_whole_and_trains_as_without(name, examples):
    examples(name).check(name, PHASES)
    memory = examples(name).captured.manifest(0)["framework"]["phase_memory"]
    assert memory == "unavailable: this process trains on no CUDA device"


def test_the_manifest_of_ddp_describes_its_buckets_and_its_connection(examples):
    framework = examples("ddp").captured.manifest(1)["framework"]
    assert (framework["parameters"], framework["bucket_bytes"]) == (DDP_PARAMETERS, [4 * DDP_PARAMETERS])
    assert (framework["backend"], framework["world_size"], framework["notes"]) == ("gloo", 2, [])


@pytest.mark.parametrize("name", UNITS)
def test_ranges_name_each_unit_in_the_order_of_both_passes(name, examples):
    captured, (first, last) = examples(name).captured, UNITS[name]
    found = [range_ for range_ in captured.ranges(1) if range_.startswith("FSDP::all_gather (")]
    assert found == [f"FSDP::all_gather ({unit})" for unit in (first, last, last, first)] * 2
    framework = captured.manifest(1)["framework"]
    assert {unit["name"]: unit["parameters"] for unit in framework["units"]} == UNITS[name]
    if name == "fsdp":
        assert framework["sharding_strategy"] == "FULL_SHARD"
        found = [range_ for range_ in captured.ranges(1) if range_.startswith("FSDP::post_backward_reduce")]
        assert found == [f"FSDP::post_backward_reduce ({unit})" for unit in (last, first)] * 2
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
