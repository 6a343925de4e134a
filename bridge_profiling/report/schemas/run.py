"""The document of `analyze --json` and `report --json`: a new key is one more line here, and its value in `report.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from bridge_profiling.report.schemas.units import (
    Bandwidth,
    Bytes,
    Count,
    MeanBytes,
    Microseconds,
    Nanoseconds,
    Rank,
    RankKey,
    Share,
    Teraflops,
    doc,
)

Profiler = Literal["kineto", "nsys"]
Confidence = Literal["high", "medium", "low"]

#: `attribution.parts.BY_CAUSE`.
Cause = Literal[
    "compute",
    "communication",
    "waiting",
    "data_loading",
    "host_launch",
    "small_kernels",
    "host_sync",
    "pageable_copy",
    "copy",
    "checkpoint",
    "profiler",
    "dependency_stalled",
]


class Verdict(TypedDict):
    """The answer in short, as `bridge-profiling report` prints it, with the numbers in its sentences."""

    outcome: Annotated[
        Literal["finding", "nothing_found", "no_device_work", "memory_only", "too_little", "not_judged"],
        doc(
            "`finding`: there is at least one. `nothing_found`: no number exceeds its threshold. Else nothing can be judged: "
            "`no_device_work` (of a job with devices), `memory_only` (no trace), `too_little` (no iteration is marked, or "
            "nothing was captured), or `not_judged` (every trace lost more than 1% of its device events)"
        ),
    ]
    headline: Annotated[str, doc("The most important sentence: the first finding's title if there is one")]
    sentences: Annotated[list[str], doc("At most three sentences: the iteration, its parts, the potential saving")]
    first: Annotated[list[str], doc("What to change first: one sentence for each of the first three findings")]
    notes: Annotated[list[str], doc("Sentences about what limits the answer")]
    finding: Annotated[str | None, doc("The finding that the headline is about: `id` of the first of `findings`")]
    iteration_us: Annotated[
        Microseconds | None,
        doc(
            "Duration of the typical iteration: the median over ranks of each rank's median iteration; null without iterations"
        ),
    ]
    iterations: Annotated[Count | None, doc("Iterations behind that median, on the rank that has the fewest")]
    recoverable_us_per_iteration: Annotated[
        Microseconds | None, doc("Potential saving of that finding: an estimate; null if unknown, or without findings")
    ]
    at_most_us_per_iteration: Annotated[
        Microseconds | None,
        doc("Upper bound of that saving; null if the saving is unknown or the finding costs no time, or without findings"),
    ]
    recoverable_share: Annotated[
        Share | None, doc("The same as a share of `unprofiled_us`, or of `iteration_us` if that is null")
    ]
    total_recoverable_us_per_iteration: Annotated[
        Microseconds | None, doc("Potential saving of all findings together: an estimate; null if it is unknown for each")
    ]
    total_recoverable_share: Annotated[Share | None, doc("The same as a share, like `recoverable_share`")]
    confidence: Annotated[Confidence | None, doc("Confidence in that finding; null without findings")]
    confidence_reason: Annotated[str | None, doc("Why the confidence is not high; empty if it is, null without findings")]
    profiler_us: Annotated[
        Microseconds | None,
        doc("Time that profiling added to an iteration, from the manifests: the median over ranks; null if unknown"),
    ]
    estimated_profiler_us: Annotated[
        Microseconds | None,
        doc(
            "The same, estimated from the recorded host events alone: the mean over iterations; null if no iteration is marked"
        ),
    ]
    unprofiled_us: Annotated[
        Microseconds | None,
        doc(
            "Mean iteration of the job without the profiler's cost, slow iterations included. All savings together are less. "
            "Null if no iteration is marked"
        ),
    ]
    unprofiled_source: Annotated[
        Literal["manifest", "estimate"] | None, doc("How the profiler's cost is known; null if no iteration is marked")
    ]


class RankPart(TypedDict):
    """The time of a rank's median iteration that has one cause."""

    cause: Annotated[Cause, doc("The cause. `by_cause` of `compare --json` has the same names with `_us`")]
    name: Annotated[str, doc("The cause in the words of the terminal and the page")]
    time_us: Annotated[Microseconds, doc("Time per iteration. The parts add up to the iteration")]
    share: Annotated[Share, doc("Share of the iteration; of the run, the mean over its ranks")]


class Part(RankPart):
    """The time of the typical iteration that has one cause."""

    low_share: Annotated[Share, doc("The smallest share of a rank")]
    high_share: Annotated[Share, doc("The largest share of a rank")]


class RankBudget(TypedDict):
    """A rank's median iteration, and its parts."""

    rank: Annotated[Rank, doc("Global rank")]
    iteration_us: Annotated[Microseconds, doc("Duration of the rank's median iteration")]
    iterations: Annotated[Count, doc("Number of iterations that it is the median of")]
    waiting_known: Annotated[bool, doc("Whether waiting for other ranks is known; else `communication` contains it")]
    parts: Annotated[list[RankPart], doc("Every cause, in a fixed order")]


class Budget(TypedDict):
    """Where the time of the typical iteration goes, by cause; from ranks with device work, by the main profiler."""

    source: Annotated[Profiler, doc("The profiler that captured the most ranks")]
    iteration_us: Annotated[Microseconds | None, doc("The same as `verdict.iteration_us`; null without device work")]
    waiting_known: Annotated[
        bool, doc("Whether waiting for other ranks is known on every rank; else `communication` contains it")
    ]
    parts: Annotated[list[Part], doc("Every cause, in a fixed order; empty without iterations")]
    ranks: Annotated[list[RankBudget], doc("The same for each rank that has iterations and device work")]


class Check(TypedDict):
    """One question of the checklist of a fast training."""

    check: Annotated[
        Literal[
            "device_busy",
            "memory_headroom",
            "data_loading",
            "mixed_precision",
            "fused_attention",
            "fused_optimizer",
            "compiled_or_graphed",
            "overlapped_communication",
            "gradient_accumulation",
        ],
        doc("The question. docs/concepts/scorecard.md defines each; of a training on CPUs there is `data_loading` alone"),
    ]
    answer: Annotated[Literal["yes", "no", "unknown"], doc("`yes` is good")]
    value: Annotated[Share | None, doc("The number behind the answer, of the rank that does worst; null if unknown")]
    limit: Annotated[Share, doc("What it is compared with")]
    rank: Annotated[Rank | None, doc("That rank; null if unknown, and of a share of the whole run")]
    reason: Annotated[str, doc("Why the answer is unknown; empty if it is known")]


class PhaseMemory(TypedDict):
    """Device memory that was allocated around a phase, in the captured iterations of a rank."""

    rank: Annotated[Rank, doc("Global rank")]
    phase: Annotated[str, doc("`forward`, `backward`, …")]
    count: Annotated[Count, doc("Number of calls")]
    before_bytes: Annotated[MeanBytes, doc("Mean before the phase")]
    after_bytes: Annotated[MeanBytes, doc("Mean after it")]
    peak_bytes: Annotated[Bytes, doc("Highest peak in it")]


class WallClock(TypedDict):
    """A timer of DeepSpeed's wall-clock breakdown, in the captured iterations of a rank."""

    rank: Annotated[Rank, doc("Global rank")]
    timer: Annotated[str, doc("DeepSpeed's name of the timer")]
    mean_us: Annotated[Microseconds, doc("Mean of an iteration")]
    deviation_us: Annotated[Microseconds, doc("Standard deviation over the iterations")]
    share: Annotated[Share | None, doc("The mean as a share of the profiled iteration; null if that is unknown")]


class FlopsProfile(TypedDict):
    """DeepSpeed's FLOPs profile of a rank."""

    rank: Annotated[Rank, doc("Global rank")]
    iteration: Annotated[int, doc("The iteration that was profiled")]
    forward_flops: Annotated[Count, doc("Floating-point operations of its forward pass")]
    parameters: Annotated[Count, doc("Parameters of the model on this rank")]
    forward_us: Annotated[Microseconds | None, doc("Time of the forward pass by the engine's timer; null if it has none")]
    tflops: Annotated[Teraflops | None, doc("Speed of the forward pass; null without its time")]


class TrainingSizes(TypedDict):
    """Sizes of a rank's model and data, as the integration in its loop knows them."""

    rank: Annotated[Rank, doc("Global rank")]
    parameters: Annotated[Count | None, doc("Elements of the model's parameters; of this rank's part with Megatron")]
    trainable_parameters: Annotated[Count | None, doc("Those that are trained")]
    batch_size: Annotated[Count | None, doc("Samples that the rank fetches at a time: its micro-batch")]
    dataset_size: Annotated[Count | None, doc("Samples of the data set; null if it has no length")]
    gradient_accumulation: Annotated[Count | None, doc("Micro-batches of an iteration")]


class Measured(TypedDict):
    """What an integration measured inside the window, from the manifests."""

    training: Annotated[list[TrainingSizes], doc("By rank; empty if no integration knows the model or the data")]

    phase_memory: Annotated[list[PhaseMemory], doc("By rank and phase; empty if no integration measured it")]
    wall_clock: Annotated[list[WallClock], doc("By rank and timer; empty without DeepSpeed's breakdown")]
    flops_profile: Annotated[list[FlopsProfile], doc("By rank; empty without DeepSpeed's FLOPs profiler")]


class Device(TypedDict):
    """Device time over the whole capture. Times are unions over all streams."""

    span_us: Annotated[Microseconds, doc("From the start of the first device event to the end of the last one")]
    busy_us: Annotated[Microseconds, doc("Something ran")]
    idle_us: Annotated[Microseconds, doc("Nothing ran")]
    compute_us: Annotated[Microseconds, doc("A compute kernel ran")]
    communication_us: Annotated[Microseconds, doc("A communication kernel ran")]
    exposed_communication_us: Annotated[Microseconds, doc("Communication ran, and nothing else")]
    overlapped_communication_us: Annotated[Microseconds, doc("Communication and compute ran at the same time")]
    memcpy_us: Annotated[Microseconds, doc("A copy ran")]
    memset_us: Annotated[Microseconds, doc("A memset ran")]
    kernel_count: Annotated[Count, doc("Number of kernels, with those that communicate")]
    communication_kernel_count: Annotated[Count, doc("Number of kernels that communicate")]


class Iteration(TypedDict):
    """Device time in one iteration. Compute, launch-starved, blocked and dependency-stalled time add up to the duration."""

    iteration: Annotated[int, doc("Number of the iteration")]
    duration_us: Annotated[Microseconds, doc("Duration of the iteration on the device")]
    compute_us: Annotated[Microseconds, doc("A compute kernel ran")]
    communication_us: Annotated[Microseconds, doc("A communication kernel ran")]
    exposed_communication_us: Annotated[Microseconds, doc("Communication ran, and nothing else")]
    idle_us: Annotated[Microseconds, doc("Nothing ran")]
    launch_starved_us: Annotated[Microseconds, doc("No compute, because the host had not launched the next kernel")]
    blocked_us: Annotated[Microseconds, doc("No compute, because the next kernel waited for communication or a copy")]
    dependency_stalled_us: Annotated[Microseconds, doc("No compute, between kernels that depend on each other")]
    boundary: Annotated[bool, doc("Whether it is at the profiler's start, stop or flush")]


class Kernel(TypedDict):
    """Kernels of one name on one rank, over the whole capture."""

    name: Annotated[str | None, doc("Demangled name; null if the capture does not record it")]
    kind: Annotated[Literal["compute", "communication"], doc("What the kernel does")]
    group: Annotated[str, doc("What it does in more detail, by its name: see `kernel_groups`")]
    count: Annotated[Count, doc("Number of calls")]
    total_us: Annotated[Microseconds, doc("Time of all calls; concurrent calls count twice")]
    mean_us: Annotated[Microseconds, doc("Mean time of a call")]
    min_us: Annotated[Microseconds, doc("Shortest call")]
    max_us: Annotated[Microseconds, doc("Longest call")]
    grid: Annotated[str | None, doc("Blocks of most launches, `132x1x1`; null if not recorded")]
    block: Annotated[str | None, doc("Threads of a block, `256x1x1`")]
    registers_per_thread: Annotated[Count | None, doc("Registers of a thread; null if not recorded")]
    shared_memory_bytes: Annotated[Bytes | None, doc("Shared memory of a block, static and dynamic; null if not recorded")]
    configurations: Annotated[Count, doc("How many different launches (grid, block, registers, shared memory) there were")]


class HostIteration(TypedDict):
    """An iteration of a training on CPUs, by the thread of its loop. The parts up to `other_us` add up to the duration."""

    iteration: Annotated[int, doc("Number of the iteration")]
    boundary: Annotated[bool, doc("Whether it is at the profiler's start, stop or flush")]
    duration_us: Annotated[Microseconds, doc("Duration, to the start of the next iteration")]
    data_loading_us: Annotated[Microseconds, doc("In ranges of data loading")]
    checkpoint_us: Annotated[Microseconds, doc("In ranges of saving")]
    communication_us: Annotated[Microseconds, doc("Blocked by a collective, without waiting")]
    waiting_us: Annotated[
        Microseconds | None, doc("Blocked by a collective until another rank arrived; null of one rank alone")
    ]
    operators_us: Annotated[Microseconds, doc("In operators")]
    other_us: Annotated[Microseconds, doc("The rest, Python for the most part")]
    collectives_us: Annotated[Microseconds, doc("A collective ran on any thread, whether it blocked the loop or not")]
    own_us: Annotated[Microseconds, doc("`duration_us` without `waiting_us`")]


class KernelGroup(TypedDict):
    """Kernels, or copies, that do the same on one rank, over the whole capture."""

    group: Annotated[
        str,
        doc("`matrix product`, `attention`, `communication: all_reduce`, `copy`, …; `other` if no pattern knows the name"),
    ]
    count: Annotated[Count, doc("Number of kernels and copies")]
    name_count: Annotated[Count, doc("Number of different names")]
    total_us: Annotated[Microseconds, doc("Their time, added up")]
    share: Annotated[Share, doc("Share of the time of all kernels and copies of the rank")]
    names: Annotated[list[str], doc("Names of the kernels with the most time, at most five")]


class Phase(TypedDict):
    """Ranges of one name on one rank, in a mean iteration. Ranges can be inside each other, so their times do not add up."""

    name: Annotated[str, doc("Name of the range; `autograd` for all that autograd ran, on whichever thread")]
    kind: Annotated[
        Literal["phase", "autograd", "range", "library"],
        doc("Opened by the hook (`phase`), by the program (`range`) or by a library; or all of autograd"),
    ]
    iterations: Annotated[Count, doc("Iterations that means are of; 0 if none is marked, and times are of the whole capture")]
    present: Annotated[Count, doc("Iterations in which the range occurs")]
    calls: Annotated[float | None, doc("Number of ranges; null if unknown")]
    host_us: Annotated[Microseconds | None, doc("Time of the host inside; null if unknown")]
    host_low_us: Annotated[Microseconds | None, doc("The same in the iteration with the least")]
    host_high_us: Annotated[Microseconds | None, doc("The same in the iteration with the most")]
    host_share: Annotated[Share | None, doc("`host_us` as a share of the iteration")]
    device_us: Annotated[Microseconds, doc("Sum of the device events launched inside, by descendants and by autograd too")]
    device_low_us: Annotated[Microseconds, doc("The same in the iteration with the least")]
    device_high_us: Annotated[Microseconds, doc("The same in the iteration with the most")]
    device_share: Annotated[Share, doc("`device_us` as a share of the iteration; above 1 if streams work at the same time")]
    compute_us: Annotated[Microseconds, doc("The part of `device_us` in kernels that compute")]
    communication_us: Annotated[Microseconds, doc("The part of `device_us` in kernels that communicate")]
    kernel_count: Annotated[float, doc("Number of kernels launched inside")]
    backward_host_us: Annotated[
        Microseconds | None,
        doc("Host time of the backward pass of operators that ran inside; null without sequence numbers"),
    ]
    backward_device_us: Annotated[Microseconds | None, doc("Device time of that backward pass")]
    sm_active: Annotated[Share | None, doc("SMs active while what was launched inside ran; null unless nsys sampled it")]
    tensor_active: Annotated[Share | None, doc("Tensor cores active meanwhile")]
    dram_read: Annotated[Share | None, doc("Reads of the device's memory meanwhile, as a share of its bandwidth")]
    dram_write: Annotated[Share | None, doc("Writes to it meanwhile")]


class Operator(TypedDict):
    """Host operators of one name on one rank, over the whole capture."""

    name: Annotated[str | None, doc("Name of the operator; null if the capture does not record it")]
    count: Annotated[Count, doc("Number of calls")]
    self_us: Annotated[Microseconds, doc("Time of the host without operators inside")]
    total_us: Annotated[Microseconds, doc("Time of the host")]
    mean_us: Annotated[Microseconds, doc("Mean time of a call")]
    max_us: Annotated[Microseconds, doc("Longest call")]
    device_self_us: Annotated[Microseconds, doc("Device time launched in it, and in no operator or annotation further in")]
    device_total_us: Annotated[Microseconds, doc("Device time launched in it, descendants included")]
    cpu_memory_self_bytes: Annotated[
        Bytes | None, doc("Host memory allocated less freed in it, and in no operator further in; null if not recorded")
    ]
    cpu_memory_total_bytes: Annotated[Bytes | None, doc("The same, descendants included")]
    device_memory_self_bytes: Annotated[
        Bytes | None, doc("Device memory allocated less freed in it, and in no operator further in; null if not recorded")
    ]
    device_memory_total_bytes: Annotated[Bytes | None, doc("The same, descendants included")]
    module: Annotated[str | None, doc("The `nn.Module` that called it for the most own time; null if not recorded")]


class MatrixProduct(TypedDict):
    """Calls of an operator that computes matrix products, with inputs of the same shapes, over the whole capture."""

    operator: Annotated[str, doc("`aten::mm`, `aten::convolution`, `aten::_scaled_dot_product_flash_attention`, …")]
    shapes: Annotated[str, doc("JSON text of the dimensions of its inputs")]
    precision: Annotated[
        Literal["fp8", "bf16", "fp16", "tf32", "fp32", "fp64"] | None, doc("By the name of `kernel`; null if that does not say")
    ]
    kernel: Annotated[str | None, doc("The product that it launches first; null if none is recognized")]
    count: Annotated[Count, doc("Number of calls that launched compute")]
    device_us: Annotated[Microseconds, doc("Time of all kernels that they launched")]
    flops: Annotated[float | None, doc("Floating-point operations of a call; null if the shapes do not say")]
    tflops: Annotated[Teraflops | None, doc("Operations per second of `device_us`; null if unknown")]
    flops_per_byte: Annotated[
        float | None, doc("Arithmetic intensity, if inputs are read once and the output is written once; null if unknown")
    ]
    peak_tflops: Annotated[Teraflops | None, doc("The device's dense peak for the precision; null if unknown")]
    share_of_peak: Annotated[Share | None, doc("`tflops` as a share of that; null if unknown")]
    memory_tb_s: Annotated[float | None, doc("Bandwidth of the device's memory in TB/s; null if unknown")]
    roof_tflops: Annotated[
        Teraflops | None, doc("The lower of `peak_tflops` and `flops_per_byte` times `memory_tb_s`; null if unknown")
    ]
    share_of_roof: Annotated[Share | None, doc("`tflops` as a share of that; null if unknown")]
    sm_active: Annotated[Share | None, doc("SMs active while its compute ran; null unless nsys sampled it often enough")]
    tensor_active: Annotated[Share | None, doc("Tensor cores active meanwhile")]
    dram_read: Annotated[Share | None, doc("Reads of the device's memory meanwhile, as a share of its bandwidth")]
    dram_write: Annotated[Share | None, doc("Writes to it meanwhile")]
    dram_tb_s: Annotated[float | None, doc("Read and written in TB/s; null if unknown")]
    measured_flops_per_byte: Annotated[float | None, doc("Arithmetic intensity with these bytes; null if unknown")]


class LostRecords(TypedDict):
    """Records of a capture that could not be used: damaged, without a usable time, or ambiguous."""

    total: Annotated[Count, doc("Number of records of any kind")]
    device: Annotated[Count, doc("Number of device events among them")]
    of_device: Annotated[Count, doc("Number of device events in the capture, lost or not")]


class SystemCall(TypedDict):
    """System calls of one name, on the threads of a rank that launch work."""

    name: Annotated[str, doc("`poll`, `pthread_cond_wait`, …")]
    iterations: Annotated[Count, doc("Iterations that count; 0 if none is marked, and then sums are of the whole capture")]
    calls: Annotated[float, doc("Calls of an iteration")]
    time_us: Annotated[Microseconds, doc("Time of an iteration in them")]
    share: Annotated[Share | None, doc("The same as a share of the iteration; null if none is marked")]
    longest_us: Annotated[Microseconds, doc("Longest call")]
    longest_start_ns: Annotated[Nanoseconds, doc("Start of that call on the rank's clock")]


class CudaMemory(TypedDict):
    """Memory of one kind that CUDA allocated on a device of a rank."""

    device: Annotated[int | None, doc("Number of the device in the process; null if unknown")]
    memory: Annotated[
        str, doc("`device`, `pinned`, `managed`, `pageable`, `array`, `device static`, `managed static`, `unknown`")
    ]
    allocations: Annotated[Count, doc("Allocations that nsys reports, of before the window too")]
    frees: Annotated[Count, doc("Frees that nsys reports, of before the window too")]
    in_iterations: Annotated[Count, doc("Allocations and frees in the iterations that count")]
    iterations: Annotated[Count, doc("Iterations that count; 0 if none is marked")]
    allocated_bytes: Annotated[Bytes, doc("Bytes of the allocations")]
    peak_bytes: Annotated[Bytes, doc("Most bytes allocated less freed, as far as nsys reports")]
    end_bytes: Annotated[Bytes, doc("Bytes allocated less freed at its end; negative if older memory was freed")]


class RankAnswer(TypedDict):
    """One rank by one profiler."""

    rank: Annotated[Rank, doc("Global rank")]
    source: Annotated[Profiler, doc("The profiler")]
    files: Annotated[list[str], doc("Paths of the capture's files")]
    coordinates: Annotated[
        dict[str, tuple[int, int]] | None,
        doc("By parallel dimension (`tp`, `pp`, …): the rank in it, and its size; null if unknown"),
    ]
    judged: Annotated[bool, doc("Whether at most 1% of the device events were lost; no finding is about other ranks")]
    lost: Annotated[LostRecords, doc("Records of the capture that could not be used")]
    device: Annotated[Device, doc("Device time over the whole capture")]
    iterations: Annotated[list[Iteration], doc("Iterations in order; empty if none is marked")]
    host_iterations: Annotated[list[HostIteration], doc("Iterations of a rank without device work; empty of others")]
    phases: Annotated[list[Phase], doc("Phases of the step and other ranges by name; the training's own first")]
    operators: Annotated[list[Operator], doc("Host operators by name, the most own time first; empty if not recorded")]
    matrix_products: Annotated[
        list[MatrixProduct], doc("By operator and shapes, the most device time first; empty if shapes are not recorded")
    ]
    kernels: Annotated[list[Kernel], doc("Kernels by name, the most time first")]
    kernel_groups: Annotated[list[KernelGroup], doc("Kernels and copies by what they do, the most time first")]
    system_calls: Annotated[list[SystemCall], doc("System calls by name, the most time first; empty unless nsys recorded them")]
    cuda_memory: Annotated[list[CudaMemory], doc("Memory that CUDA allocated; empty unless nsys recorded it")]


class Collective(TypedDict):
    """Communication of one operation in one group, over the whole capture."""

    operation: Annotated[str | None, doc("`all_reduce`, `all_gather`, `reduce_scatter`, `send`, …; null if unknown")]
    group: Annotated[str | None, doc("The program's name of the group, else torch's; null if unknown")]
    ranks: Annotated[list[Rank] | None, doc("Global ranks of the group; null if unknown")]
    size: Annotated[Count | None, doc("Number of ranks in the group; null if unknown")]
    count: Annotated[Count, doc("Number of operations")]
    matched_count: Annotated[Count, doc("Number of operations that were captured on at least two ranks")]
    bytes: Annotated[Bytes | None, doc("Sum of one rank's messages; null if unknown")]
    transfer_us: Annotated[
        Microseconds | None, doc("Time of the matched operations without waiting for other ranks; null if none is matched")
    ]
    wait_us: Annotated[dict[RankKey, Microseconds], doc("Time that each rank waited for others, by rank")]
    algorithm_bandwidth_gbs: Annotated[Bandwidth | None, doc("Message size over transfer time; null if unknown")]
    bus_bandwidth_gbs: Annotated[
        Bandwidth | None, doc("As in nccl-tests, comparable with the speed of the link; null if unknown")
    ]
    dimension: Annotated[
        str | None, doc("Parallel dimensions that the group spans: `tp`, `cp-dp`, …; `all` for every rank; null if unknown")
    ]


class SizedCollective(TypedDict):
    """Communication of one operation in one group with messages of one size, over the whole capture."""

    operation: Annotated[str | None, doc("As in `collectives`")]
    group: Annotated[str | None, doc("As in `collectives`")]
    ranks: Annotated[list[Rank] | None, doc("As in `collectives`")]
    group_size: Annotated[Count | None, doc("Number of ranks in the group; null if unknown")]
    captured_ranks: Annotated[Count, doc("Captured ranks that take part")]
    message_bytes: Annotated[
        Bytes | None, doc("Larger of input and output of one rank; of all-to-all, the sum of its splits; null if unknown")
    ]
    count: Annotated[Count, doc("Number of operations")]
    matched_count: Annotated[Count, doc("Number of operations that were captured on at least two ranks")]
    mean_us: Annotated[Microseconds, doc("Mean time of a rank's kernel, with waiting")]
    duration_us: Annotated[Microseconds, doc("Time of the kernels of the captured ranks, added up, with waiting")]
    transfer_us: Annotated[Microseconds | None, doc("Time of the matched operations without waiting; null if none is matched")]
    wait_us: Annotated[Microseconds | None, doc("Waiting of the captured ranks, added up; null if none is matched")]
    exposed_us: Annotated[Microseconds | None, doc("The part of `duration_us` in which nothing else ran on the rank's device")]
    overlapped_us: Annotated[Microseconds | None, doc("The part of `duration_us` that compute hides")]
    algorithm_bandwidth_gbs: Annotated[Bandwidth | None, doc("Message size over transfer time; null if unknown")]
    bus_bandwidth_gbs: Annotated[Bandwidth | None, doc("As in nccl-tests; null if unknown")]
    alone_bus_bandwidth_gbs: Annotated[
        Bandwidth | None, doc("The same of such messages alone, by benchmarks; null without a fitting one")
    ]
    link_gbs: Annotated[
        Bandwidth | None, doc("Stated bandwidth of NVLink, one direction of one device; null unless the group is on one host")
    ]
    dimension: Annotated[str | None, doc("As in `collectives`")]


class DeviceMemory(TypedDict):
    """Memory of one device of a rank."""

    rank: Annotated[Rank, doc("Global rank")]
    device: Annotated[int, doc("Number of the device in the process")]
    source: Annotated[Literal["snapshot", "kineto"], doc("A memory snapshot, or the allocations in a trace")]
    peak_bytes: Annotated[Bytes, doc("Most memory allocated at a time")]
    peak_ns: Annotated[Nanoseconds | None, doc("Time of that peak on the rank's clock; null if it was before the recording")]
    end_bytes: Annotated[Bytes, doc("Memory allocated at the end")]
    peak_reserved_bytes: Annotated[Bytes | None, doc("Most memory reserved by the allocator at a time; null if unknown")]
    end_reserved_bytes: Annotated[Bytes | None, doc("Memory reserved at the end; null if unknown")]
    largest_free_bytes: Annotated[Bytes | None, doc("Largest free block when the snapshot was taken; null without one")]
    fragmentation: Annotated[Share | None, doc("Fragmentation of the free memory, 0 to 1; null without a snapshot")]
    inactive_split_bytes: Annotated[Bytes | None, doc("Free parts of partly used device blocks; null without a snapshot")]
    needlessly_reserved_bytes: Annotated[
        Bytes | None, doc("Memory reserved while as much was free in holes too small to use; null if unknown")
    ]
    iterations: Annotated[Count, doc("Iterations that growth is computed from")]
    growth_bytes_per_iteration: Annotated[
        MeanBytes | None, doc("Median growth between the ends of two iterations; null with fewer than two iterations")
    ]


class StageWait(TypedDict):
    """A pipeline stage that waits for another one in sends and receives. Means of an iteration of a rank."""

    stage: Annotated[Count, doc("Number of the stage that waits")]
    waits_for_stage: Annotated[Count, doc("Number of the stage that it waits for")]
    ranks: Annotated[list[Rank], doc("Captured ranks of the stage that waits")]
    count: Annotated[float, doc("Operations that waited")]
    wait_us: Annotated[Microseconds, doc("Waiting, added up over the operations")]


class Stage(TypedDict):
    """A pipeline stage. Times are means of an iteration of a rank."""

    stage: Annotated[Count, doc("Number of the stage")]
    stages: Annotated[Count, doc("Number of stages")]
    ranks: Annotated[list[Rank], doc("Captured ranks of the stage")]
    iterations: Annotated[Count, doc("Number of iterations")]
    microbatches: Annotated[Count | None, doc("Microbatches of an iteration; null if unknown")]
    pipeline_us: Annotated[Microseconds, doc("Duration of the pipeline's part of the iteration")]
    compute_us: Annotated[Microseconds, doc("Compute")]
    excess_compute_us: Annotated[Microseconds, doc("Compute beyond the mean stage: uneven stages; may be negative")]
    bubble_us: Annotated[Microseconds, doc("Waiting for other stages: the three parts that follow")]
    warm_up_us: Annotated[Microseconds, doc("Bubble before the first microbatch")]
    steady_us: Annotated[Microseconds, doc("Bubble between microbatches")]
    cool_down_us: Annotated[Microseconds, doc("Bubble after the last microbatch")]
    other_idle_us: Annotated[Microseconds, doc("Other time without compute")]
    bubble_fraction: Annotated[Share | None, doc("Bubble as a share of `pipeline_us`")]
    ideal_bubble_fraction: Annotated[
        Share | None, doc("The same for an even pipeline that never waits; null if the microbatches are unknown")
    ]


class ComparedTransfers(TypedDict):
    """Transfers of the run compared with those measured alone."""

    count: Annotated[Count, doc("Number captured")]
    compared_count: Annotated[Count, doc("Number compared")]
    alone_us: Annotated[Microseconds | None, doc("Time that the compared ones take alone; null if none is compared")]
    reached_share: Annotated[Share | None, doc("Time alone over time in the run: 1 is as fast as alone")]
    reason: Annotated[str | None, doc("Why some or all are not compared; null if all are")]


class ComparedCommunication(ComparedTransfers):
    """Communication of one operation in one group compared with what `bench collectives` measured."""

    operation: Annotated[str | None, doc("As in `collectives`")]
    group: Annotated[str | None, doc("As in `collectives`")]
    group_name: Annotated[str | None, doc("torch's name of the process group; null if unknown")]
    group_ranks: Annotated[str | None, doc("JSON text of the group's global ranks; null if unknown")]
    group_size: Annotated[Count | None, doc("Number of ranks in the group; null if unknown")]
    transfer_us: Annotated[Microseconds | None, doc("Transfer time in the run of those compared")]
    bus_bandwidth_gbs: Annotated[Bandwidth | None, doc("Bus bandwidth in the run of those compared")]
    alone_bus_bandwidth_gbs: Annotated[Bandwidth | None, doc("Bus bandwidth of the same transfers alone")]


class ComparedCopies(ComparedTransfers):
    """Copies between host and device compared with what `bench copies` measured."""

    direction: Annotated[Literal["HtoD", "DtoH"], doc("From host to device, or from device to host")]
    host_memory: Annotated[str | None, doc("The host's memory: `pinned`, `pageable`, …; null if unknown")]
    copy_us: Annotated[Microseconds | None, doc("Time in the run of those compared")]
    bandwidth_gbs: Annotated[Bandwidth | None, doc("Bandwidth in the run of those compared")]
    alone_bandwidth_gbs: Annotated[Bandwidth | None, doc("Bandwidth of the same copies alone")]


class ComparedIteration(TypedDict):
    """The run's median iteration."""

    subject: Annotated[str, doc("The measured function, as it was typed")]
    iteration_us: Annotated[Microseconds | None, doc("The run's median iteration; null if no iteration is marked")]
    of: Annotated[Literal["iterations that were not profiled", "captured iterations"], doc("What that is the median of")]
    reason: Annotated[str | None, doc("Why nothing is compared; null otherwise")]


class ComparedStep(ComparedIteration):
    """The run's median iteration compared with what `bench step` measured."""

    alone_us: Annotated[Microseconds | None, doc("Median of the step alone; null if not comparable")]


class ComparedLoader(ComparedIteration):
    """The run's median iteration compared with what `bench data-loader` measured."""

    batch_us: Annotated[Microseconds | None, doc("Time for a batch alone, at the fastest setting; null if unknown")]


class AgainstBench(TypedDict):
    """The run compared with results of `bridge-profiling bench`."""

    file: Annotated[str, doc("The file of results")]
    found_beside_captures: Annotated[bool, doc("Whether the file was found next to the captures instead of named")]
    communication: Annotated[list[ComparedCommunication], doc("By operation and group")]
    copies: Annotated[list[ComparedCopies], doc("By direction and memory of the host")]
    step: Annotated[ComparedStep | None, doc("The step alone; null without such a result")]
    data_loader: Annotated[ComparedLoader | None, doc("The data loader alone; null without such a result")]


class Event(TypedDict):
    """A place in a capture that shows a finding."""

    rank: Annotated[Rank, doc("The rank whose capture contains it")]
    name: Annotated[str, doc("A kernel, an operator, a range or an allocation site")]
    iteration: Annotated[int | None, doc("Null outside of iterations, and for several iterations together")]
    start_ns: Annotated[Nanoseconds | None, doc("Start on the rank's clock, of the longest one of several; null if unknown")]
    duration_us: Annotated[Microseconds | None, doc("Total of all that it stands for; null if unknown")]
    count: Annotated[Count, doc("How many it stands for")]


class Occurrence(TypedDict):
    """The captured iterations that a cause strikes, where these are not most of them."""

    iterations: Annotated[list[int], doc("Numbers of the iterations")]
    of: Annotated[Count, doc("How many iterations count")]
    each_us: Annotated[Microseconds, doc("Mean time that one of them loses, on the rank that loses most")]


class Finding(TypedDict):
    """A cause of lost time, or of memory trouble."""

    id: Annotated[str, doc("Stable name, such as `data_loading`. Releases may add findings")]
    title: Annotated[str, doc("One sentence with the most important number")]
    ranks: Annotated[list[Rank], doc("The responsible ranks, not those that wait for them")]
    evidence: Annotated[dict[str, Any], doc("Values by name, with the unit at the end of the name; which ones depends on `id`")]
    recoverable_us_per_iteration: Annotated[
        Microseconds | None, doc("Potential saving: an estimate; null if it costs no time, or the cost is unknown")
    ]
    at_most_us_per_iteration: Annotated[
        Microseconds | None,
        doc(
            "Upper bound of the potential saving: at least the estimate, and at most `verdict.unprofiled_us`, except for "
            "`slow_iterations` and for causes in captured iterations that are excluded from means. Bounds of several findings "
            "do not add up. Null if the saving is unknown or it costs no time"
        ),
    ]
    confidence: Annotated[Confidence, doc("How certain the finding is")]
    confidence_reason: Annotated[str, doc("Why the confidence is not high; empty if it is")]
    action: Annotated[str, doc("What to change, the first step first")]
    events: Annotated[list[Event], doc("The places that show it best")]
    severe: Annotated[bool, doc("Whether it exceeds the threshold for trouble, not only that for attention")]
    occurrence: Annotated[Occurrence | None, doc("Which iterations it strikes; null if it is about all of them")]


class Caveat(TypedDict):
    """Something that a capture cannot show, or that was read differently than it was written."""

    code: Annotated[str, doc("Stable name, such as `few_iterations`. Releases may add codes")]
    text: Annotated[str, doc("Sentences for the reader")]
    ranks: Annotated[list[Rank], doc("The ranks that it applies to; empty for the whole run")]
    file: Annotated[str | None, doc("The file that it is about; null if it is about none")]


class GpuMetric(TypedDict):
    """A hardware counter of a GPU, sampled by nsys in the marked iterations."""

    rank: Annotated[Rank, doc("Global rank")]
    source: Annotated[Literal["kineto", "nsys"], doc("The profiler")]
    device: Annotated[int, doc("Number of the GPU in the machine")]
    metric: Annotated[str, doc("nsys' name, which ends with the unit in brackets")]
    samples: Annotated[Count, doc("Number of samples")]
    mean: Annotated[float, doc("Mean, in that unit")]
    p95: Annotated[float, doc("95th percentile, in that unit")]
    max: Annotated[float, doc("Maximum, in that unit")]


class KernelCounters(TypedDict):
    """Hardware counters of a rank's device while the kernels of one name ran, over the whole capture."""

    rank: Annotated[Rank, doc("Global rank")]
    source: Annotated[Literal["kineto", "nsys"], doc("The profiler")]
    name: Annotated[str, doc("Name of the kernel")]
    group: Annotated[str, doc("What it does, as in `kernel_groups`")]
    count: Annotated[Count, doc("Number of its executions with samples")]
    device_us: Annotated[Microseconds, doc("Their duration")]
    samples_per_call: Annotated[float, doc("Mean duration in times between two samples")]
    sm_active: Annotated[Share | None, doc("SMs active; null if unknown, and if `samples_per_call` is below 1")]
    tensor_active: Annotated[Share | None, doc("Tensor cores active")]
    dram_read: Annotated[Share | None, doc("Reads of the device's memory, as a share of its bandwidth")]
    dram_write: Annotated[Share | None, doc("Writes to it")]
    memory_tb_s: Annotated[float | None, doc("Bandwidth of the device's memory in TB/s; null if unknown")]
    dram_tb_s: Annotated[float | None, doc("Read and written in TB/s; null if unknown")]


class RunDocument(TypedDict):
    """Every answer about a run, as `bridge-profiling analyze RUN --json` and `bridge-profiling report RUN --json` print it."""

    schema_version: Annotated[Literal[1], doc("Keys may be added; within a version none changes its meaning")]
    verdict: Annotated[Verdict, doc("The answer in short")]
    scorecard: Annotated[list[Check], doc("The checklist of a fast training")]
    measured: Annotated[Measured, doc("What an integration measured")]
    budget: Annotated[Budget, doc("Where the time of the typical iteration goes")]
    ranks: Annotated[list[RankAnswer], doc("One for each rank and profiler")]
    collectives: Annotated[list[Collective], doc("Communication by operation and group")]
    collectives_by_size: Annotated[
        list[SizedCollective], doc("The same by size of message, with what compute hides; the most time first")
    ]
    memory: Annotated[list[DeviceMemory], doc("Memory by rank and device; empty if none was recorded")]
    pipeline: Annotated[list[Stage], doc("Pipeline stages; empty without a pipeline, or if its messages are not recorded")]
    pipeline_waits: Annotated[list[StageWait], doc("Which pipeline stage waits for which, the longest waiting first")]
    gpu_metrics: Annotated[list[GpuMetric], doc("Hardware counters; empty unless nsys sampled them")]
    kernel_counters: Annotated[list[KernelCounters], doc("The same while each kernel ran, most device time first")]
    bench: Annotated[AgainstBench | None, doc("Comparison with benchmarks; null without any")]
    findings: Annotated[list[Finding], doc("Where time is lost or memory is short, the largest potential saving first")]
    limitations: Annotated[list[str], doc("Sentences: what these captures cannot show, and how they were read differently")]
    caveats: Annotated[list[Caveat], doc("The same as data")]
