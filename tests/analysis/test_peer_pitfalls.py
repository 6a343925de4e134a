"""What the known tool gets wrong, each on a small trace made for it, asked as a user asks: a file in, a number out.

Its bug 8, a parent that keeps every rank's events, is in `test_run.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bridge_profiling.analysis import Run
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import call, complete, kernel

OpenRun = Callable[..., Run]


def _device(run: Run) -> dict[str, Any]:
    (row,) = run.breakdown().to_pylist()
    return row


def test_1_times_keep_their_nanoseconds(write_trace: WriteTrace, run_of: OpenRun) -> None:
    """Starts rounded up and ends rounded down to microseconds: 0.736 µs would become less than nothing."""
    events = [kernel("short", 4321140682354.330, 0.736), kernel("long", 4321140682360.999, 2.002)]
    run = run_of(write_trace(events))
    assert {row["name"]: row["total_us"] for row in run.kernels().to_pylist()} == {"short": 0.736, "long": 2.002}
    assert _device(run)["compute_us"] == 2.738
    assert _device(run)["span_us"] == 8.671
    assert _device(run)["idle_us"] == pytest.approx(5.933)


def test_2_more_than_ten_kernels_keep_their_own_statistics(write_trace: WriteTrace, run_of: OpenRun) -> None:
    names = [f"kernel_{place}" for place in range(14)]
    events = [
        kernel(name, 1000 * place + 100 * turn, length)
        for place, name in enumerate(names)
        for turn, length in enumerate((1, 3, 8))
    ]
    rows = run_of(write_trace(events)).kernels().to_pylist()
    assert sorted(row["name"] for row in rows) == sorted(names)
    statistics = ("count", "total_us", "mean_us", "min_us", "max_us")
    assert {tuple(row[name] for name in statistics) for row in rows} == {(3, 12, 4, 1, 8)}


def test_3_triton_operators_on_the_host_are_no_compute(write_trace: WriteTrace, run_of: OpenRun) -> None:
    events = [
        complete("cpu_op", "triton_poi_fused_add_0", 10, 500, stream=7, device=0, correlation=5, kernel_backend="triton"),
        call("cuLaunchKernel", 12, 1, 5),
        kernel("triton_poi_fused_add_0", 15, 3, correlation=5),
    ]
    run = run_of(write_trace(events))
    assert (_device(run)["compute_us"], _device(run)["span_us"], _device(run)["kernel_count"]) == (3, 3, 1)
    assert run.operators()["count"].to_pylist() == [1]


def test_4_waiting_for_the_device_is_no_work_of_the_device(write_trace: WriteTrace, run_of: OpenRun) -> None:
    sync = {"pid": 0, "tid": 4294967295, "stream": 4294967295, "device": 0, "correlation": 9}
    events = [
        kernel("gemm", 10, 5),
        complete("cuda_sync", "Context Sync", 0, 900, **sync),
        complete("cuda_sync", "Event Sync", 0, 900, **sync),
        complete("cuda_sync", "Stream Wait Event", 0, 900, pid=0, tid=7, stream=7, device=0),
    ]
    found = _device(run_of(write_trace(events)))
    assert (found["span_us"], found["busy_us"], found["kernel_count"]) == (5, 5, 1)


def test_5_communication_is_told_by_whose_kernel_it_is(write_trace: WriteTrace, run_of: OpenRun) -> None:
    communicating = {
        "void dpsk::ep::internode::dispatch<false, 8>(int4*)": "deepep",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8>(int4*)": "deepep",
        "nvshmemi_proxy_rma_entrypoint_blocking()": "nvshmem",
        "void userbuffers_fp16_sum_inplace_gpu_rr_rs<8>(int)": "userbuffers",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "nccl",
    }
    computing = ["hipblasLt_gemm_kernel", "hip_softmax_forward", "void my_op<ncclTensor>(float*)"]
    events = [kernel(name, 100 * place, 10) for place, name in enumerate([*communicating, *computing])]
    run = run_of(write_trace(events))
    rows = run.kernels().to_pylist()
    assert {row["name"]: row["backend"] for row in rows if row["kind"] == "communication"} == communicating
    assert sorted(row["name"] for row in rows if row["kind"] == "compute") == sorted(computing)
    assert _device(run)["communication_us"] == 50
    assert _device(run)["compute_us"] == 30
    assert _device(run)["communication_kernel_count"] == 5


def test_6_the_last_iteration_counts(write_trace: WriteTrace, run_of: OpenRun) -> None:
    events = []
    for place, number in enumerate((5, 6, 7)):
        begin = 1000 * place
        events += [
            complete("user_annotation", f"ProfilerStep#{number}", begin, 900),
            call("cudaLaunchKernel", begin + 10, 2, number),
            kernel("gemm", begin + 100, 200 + number, correlation=number),
        ]
    run = run_of(write_trace(events))
    rows = run.iterations().to_pylist()
    assert [(row["iteration"], row["compute_us"], row["duration_us"]) for row in rows] == [
        (5, 205, 900),
        (6, 206, 900),
        (7, 207, 900),
    ]
    assert _device(run)["compute_us"] == 618


def test_7_a_trace_that_names_no_rank_is_read(write_trace: WriteTrace, run_of: OpenRun) -> None:
    path = write_trace({"traceEvents": [kernel("gemm", 1, 2)]}, "rank-5.json")
    run = run_of(path)
    assert [(info.rank, info.rank_source) for info in run.infos] == [(5, "file name")]
    assert _device(run)["compute_us"] == 2
