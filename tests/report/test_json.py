"""The JSON is the design's, field by field."""

import json
from collections.abc import Callable

import pytest

from bridge_profiling.run import Run
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import kernel

KEYS = {
    "top": "schema_version ranks collectives memory pipeline bench findings limitations caveats",
    "rank": "rank source files coordinates device iterations kernels",
    "device": """span_us busy_us idle_us compute_us communication_us exposed_communication_us overlapped_communication_us
        memcpy_us memset_us kernel_count communication_kernel_count""",
    "iteration": """iteration duration_us compute_us communication_us exposed_communication_us idle_us launch_starved_us
        blocked_us dependency_stalled_us boundary""",
    "kernel": "name kind count total_us mean_us min_us max_us",
    "caveat": "code text ranks file",
    "collective": "operation group size count bytes transfer_us wait_us bus_bandwidth_gbs",
}


def test_every_level_has_its_fields(real: Callable[[str], Run]) -> None:
    run = real("kineto/tp2_dp2")
    document = json.loads(run.to_json())
    keys = {name: set(text.split()) for name, text in KEYS.items()}
    assert list(document) == KEYS["top"].split()
    assert document["schema_version"] == 1
    assert all(isinstance(sentence, str) for sentence in document["limitations"])
    assert all(set(caveat) == keys["caveat"] for caveat in document["caveats"])
    assert {tuple(each["ranks"]) for each in document["caveats"] if each["code"] == "few_iterations"} <= {(0, 1, 2, 3)}
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    for rank in document["ranks"]:
        assert set(rank) == keys["rank"]
        files = [str(run.path / f"rank-{rank['rank']}.json.gz")]
        assert (rank["source"], rank["coordinates"], rank["files"]) == ("kineto", None, files)
        assert set(rank["device"]) == keys["device"]
        assert [set(iteration) for iteration in rank["iterations"]] == [keys["iteration"]] * 2
        assert isinstance(rank["iterations"][0]["boundary"], bool)
        assert all(set(kernel) == keys["kernel"] for kernel in rank["kernels"])
        assert sum(kernel["count"] for kernel in rank["kernels"]) == rank["device"]["kernel_count"]
        assert {kernel["kind"] for kernel in rank["kernels"]} == {"compute", "communication"}
    for each in document["collectives"]:
        assert set(each) >= keys["collective"]
        assert each["size"] == len(each["ranks"])
        assert set(each["wait_us"]) <= {str(rank) for rank in each["ranks"]}
    tensor = [each for each in document["collectives"] if each["group"] == "TENSOR_MODEL_PARALLEL_GROUP"]
    assert {tuple(each["ranks"]) for each in tensor} == {(0, 1), (2, 3)}
    # Ranks 0 and 2 wait inside NCCL for 1 and 3, whose hosts launch late.
    for each in tensor:
        early, late = (each["wait_us"][str(rank)] for rank in each["ranks"])
        assert early > 3 * late


def test_memory_has_its_fields_and_no_rank_is_made_up_for_it(real: Callable[[str], Run]) -> None:
    document = json.loads(real("memory/tp2_dp2").to_json())
    (row,) = document["memory"]
    assert {"rank", "peak_bytes", "growth_bytes_per_iteration"} <= set(row)
    assert row["peak_bytes"] > 2**30
    assert document["ranks"] == []


def test_coordinates_come_from_the_trace_and_what_is_no_number_is_null(write_trace: WriteTrace, run_of) -> None:
    ours = {"rank": 3, "coordinates": {"tp": [1, 2], "pp": [0, 1]}}
    run = run_of(write_trace([kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 1, 0)], bridge_profiling=ours))
    (rank,) = json.loads(run.to_json(), parse_constant=pytest.fail)["ranks"]
    assert (rank["coordinates"], rank["device"]["span_us"]) == (ours["coordinates"], 0)
