"""What the known tool gets wrong when it reads a trace, each on a small trace made for it."""

from __future__ import annotations

from typing import Any

import pytest

from bridge_profiling.traces import kineto
from bridge_profiling.traces.kinds import kernel_kind, torch_operation
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import call, complete, kernel


def _device(tables: Any) -> list[dict[str, Any]]:
    return tables.device_events.to_pylist()


def test_kernels_shorter_than_a_microsecond_keep_their_length(write_trace: WriteTrace) -> None:
    """Rounding starts up and ends down to microseconds would make the first negative and the second 1 µs."""
    events = [kernel("short", 4321140682354.330, 0.736), kernel("long", 4321140682360.999, 2.002)]
    found = [row["end_ns"] - row["start_ns"] for row in _device(kineto.read(write_trace(events)))]
    assert found == [736, 2002]


def test_triton_operators_on_the_host_are_no_device_work_though_they_name_a_stream(write_trace: WriteTrace) -> None:
    events = [
        complete("cpu_op", "triton_poi_fused_add_0", 10, 17.5, stream=7, device=0, correlation=5, kernel_backend="triton"),
        call("cuLaunchKernel", 12, 1, 5),
        kernel("triton_poi_fused_add_0", 15, 3, correlation=5),
    ]
    tables = kineto.read(write_trace(events))
    assert [(row["start_ns"], row["kind"]) for row in _device(tables)] == [(15000, "compute")]
    assert tables.host_events["category"].to_pylist() == ["operator", "runtime"]


@pytest.mark.parametrize("stream", [4294967295, -1, 2**64 - 1])
def test_context_sync_is_no_device_work(write_trace: WriteTrace, stream: int) -> None:
    sync = {"stream": stream, "correlation": 9, "device": 0}
    wait = {"stream": 23, "wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 4, "correlation": 8, "device": 0}
    events = [
        kernel("gemm", 10, 5),
        complete("cuda_sync", "Context Sync", 11, 900, pid=0, tid=stream, cuda_sync_kind="Context Sync", **sync),
        complete("cuda_sync", "Stream Wait Event", 12, 0, pid=0, tid=23, **wait),
        complete("kernel", "Context Sync", 11, 900, pid=0, tid=stream, **sync),
    ]
    tables = kineto.read(write_trace(events))
    assert [row["name"] for row in _device(tables)] == ["gemm"]
    context, waits = tables["synchronizations"].to_pylist()
    assert (context["kind"], context["stream"]) == ("context", None)
    assert (waits["kind"], waits["stream"], waits["producer_stream"], waits["producer_correlation"]) == (
        "stream_wait_event",
        23,
        7,
        4,
    )


@pytest.mark.parametrize(
    ("name", "backend", "operation"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "nccl", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "nccl", "send_recv"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "nccl", "send_recv"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "reduce"),
        ("void dpsk::ep::internode::dispatch<false, 8, true>(int4*, float*)", "deepep", "dispatch"),
        ("void dpsk::ep::intranode::combine<__nv_bfloat16, 8>(__nv_bfloat16*)", "deepep", "combine"),
        ("void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)", "deepep", "dispatch"),
        ("void deep_ep::intranode::barrier<8>(int**, int)", "deepep", "barrier"),
        ("void hybrid_ep::dispatch_kernel<4, 8>(hybrid_ep::dispatch_kernel_param_t)", "hybridep", "dispatch"),
        ("nvshmemi_transfer_put_nbi_kernel(void*)", "nvshmem", None),
        ("void nvshmemx::barrier_kernel(int)", "nvshmem", "barrier"),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_ag<4>(int, int)", "userbuffers", "all_gather"),
        ("void transformer_engine::kuserbuffers_pushsend(int*, int*)", "userbuffers", "send"),
        ("kuserbuffers_pullrecv(int, int)", "userbuffers", "recv"),
        ("mscclKernel_Sum_float_Simple(ncclDevComm*)", "rccl", None),
        ("void cross_device_reduce_2stage<__nv_bfloat16, 8>(RankData*)", "other", "all_reduce"),
    ],
)
def test_communication_is_told_by_whose_kernel_it_is(name: str, backend: str, operation: str | None) -> None:
    found = kernel_kind(name)
    assert (found.kind, found.backend, found.operation) == ("communication", backend, operation)


@pytest.mark.parametrize(
    "name",
    [
        "hipblaslt_gemm",
        "hip_kernel_name",
        "Cijk_Alik_Bljk_BBS_BH",
        "void at::native::elementwise_kernel<128, 4, my::nccl_like>(int)",
        "void cutlass::Kernel2<deep_ep::tile>(int)",
        "void at::native::reduce_kernel<512, 1>(int)",
        "triton_red_fused_allreduce_0",
    ],
)
def test_other_kernels_compute(name: str) -> None:
    assert kernel_kind(name).kind == "compute"


def test_a_kernel_that_kineto_describes_as_a_collective_is_one(write_trace: WriteTrace) -> None:
    message = {"Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Group size": 2}
    tables = kineto.read(write_trace([kernel("my_fused_all_reduce", 1, 2, **message)]))
    assert [(row["kind"], row["backend"]) for row in _device(tables)] == [("communication", "other")]
    assert tables.collectives["message_bytes"].to_pylist() == [32]


@pytest.mark.parametrize(
    ("torch_name", "operation"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("all_to_all", "all_to_all"),
        ("allreduce_coalesced", "all_reduce"),
        ("send", "send"),
        ("something_new", "something_new"),
    ],
)
def test_torch_names_of_collectives(torch_name: str, operation: str) -> None:
    assert torch_operation(torch_name) == operation


def test_the_last_iteration_is_kept(write_trace: WriteTrace) -> None:
    events = []
    for step in range(3):
        events += [
            complete("user_annotation", f"ProfilerStep#{step}", 100 * step, 90),
            call("cudaLaunchKernel", 100 * step + 10, 2, step + 1),
            # It runs when the next iteration has begun, and counts to the one that launched it.
            kernel("gemm", 100 * step + 95, 30, correlation=step + 1),
        ]
    tables = kineto.read(write_trace(events))
    assert tables.iterations["iteration"].to_pylist() == [0, 1, 2]
    assert tables.device_events["iteration"].to_pylist() == [0, 1, 2]


def test_work_without_a_recorded_launch_belongs_where_it_starts(write_trace: WriteTrace) -> None:
    events = [
        complete("user_annotation", "ProfilerStep#7", 100, 90),
        kernel("graphed", 120, 5, correlation=3),
        kernel("before", 50, 5),
    ]
    tables = kineto.read(write_trace(events))
    assert tables.device_events["iteration"].to_pylist() == [None, 7]
    assert any(each.code == "launches_missing" for each in tables.info.caveats)


def test_ranges_on_the_device_and_flow_arrows_are_no_events(write_trace: WriteTrace) -> None:
    events = [
        kernel("gemm", 10, 5),
        complete("gpu_user_annotation", "ProfilerStep#1", 0, 500, pid=0, tid=7),
        {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 2, "cat": "fwdbwd", "name": "fwdbwd"},
    ]
    tables = kineto.read(write_trace(events))
    assert (tables.device_events.num_rows, tables.host_events.num_rows, tables.iterations.num_rows) == (1, 0, 0)
