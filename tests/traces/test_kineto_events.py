"""What an event means where the known tool gets it wrong, and which events no table has a place for: those are counted."""

import json

import pytest

from bridge_profiling.traces import kineto
from bridge_profiling.traces.kinds import kernel_kind, torch_operation
from bridge_profiling.traces.kineto import stream
from tests.traces.conftest import caveats, contents, values
from tests.traces.kineto_files import call, complete, document, kernel


def step(number, start_us, duration_us=90.5, **args):
    return complete("user_annotation", f"ProfilerStep#{number}", start_us, duration_us, **args)


@pytest.mark.parametrize("stream", [4294967295, -1])
def test_context_sync_is_no_device_work(read_trace, stream):
    sync = {"stream": stream, "correlation": 9, "device": 0}
    wait = {"stream": 23, "wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 4, "correlation": 8, "device": 0}
    events = [
        kernel("gemm", 10, 5),
        complete("cuda_sync", "Context Sync", 11, 900, pid=0, tid=stream, cuda_sync_kind="Context Sync", **sync),
        complete("cuda_sync", "Stream Wait Event", 12, 0, pid=0, tid=23, **wait),
        complete("kernel", "Context Sync", 11, 900, pid=0, tid=stream, **sync),
    ]
    tables = read_trace(events)
    assert values(tables["device_events"], "name") == ["gemm"]
    assert values(tables["synchronizations"], "kind", "stream", "producer_stream", "producer_correlation") == [
        ("context", None, None, None),
        ("stream_wait_event", 23, 7, 4),
    ]


@pytest.mark.parametrize(
    ("name", "backend", "operation"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "reduce_scatter"),
        ("void hybrid_ep::dispatch_kernel<4, 8>(hybrid_ep::dispatch_kernel_param_t)", "hybridep", "dispatch"),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_ag<4>(int, int)", "userbuffers", "all_gather"),
        ("mscclKernel_Sum_float_Simple(ncclDevComm*)", "rccl", None),
        ("void cross_device_reduce_2stage<__nv_bfloat16, 8>(RankData*)", "other", "all_reduce"),
    ],
)
def test_a_kernel_communicates_by_its_own_name(name, backend, operation):
    found = kernel_kind(name)
    assert (found.kind, found.backend, found.operation) == ("communication", backend, operation)


def test_other_kernels_compute_and_torchs_names_of_collectives_are_ours():
    names = ("Cijk_Alik_Bljk_BBS_BH", "void at::native::reduce_kernel<512, 1>(int)", "triton_red_fused_allreduce_0")
    assert {kernel_kind(name).kind for name in names} == {"compute"}
    operations = {"_allgather_base": "all_gather", "all_to_allv": "all_to_all", "something_new": "something_new"}
    assert {name: torch_operation(name) for name in operations} == operations


def test_a_kernel_that_kineto_describes_as_a_collective_is_one(read_trace):
    message = {"Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Group size": 2}
    tables = read_trace([kernel("my_fused_all_reduce", 1, 2, **message)])
    assert values(tables["device_events"], "kind", "backend") == [("communication", "other")]
    assert values(tables["collectives"], "message_bytes") == [32]


def test_work_without_a_recorded_launch_belongs_where_it_starts(read_trace):
    tables = read_trace([step(7, 100), kernel("graphed", 120, 5, correlation=3), kernel("before", 50, 5)])
    assert values(tables["device_events"], "iteration") == [None, 7]
    assert "launches_missing" in caveats(tables)


@pytest.mark.parametrize(("recorded", "iterations"), [(3, [None, None, 7, 7, 7]), (1, [7, 7, 7, 7, 7])])
def test_work_that_was_queued_before_the_first_recorded_launch_is_of_no_iteration(read_trace, recorded, iterations):
    queued = [kernel("queued", start, 5, correlation=number) for number, start in ((1, 105), (2, 110))]
    launched = [kernel("gemm", start, 5, correlation=number) for number, start in ((3, 115), (4, 120), (5, 125))]
    calls = [call("cudaLaunchKernel", 101 + number, 1, number) for number in (3, 4, 5)[:recorded]]
    # Where most launches are missing, the first recorded one tells nothing.
    assert values(read_trace([step(7, 100), *queued, *launched, *calls])["device_events"], "iteration") == iterations


def test_iterations_that_the_profiler_starts_or_flushes_in_are_boundaries(read_trace):
    events = [step(number, 100 * number, 100) for number in range(1, 5)]
    events += [
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 150, "dur": 350},
        complete("overhead", "Buffer Flush", 310, 5),
    ]
    assert values(read_trace(events)["iterations"], "boundary") == [True, False, True, False]


def stepped(*launches, optimizers=("AdamW",), first_us=0.0):
    """A loop whose profiler is not told of its iterations: between the optimizers' steps, so many kernels are launched."""
    events, at = [], first_us
    for place, count in enumerate(launches):
        name = f"Optimizer.step#{optimizers[place % len(optimizers)]}.step"
        events += [call("cudaLaunchKernel", at + 10 * each, 2, 100 * place + each + 1) for each in range(count)]
        events += [complete("user_annotation", name, at + 10 * count, 50), complete("cpu_op", name, at + 10 * count + 1, 48)]
        events += [complete("user_annotation", name, at + 10 * count + 2, 40)]  # an optimizer in an optimizer
        at += 10 * count + 60
    return events


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (stepped(20, 21, 20), [(0, 0, 250), (1, 250, 520), (2, 520, 780)]),
        (stepped(12, 21, 20), [(1, 170, 440), (2, 440, 700)]),  # the capture began in an iteration
        (stepped(90, 20, 20), [(1, 950, 1210), (2, 1210, 1470)]),  # or before the first
        (stepped(20, 9, 20, 9, 20, 9), [(0, 0, 400), (1, 400, 810), (2, 810, 1220)]),  # two networks in turn
        (stepped(20, 2, 20, 2, optimizers=("Muon", "AdamW")), [(0, 0, 330), (1, 330, 670)]),
        (stepped(20), []),
        (stepped(0, 0, 0), [(1, 50, 110), (2, 110, 170)]),  # no launches: whether the first is whole is not known
        (
            [*stepped(20, 20), *(complete("user_annotation", f"step_{at % 2}", at, 1) for at in range(4))],
            [(0, 0, 250), (1, 250, 510)],
        ),
        ([*stepped(20, 20), complete("user_annotation", "train step 7", 0, 900)], [(7, 0, 900)]),
    ],
)
def test_iterations_that_no_range_numbers_lie_between_steps_of_the_optimizer(read_trace, events, expected):
    found = values(read_trace(events)["iterations"], "iteration", "start_ns", "end_ns")
    assert [(number, start / 1000, end / 1000) for number, start, end in found] == expected


def numbered(first, *stepping):
    """Numbered steps, some of which have a step of the optimizer."""
    events = []
    for place, steps in enumerate(stepping):
        events.append(complete("user_annotation", f"ProfilerStep#{first + place}", 100 * place, 90))
        events += [complete("user_annotation", "Optimizer.step#AdamW.step", 100 * place + 80, 5)] if steps else []
    return events


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (numbered(30, 0, 0, 1, 0, 0, 1), [(10, 0, 290), (11, 300, 590)]),
        (numbered(31, 0, 1, 0, 0, 1, 0), [(11, 200, 490)]),  # not whole at either end
        (numbered(3, 0, 0, 1), [(1, 0, 290)]),
        (numbered(4, 0, 0, 1), [(4, 0, 90), (5, 100, 190), (6, 200, 290)]),  # how many there are is not known
        (numbered(0, 1, 1, 0, 1), [(place, 100 * place, 100 * place + 90) for place in range(4)]),  # gradients overflowed
        (numbered(0, 0, 0), [(0, 0, 90), (1, 100, 190)]),
    ],
)
def test_numbered_micro_batches_make_one_iteration_up_to_the_step_of_the_optimizer(read_trace, events, expected):
    tables = read_trace(events)
    found = values(tables["iterations"], "iteration", "start_ns", "end_ns")
    assert [(number, start / 1000, end / 1000) for number, start, end in found] == expected
    assert ("micro_batches_numbered" in caveats(tables)) == (len(found) < sum("Profiler" in each["name"] for each in events))


BACK_AND_FORTH = ["embed", *["norm", "gemm", "gelu"] * 11, "loss", *["gelu", "gemm", "norm"] * 11, "sum"]
TRAINING, DECODING = [*BACK_AND_FORTH, "FusedAdam", "mean"], ["Memcpy HtoD", *BACK_AND_FORTH]


@pytest.mark.parametrize(
    ("launched", "expected"),
    [
        (TRAINING * 3, [(0, 71), (1, 142), (2, 213)]),
        ([*TRAINING[40:], *TRAINING * 2, *TRAINING[:30]], [(1, 101), (2, 172)]),  # numbered from the first, which is not whole
        ([*TRAINING, *["gemm"] * 20] * 2 + [*["gemm"] * 40, *TRAINING], []),  # the work varies
        ([*BACK_AND_FORTH * 4, "FusedAdam"] * 2, [(0, 277), (1, 554)]),
        (DECODING * 3, [(0, 70), (1, 140), (2, 210)]),
        (BACK_AND_FORTH * 3, []),  # nothing shows that these are iterations
    ],
)
def test_iterations_without_any_range_are_periods_of_the_kernels(read_trace, launched, expected):
    calls = [call("cudaLaunchKernel", 10 * place, 2, place + 1) for place in range(len(launched))]
    work = [kernel(name, 10 * place + 3, 4, correlation=place + 1) for place, name in enumerate(launched)]
    tables = read_trace([*calls, *({**each, "cat": "gpu_memcpy"} if "Memcpy" in each["name"] else each for each in work)])
    found = [(number, (end + 8000) // 10000) for number, end in values(tables["iterations"], "iteration", "end_ns")]
    assert (found, "iterations_inferred" in caveats(tables)) == (expected, bool(expected))


#: Arguments as Kineto writes them, and a kernel's configuration.
LAUNCHES = {
    "torch's": ({"grid": [132, 8, 1], "block": [256, 1, 1], "registers per thread": 96, "shared memory": 3072}, [96, 3072]),
    "without registers, as on ROCm": ({"grid": [132, 8, 1], "block": [256, 1, 1]}, [None, None]),
    "without a grid": ({"block": [256, 1, 1], "registers per thread": 96}, None),
    "a negative grid": ({"grid": [-1, 1, 1], "block": [256, 1, 1]}, None),
    "no numbers": ({"grid": "everything", "block": {"x": 1}}, None),
    "two dimensions": ({"grid": [1, 1], "block": [256, 1, 1]}, None),
    "beyond 64 bits": ({"grid": [10**30, 1, 1], "block": [256, 1, 1]}, None),
}


@pytest.mark.parametrize(("args", "numbers"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_kernels_launch_is_its_grid_block_registers_and_shared_memory(read_trace, args, numbers):
    events = [kernel("gemm", 10, 5, **args), complete("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 5, bytes=8, stream=7)]
    found = values(read_trace(events)["device_events"], "configuration")
    assert [text and json.loads(text) for text in found] == [numbers and [[132, 8, 1], [256, 1, 1], *numbers], None]


def test_work_that_torch_moved_to_a_lane_keeps_the_stream_it_ran_on(read_trace):
    """torch 2.15's export with graph_lanes="all": `stream` and the thread are a lane's, `original_stream` the device's."""
    moved = [kernel("gemm", stream, 5.0, stream=7, original_stream=stream) for stream in (1042, 1043)]
    tables = read_trace([*moved, kernel("gemm", 2000.0, 5.0, stream=7)])
    assert values(tables["device_events"], "stream") == [1042, 1043, 7]


READ = [
    step(5, 1000.0, **{"External id": 1}),
    complete("cpu_op", "aten::mm", 1001.25, 9.5, **{"External id": 2, "Input Dims": [[4, 8], [2]]}),
    call("cudaLaunchKernel", 1002.001, 3.002, 11, **{"External id": 2}),
    kernel("gemm", 1006.003, 20.004, correlation=11, **{"External id": 2}),
    {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100, "tid": 1, "ts": 1003.5,
     "args": {"Bytes": 512, "Addr": 64, "Device Id": -1, "Device Type": 0, "Ev Idx": 1}},
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1095.0},
]  # fmt: skip


def _event(phase, category, name, start_us, **more):
    named = {"ph": phase, "name": name, "pid": 100, "tid": 1, "ts": start_us}
    return named | ({"cat": category} if category else {}) | more


#: What is left out. Kineto writes samples of hardware counters with the device in the process's name, the value under no name.
UNREAD = [
    *(_event("C", "hardware_counters", "sm__cycles", 1010.0 + number, args={"": 0.5}) for number in range(6)),
    *(complete("cuda_profiler_range", "performance monitor", 1005.0, 50.0, device=0, stream=7) for _ in range(2)),
    _event("i", "new_instants", "[future]", 1001.0, s="t"),
    *(_event(phase, "cpu_op", "request", 1001.0, id="0x1", args={"stream": "none"}) for phase in "bne"),
    *(_event(phase, None, "tensor", 1001.0, id="0x2", args={"snapshot": {"ph": "X", "cat": "kernel"}}) for phase in "NOD"),
    _event("?", None, "future", 1001.0, dur=3.0),
    _event("X", "kernel", "endless", 1060.0, args={"stream": 7}),
]


@pytest.mark.parametrize("way", ["whole", "in pieces", "each event", "indented"])
def test_events_that_no_table_holds_are_left_out_and_counted_however_the_file_is_read(write_trace, monkeypatch, way):
    expected = contents(kineto.read(write_trace(READ)))
    # Those in every gap between the others, each once.
    events = [event for place, read in enumerate(READ) for event in (*UNREAD[place :: len(READ)], read)]
    text = json.dumps(document(events), indent=2 if way == "indented" else None)
    if way == "in pieces":
        monkeypatch.setattr(stream, "PIECE_BYTES", 400)
    if way == "each event":
        # A piece with an event that fits no type is read event by event.
        text = text.replace('"traceEvents": [', '"traceEvents": [{"ph": ["M"], "name": {}, "args": []}, ')
    tables = kineto.read(write_trace(text))
    assert contents(tables) == expected
    assert [each.text for each in tables.info.caveats if "left out" in each.text] == [
        "1 events could not be decoded and are left out",
        "2 events of the unknown category 'cuda_profiler_range' are left out",
        "1 events of the unknown category 'new_instants' are left out",
        "6 counter samples of the category 'hardware_counters' are left out",
        "3 asynchronous events of the category 'cpu_op' are left out",
        "3 object events are left out",
        f"{2 if way == 'each event' else 1} events of further categories are left out",
    ]
