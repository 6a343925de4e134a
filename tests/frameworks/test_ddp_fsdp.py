"""The examples of DDP, the FSDP wrapper and fully_shard on two ranks: the window, the phases, and the units."""

import pytest

from bridge_profiling.run import Run
from tests.frameworks.example_run import ExampleRun

pytestmark = pytest.mark.system

PHASES = ["host-to-device", "forward", "backward", "optimizer", "data-loading"]

#: Parameters of the examples' models: Linear(32, 64) and Linear(64, 4); two Linear(32, 32).
DDP_PARAMETERS = (32 * 64 + 64) + (64 * 4 + 4)
UNITS = {"fully_shard": {"0": 32 * 64 + 64, "2": 64 * 4 + 4}, "fsdp": {"0": 32 * 32 + 32, "1": 32 * 32 + 32}}


@pytest.fixture
def example(request, tmp_path):
    """An example that has run: its window, phases and losses are checked already."""
    run = ExampleRun(f"{request.param}.py", tmp_path)
    run.check(request.param, PHASES)
    assert run.captured.manifest(0)["framework"]["phase_memory"] == "unavailable: this process trains on no CUDA device"
    return run.captured


@pytest.mark.parametrize("example", ["ddp"], indirect=True)
def test_the_manifest_of_ddp_describes_its_buckets_and_its_connection(example):
    framework = example.manifest(1)["framework"]
    assert (framework["parameters"], framework["bucket_bytes"]) == (DDP_PARAMETERS, [4 * DDP_PARAMETERS])
    assert (framework["backend"], framework["world_size"], framework["notes"]) == ("gloo", 2, [])


@pytest.mark.parametrize(("name", "example"), [(name, name) for name in UNITS], indirect=["example"])
def test_ranges_name_each_unit_in_the_order_of_both_passes_and_the_analysis_distinguishes_them(name, example):
    first, last = UNITS[name]
    found = [range_ for range_ in example.ranges(1) if range_.startswith("FSDP::all_gather (")]
    assert found == [f"FSDP::all_gather ({unit})" for unit in (first, last, last, first)] * 2
    framework = example.manifest(1)["framework"]
    assert {unit["name"]: unit["parameters"] for unit in framework["units"]} == UNITS[name]
    if name == "fsdp":
        assert framework["sharding_strategy"] == "FULL_SHARD"
        found = [range_ for range_ in example.ranges(1) if range_.startswith("FSDP::post_backward_reduce")]
        assert found == [f"FSDP::post_backward_reduce ({unit})" for unit in (last, first)] * 2
    else:
        assert (framework["mesh"], framework["sharded_over"]) == ({"dp": 2}, {"dp": 2})
        assert framework["reshard_after_forward"] == {"units": 2, "of": 2}
    with Run(example.root) as run:
        rows = [row for row in run.facts.units.to_pylist() if row["rank"] == 1]
    counts = {(row["unit"], row["step"]): row["count"] for row in rows}
    assert counts == {(unit, "all_gather"): 4 for unit in UNITS[name]} | {(unit, "reduce"): 2 for unit in UNITS[name]}
    assert all(row["host_ns"] > 0 and row["device_ns"] is None for row in rows)
