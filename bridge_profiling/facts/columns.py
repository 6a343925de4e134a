"""Columns of the tables in documents, declared once: type, unit and description.

`Row.schema` gives a table's schema, `report.documents` the JSON Schema. Tables that no document contains declare their columns
where they are made.
"""

from __future__ import annotations

from bridge_profiling.facts.types import (
    Bytes,
    Count,
    Flag,
    Float,
    Gbs,
    Int,
    MeanBytes,
    Ns,
    Number,
    Row,
    Share,
    Text,
    Tflops,
    Us,
    choice,
    many,
)

PROFILER = choice("kineto", "nsys")


class OfRank(Row):
    """Something of one rank."""

    rank = Number("Global rank")


class OfDevice(OfRank):
    """Something of one device of a rank."""

    device = Int("Number of the device in the process")


class Device(Row):
    """Device time over the whole capture. Times are unions over all streams."""

    span_us = Us("From the start of the first device event to the end of the last one")
    busy_us = Us("Something ran")
    idle_us = Us("Nothing ran")
    compute_us = Us("A compute kernel ran")
    communication_us = Us("A communication kernel ran")
    exposed_communication_us = Us("Communication ran, and nothing else")
    overlapped_communication_us = Us("Communication and compute ran at the same time")
    memcpy_us = Us("A copy ran")
    memset_us = Us("A memset ran")
    kernel_count = Count("Number of kernels, with those that communicate")
    communication_kernel_count = Count("Number of kernels that communicate")


class Iteration(Row):
    """Device time in one iteration. Compute, launch-starved, blocked and dependency-stalled time add up to the duration."""

    iteration = Int("Number of the iteration")
    duration_us = Us("Duration of the iteration on the device")
    compute_us = Us("A compute kernel ran")
    communication_us = Us("A communication kernel ran")
    exposed_communication_us = Us("Communication ran, and nothing else")
    idle_us = Us("Nothing ran")
    launch_starved_us = Us("No compute, because the host had not launched the next kernel")
    blocked_us = Us("No compute, because the next kernel waited for communication or a copy")
    dependency_stalled_us = Us("No compute, between kernels that depend on each other")
    boundary = Flag("Whether it is at the profiler's start, stop or flush")


class Kernel(Row):
    """Kernels of one name on one rank, over the whole capture."""

    name = Text.or_null("Demangled name; null if the capture does not record it")
    kind = choice("compute", "communication")("What the kernel does")
    group = Text("What it does in more detail, by its name: see `kernel_groups`")
    count = Count("Number of calls")
    total_us = Us("Time of all calls; concurrent calls count twice")
    mean_us = Us("Mean time of a call")
    min_us = Us("Shortest call")
    max_us = Us("Longest call")
    grid = Text.or_null("Blocks of most launches, `132x1x1`; null if not recorded")
    block = Text.or_null("Threads of a block, `256x1x1`")
    registers_per_thread = Count.or_null("Registers of a thread; null if not recorded")
    shared_memory_bytes = Bytes.or_null("Shared memory of a block, static and dynamic; null if not recorded")
    configurations = Count("How many different launches (grid, block, registers, shared memory) there were")


class KernelGroup(Row):
    """Kernels, or copies, that do the same on one rank, over the whole capture."""

    group = Text("`matrix product`, `attention`, `communication: all_reduce`, `copy`, …; `other` if no pattern knows the name")
    count = Count("Number of kernels and copies")
    name_count = Count("Number of different names")
    total_us = Us("Their time, added up")
    share = Share("Share of the time of all kernels and copies of the rank")
    names = many(Text)("Names of the kernels with the most time, at most five")


class HostIteration(Row):
    """An iteration of a training on CPUs, by the thread of its loop. The parts up to `other_us` add up to the duration."""

    iteration = Int("Number of the iteration")
    boundary = Flag("Whether it is at the profiler's start, stop or flush")
    duration_us = Us("Duration, to the start of the next iteration")
    data_loading_us = Us("In ranges of data loading")
    checkpoint_us = Us("In ranges of saving")
    communication_us = Us("Blocked by a collective, without waiting")
    waiting_us = Us.or_null("Blocked by a collective until another rank arrived; null of one rank alone")
    operators_us = Us("In operators")
    other_us = Us("The rest, Python for the most part")
    collectives_us = Us("A collective ran on any thread, whether it blocked the loop or not")
    own_us = Us("`duration_us` without `waiting_us`")


class Phase(Row):
    """Ranges of one name on one rank, in a mean iteration. Ranges can be inside each other, so their times do not add up."""

    name = Text("Name of the range; `autograd` for all that autograd ran, on whichever thread")
    kind = choice("phase", "autograd", "range", "library")(
        "Opened by the hook (`phase`), by the program (`range`) or by a library; or all of autograd"
    )
    iterations = Count("Iterations that means are of; 0 if none is marked, and times are of the whole capture")
    present = Count("Iterations in which the range occurs")
    calls = Float.or_null("Number of ranges; null if unknown")
    host_us = Us.or_null("Time of the host inside; null if unknown")
    host_low_us = Us.or_null("The same in the iteration with the least")
    host_high_us = Us.or_null("The same in the iteration with the most")
    host_share = Share.or_null("`host_us` as a share of the iteration")
    device_us = Us("Sum of the device events launched inside, by descendants and by autograd too")
    device_low_us = Us("The same in the iteration with the least")
    device_high_us = Us("The same in the iteration with the most")
    device_share = Share("`device_us` as a share of the iteration; above 1 if streams work at the same time")
    compute_us = Us("The part of `device_us` in kernels that compute")
    communication_us = Us("The part of `device_us` in kernels that communicate")
    kernel_count = Float("Number of kernels launched inside")
    backward_host_us = Us.or_null("Host time of the backward pass of operators that ran inside; null without sequence numbers")
    backward_device_us = Us.or_null("Device time of that backward pass")
    sm_active = Share.or_null("SMs active while what was launched inside ran; null unless nsys sampled it")
    tensor_active = Share.or_null("Tensor cores active meanwhile")
    dram_read = Share.or_null("Reads of the device's memory meanwhile, as a share of its bandwidth")
    dram_write = Share.or_null("Writes to it meanwhile")


class Operator(Row):
    """Host operators of one name on one rank, over the whole capture."""

    name = Text.or_null("Name of the operator; null if the capture does not record it")
    count = Count("Number of calls")
    self_us = Us("Time of the host without operators inside")
    total_us = Us("Time of the host")
    mean_us = Us("Mean time of a call")
    max_us = Us("Longest call")
    device_self_us = Us("Device time launched in it, and in no operator or annotation further in")
    device_total_us = Us("Device time launched in it, descendants included")
    cpu_memory_self_bytes = Bytes.or_null(
        "Host memory allocated less freed in it, and in no operator further in; null if not recorded"
    )
    cpu_memory_total_bytes = Bytes.or_null("The same, descendants included")
    device_memory_self_bytes = Bytes.or_null(
        "Device memory allocated less freed in it, and in no operator further in; null if not recorded"
    )
    device_memory_total_bytes = Bytes.or_null("The same, descendants included")
    module = Text.or_null("The `nn.Module` that called it for the most own time; null if not recorded")


class MatrixProduct(Row):
    """Calls of an operator that computes matrix products, with inputs of the same shapes, over the whole capture."""

    operator = Text("`aten::mm`, `aten::convolution`, `aten::_scaled_dot_product_flash_attention`, …")
    shapes = Text("JSON text of the dimensions of its inputs")
    precision = choice("fp8", "bf16", "fp16", "tf32", "fp32", "fp64").or_null(
        "By the name of `kernel`; null if that does not say"
    )
    kernel = Text.or_null("The product that it launches first; null if none is recognized")
    count = Count("Number of calls that launched compute")
    device_us = Us("Time of all kernels that they launched")
    flops = Float.or_null("Floating-point operations of a call; null if the shapes do not say")
    tflops = Tflops.or_null("Operations per second of `device_us`; null if unknown")
    flops_per_byte = Float.or_null(
        "Arithmetic intensity, if inputs are read once and the output is written once; null if unknown"
    )
    peak_tflops = Tflops.or_null("The device's dense peak for the precision; null if unknown")
    share_of_peak = Share.or_null("`tflops` as a share of that; null if unknown")
    memory_tb_s = Float.or_null("Bandwidth of the device's memory in TB/s; null if unknown")
    roof_tflops = Tflops.or_null("The lower of `peak_tflops` and `flops_per_byte` times `memory_tb_s`; null if unknown")
    share_of_roof = Share.or_null("`tflops` as a share of that; null if unknown")
    sm_active = Share.or_null("SMs active while its compute ran; null unless nsys sampled it often enough")
    tensor_active = Share.or_null("Tensor cores active meanwhile")
    dram_read = Share.or_null("Reads of the device's memory meanwhile, as a share of its bandwidth")
    dram_write = Share.or_null("Writes to it meanwhile")
    dram_tb_s = Float.or_null("Read and written in TB/s; null if unknown")
    measured_flops_per_byte = Float.or_null("Arithmetic intensity with these bytes; null if unknown")


class SystemCall(Row):
    """System calls of one name, on the threads of a rank that launch work."""

    name = Text("`poll`, `pthread_cond_wait`, …")
    iterations = Count("Iterations that count; 0 if none is marked, and then sums are of the whole capture")
    calls = Float("Calls of an iteration")
    time_us = Us("Time of an iteration in them")
    share = Share.or_null("The same as a share of the iteration; null if none is marked")
    longest_us = Us("Longest call")
    longest_start_ns = Ns("Start of that call on the rank's clock")


class CudaMemory(Row):
    """Memory of one kind that CUDA allocated on a device of a rank."""

    device = Int.or_null("Number of the device in the process; null if unknown")
    memory = Text("`device`, `pinned`, `managed`, `pageable`, `array`, `device static`, `managed static`, `unknown`")
    allocations = Count("Allocations that nsys reports, of before the window too")
    frees = Count("Frees that nsys reports, of before the window too")
    in_iterations = Count("Allocations and frees in the iterations that count")
    iterations = Count("Iterations that count; 0 if none is marked")
    allocated_bytes = Bytes("Bytes of the allocations")
    peak_bytes = Bytes("Most bytes allocated less freed, as far as nsys reports")
    end_bytes = Bytes("Bytes allocated less freed at its end; negative if older memory was freed")


class SizedCollective(Row):
    """Communication of one operation in one group with messages of one size, over the whole capture."""

    operation = Text.or_null("As in `collectives`")
    group = Text.or_null("As in `collectives`")
    group_size = Number.or_null("Number of ranks in the group; null if unknown")
    captured_ranks = Count("Captured ranks that take part")
    message_bytes = Bytes.or_null(
        "Larger of input and output of one rank; of all-to-all, the sum of its splits; null if unknown"
    )
    count = Count("Number of operations")
    matched_count = Count("Number of operations that were captured on at least two ranks")
    mean_us = Us("Mean time of a rank's kernel, with waiting")
    duration_us = Us("Time of the kernels of the captured ranks, added up, with waiting")
    transfer_us = Us.or_null("Time of the matched operations without waiting; null if none is matched")
    wait_us = Us.or_null("Waiting of the captured ranks, added up; null if none is matched")
    exposed_us = Us.or_null("The part of `duration_us` in which nothing else ran on the rank's device")
    overlapped_us = Us.or_null("The part of `duration_us` that compute hides")
    algorithm_bandwidth_gbs = Gbs.or_null("Message size over transfer time; null if unknown")
    bus_bandwidth_gbs = Gbs.or_null("As in nccl-tests; null if unknown")
    alone_bus_bandwidth_gbs = Gbs.or_null("The same of such messages alone, by benchmarks; null without a fitting one")
    link_gbs = Gbs.or_null("Stated bandwidth of NVLink, one direction of one device; null unless the group is on one host")
    dimension = Text.or_null("As in `collectives`")
    ranks = many(Number).or_null("As in `collectives`")


class StageWait(Row):
    """A pipeline stage that waits for another one in sends and receives. Means of an iteration of a rank."""

    stage = Number("Number of the stage that waits")
    waits_for_stage = Number("Number of the stage that it waits for")
    ranks = many(Number)("Captured ranks of the stage that waits")
    count = Float("Operations that waited")
    wait_us = Us("Waiting, added up over the operations")


class Stage(Row):
    """A pipeline stage. Times are means of an iteration of a rank."""

    stage = Number("Number of the stage")
    stages = Number("Number of stages")
    ranks = many(Number)("Captured ranks of the stage")
    iterations = Number("Number of iterations")
    microbatches = Number.or_null("Microbatches of an iteration; null if unknown")
    pipeline_us = Us("Duration of the pipeline's part of the iteration")
    compute_us = Us("Compute")
    excess_compute_us = Us("Compute beyond the mean stage: uneven stages; may be negative")
    bubble_us = Us("Waiting for other stages: the three parts that follow")
    warm_up_us = Us("Bubble before the first microbatch")
    steady_us = Us("Bubble between microbatches")
    cool_down_us = Us("Bubble after the last microbatch")
    other_idle_us = Us("Other time without compute")
    bubble_fraction = Share.or_null("Bubble as a share of `pipeline_us`")
    ideal_bubble_fraction = Share.or_null(
        "The same for an even pipeline that never waits; null if the microbatches are unknown"
    )


class GpuMetric(OfRank):
    """A hardware counter of a GPU, sampled by nsys in the marked iterations."""

    source = PROFILER("The profiler")
    device = Int("Number of the GPU in the machine")
    metric = Text("nsys' name, which ends with the unit in brackets")
    samples = Count("Number of samples")
    mean = Float("Mean, in that unit")
    p95 = Float("95th percentile, in that unit")
    max = Float("Maximum, in that unit")


class KernelCounters(OfRank):
    """Hardware counters of a rank's device while the kernels of one name ran, over the whole capture."""

    source = PROFILER("The profiler")
    name = Text("Name of the kernel")
    group = Text("What it does, as in `kernel_groups`")
    count = Count("Number of its executions with samples")
    device_us = Us("Their duration")
    samples_per_call = Float("Mean duration in times between two samples")
    sm_active = Share.or_null("SMs active; null if unknown, and if `samples_per_call` is below 1")
    tensor_active = Share.or_null("Tensor cores active")
    dram_read = Share.or_null("Reads of the device's memory, as a share of its bandwidth")
    dram_write = Share.or_null("Writes to it")
    memory_tb_s = Float.or_null("Bandwidth of the device's memory in TB/s; null if unknown")
    dram_tb_s = Float.or_null("Read and written in TB/s; null if unknown")


class DeviceMemory(OfDevice):
    """Memory of one device of a rank."""

    source = choice("snapshot", "kineto")("A memory snapshot, or the allocations in a trace")
    peak_bytes = Bytes("Most memory allocated at a time")
    peak_ns = Ns.or_null("Time of that peak on the rank's clock; null if it was before the recording")
    end_bytes = Bytes("Memory allocated at the end")
    peak_reserved_bytes = Bytes.or_null("Most memory reserved by the allocator at a time; null if unknown")
    end_reserved_bytes = Bytes.or_null("Memory reserved at the end; null if unknown")
    largest_free_bytes = Bytes.or_null("Largest free block when the snapshot was taken; null without one")
    fragmentation = Share.or_null("Fragmentation of the free memory, 0 to 1; null without a snapshot")
    inactive_split_bytes = Bytes.or_null("Free parts of partly used device blocks; null without a snapshot")
    needlessly_reserved_bytes = Bytes.or_null(
        "Memory reserved while as much was free in holes too small to use; null if unknown"
    )
    iterations = Number("Iterations that growth is computed from")
    growth_bytes_per_iteration = MeanBytes.or_null(
        "Median growth between the ends of two iterations; null with fewer than two iterations"
    )


class Site(OfDevice):
    """Memory of one allocation site on one device."""

    site = Text("The allocation site")
    allocations = Count("Number of allocations")
    allocated_bytes = Bytes("Sum of all allocations")
    peak_bytes = Bytes("Most memory at a time")
    bytes_at_peak = Bytes("Memory at the device's peak")
    end_bytes = Bytes("Memory at the end")
    growth_bytes_per_iteration = MeanBytes.or_null(
        "Median growth between the ends of two iterations; null with fewer than two iterations"
    )


class IterationEnd(OfDevice):
    """Memory of a device at the end of an iteration."""

    iteration = Int.or_null("Number of the iteration; null if its end is inferred")
    end_ns = Ns("Time on the rank's clock")
    allocated_bytes = Bytes("Memory allocated")
    change_bytes = Bytes.or_null("Change since the iteration before; null for the first")
    reserved_bytes = Bytes.or_null("Memory reserved by the allocator; null if unknown")


class SiteChange(Row):
    """Memory of one allocation site on both sides. Amounts are means over ranks and devices."""

    site = Text("The allocation site")
    before_bytes_at_peak = MeanBytes("At the device's peak: before")
    after_bytes_at_peak = MeanBytes("At the device's peak: after")
    change_bytes_at_peak = MeanBytes("At the device's peak: the change")
    before_end_bytes = MeanBytes("At the end: before")
    after_end_bytes = MeanBytes("At the end: after")
    change_end_bytes = MeanBytes("At the end: the change")
    before_allocations = Float("Number of allocations before")
    after_allocations = Float("Number of allocations after")
