"""The document of `analyze --json` and `report --json`: a new key is one more line here, and its value in `report.json`.

Rows of tables are declared in `facts.columns`, `findings.scorecard` and `compare.bench`.
"""

from __future__ import annotations

from bridge_profiling.compare.bench import ComparedCommunication, ComparedCopies
from bridge_profiling.facts import columns
from bridge_profiling.facts.columns import PROFILER, OfRank
from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.facts.types import (
    Bytes,
    Count,
    Flag,
    Gbs,
    Int,
    Kind,
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
    mapping,
    one,
)
from bridge_profiling.findings import Confidence
from bridge_profiling.findings.scorecard import Check
from bridge_profiling.report.verdict import Outcome

CONFIDENCE = choice(*Confidence)
PAIR = Kind({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2})

#: Global ranks as keys.
RANKS = "^[0-9]+$"


class Document(Row):
    """A document that a command prints."""

    schema_version = choice(1)("Keys may be added; within a version none changes its meaning")


class Verdict(Row):
    """The answer in short, as `bridge-profiling report` prints it, with the numbers in its sentences."""

    outcome = choice(*Outcome)(
        "`finding`: there is at least one. `nothing_found`: no number exceeds its threshold. Else nothing can be judged: "
        "`no_device_work` (of a job with devices), `memory_only` (no trace), `too_little` (no iteration is marked, or "
        "nothing was captured), or `not_judged` (every trace lost more than 1% of its device events)"
    )
    headline = Text("The most important sentence: the first finding's title if there is one")
    sentences = many(Text)("At most three sentences: the iteration, its parts, the potential saving")
    first = many(Text)("What to change first: one sentence for each of the first three findings")
    notes = many(Text)("Sentences about what limits the answer")
    finding = Text.or_null("The finding that the headline is about: `id` of the first of `findings`")
    iteration_us = Us.or_null(
        "Duration of the typical iteration: the median over ranks of each rank's median iteration; null without iterations"
    )
    iterations = Count.or_null("Iterations behind that median, on the rank that has the fewest")
    recoverable_us_per_iteration = Us.or_null(
        "Potential saving of that finding: an estimate; null if unknown, or without findings"
    )
    at_most_us_per_iteration = Us.or_null(
        "Upper bound of that saving; null if the saving is unknown or the finding costs no time, or without findings"
    )
    recoverable_share = Share.or_null("The same as a share of `unprofiled_us`, or of `iteration_us` if that is null")
    total_recoverable_us_per_iteration = Us.or_null(
        "Potential saving of all findings together: an estimate; null if it is unknown for each"
    )
    total_recoverable_share = Share.or_null("The same as a share, like `recoverable_share`")
    confidence = CONFIDENCE.or_null("Confidence in that finding; null without findings")
    confidence_reason = Text.or_null("Why the confidence is not high; empty if it is, null without findings")
    profiler_us = Us.or_null(
        "Time that profiling added to an iteration, from the manifests: the median over ranks; null if unknown"
    )
    estimated_profiler_us = Us.or_null(
        "The same, estimated from the recorded host events alone: the mean over iterations; null if no iteration is marked"
    )
    unprofiled_us = Us.or_null(
        "Mean iteration of the job without the profiler's cost, slow iterations included. All savings together are less. "
        "Null if no iteration is marked"
    )
    unprofiled_source = choice("manifest", "estimate").or_null(
        "How the profiler's cost is known; null if no iteration is marked"
    )


class RankPart(Row):
    """The time of a rank's median iteration that has one cause."""

    cause = choice(*(each.removesuffix("_us") for each in BY_CAUSE))(
        "The cause. `by_cause` of `compare --json` has the same names with `_us`"
    )
    name = Text("The cause in the words of the terminal and the page")
    time_us = Us("Time per iteration. The parts add up to the iteration")
    share = Share("Share of the iteration; of the run, the mean over its ranks")


class Part(RankPart):
    """The time of the typical iteration that has one cause."""

    low_share = Share("The smallest share of a rank")
    high_share = Share("The largest share of a rank")


class RankBudget(OfRank):
    """A rank's median iteration, and its parts."""

    iteration_us = Us("Duration of the rank's median iteration")
    iterations = Count("Number of iterations that it is the median of")
    waiting_known = Flag("Whether waiting for other ranks is known; else `communication` contains it")
    parts = many(RankPart)("Every cause, in a fixed order")


class Budget(Row):
    """Where the time of the typical iteration goes, by cause; from ranks with device work, by the main profiler."""

    source = PROFILER("The profiler that captured the most ranks")
    iteration_us = Us.or_null("The same as `verdict.iteration_us`; null without device work")
    waiting_known = Flag("Whether waiting for other ranks is known on every rank; else `communication` contains it")
    parts = many(Part)("Every cause, in a fixed order; empty without iterations")
    ranks = many(RankBudget)("The same for each rank that has iterations and device work")


class PhaseMemory(OfRank):
    """Device memory that was allocated around a phase, in the captured iterations of a rank."""

    phase = Text("`forward`, `backward`, …")
    count = Count("Number of calls")
    before_bytes = MeanBytes("Mean before the phase")
    after_bytes = MeanBytes("Mean after it")
    peak_bytes = Bytes("Highest peak in it")


class WallClock(OfRank):
    """A timer of DeepSpeed's wall-clock breakdown, in the captured iterations of a rank."""

    timer = Text("DeepSpeed's name of the timer")
    mean_us = Us("Mean of an iteration")
    deviation_us = Us("Standard deviation over the iterations")
    share = Share.or_null("The mean as a share of the profiled iteration; null if that is unknown")


class FlopsProfile(OfRank):
    """DeepSpeed's FLOPs profile of a rank."""

    iteration = Int("The iteration that was profiled")
    forward_flops = Count("Floating-point operations of its forward pass")
    parameters = Count("Parameters of the model on this rank")
    forward_us = Us.or_null("Time of the forward pass by the engine's timer; null if it has none")
    tflops = Tflops.or_null("Speed of the forward pass; null without its time")


class TrainingSizes(OfRank):
    """Sizes of a rank's model and data, as the integration in its loop knows them."""

    parameters = Count.or_null("Elements of the model's parameters; of this rank's part with Megatron")
    trainable_parameters = Count.or_null("Those that are trained")
    batch_size = Count.or_null("Samples that the rank fetches at a time: its micro-batch")
    dataset_size = Count.or_null("Samples of the data set; null if it has no length")
    gradient_accumulation = Count.or_null("Micro-batches of an iteration")


class Measured(Row):
    """What an integration measured inside the window, from the manifests."""

    training = many(TrainingSizes)("By rank; empty if no integration knows the model or the data")
    phase_memory = many(PhaseMemory)("By rank and phase; empty if no integration measured it")
    wall_clock = many(WallClock)("By rank and timer; empty without DeepSpeed's breakdown")
    flops_profile = many(FlopsProfile)("By rank; empty without DeepSpeed's FLOPs profiler")


class LostRecords(Row):
    """Records of a capture that could not be used: damaged, without a usable time, or ambiguous."""

    total = Count("Number of records of any kind")
    device = Count("Number of device events among them")
    of_device = Count("Number of device events in the capture, lost or not")


class RankAnswer(OfRank):
    """One rank by one profiler."""

    source = PROFILER("The profiler")
    files = many(Text)("Paths of the capture's files")
    coordinates = mapping(PAIR).or_null("By parallel dimension (`tp`, `pp`, …): the rank in it, and its size; null if unknown")
    judged = Flag("Whether at most 1% of the device events were lost; no finding is about other ranks")
    lost = one(LostRecords)("Records of the capture that could not be used")
    device = one(columns.Device)("Device time over the whole capture")
    iterations = many(columns.Iteration)("Iterations in order; empty if none is marked")
    host_iterations = many(columns.HostIteration)("Iterations of a rank without device work; empty of others")
    phases = many(columns.Phase)("Phases of the step and other ranges by name; the training's own first")
    operators = many(columns.Operator)("Host operators by name, the most own time first; empty if not recorded")
    matrix_products = many(columns.MatrixProduct)(
        "By operator and shapes, the most device time first; empty if shapes are not recorded"
    )
    kernels = many(columns.Kernel)("Kernels by name, the most time first")
    kernel_groups = many(columns.KernelGroup)("Kernels and copies by what they do, the most time first")
    system_calls = many(columns.SystemCall)("System calls by name, the most time first; empty unless nsys recorded them")
    cuda_memory = many(columns.CudaMemory)("Memory that CUDA allocated; empty unless nsys recorded it")


class Collective(Row):
    """Communication of one operation in one group, over the whole capture."""

    operation = Text.or_null("`all_reduce`, `all_gather`, `reduce_scatter`, `send`, …; null if unknown")
    group = Text.or_null("The program's name of the group, else torch's; null if unknown")
    ranks = many(Number).or_null("Global ranks of the group; null if unknown")
    size = Count.or_null("Number of ranks in the group; null if unknown")
    count = Count("Number of operations")
    matched_count = Count("Number of operations that were captured on at least two ranks")
    bytes = Bytes.or_null("Sum of one rank's messages; null if unknown")
    transfer_us = Us.or_null("Time of the matched operations without waiting for other ranks; null if none is matched")
    wait_us = mapping(Us, RANKS)("Time that each rank waited for others, by rank")
    algorithm_bandwidth_gbs = Gbs.or_null("Message size over transfer time; null if unknown")
    bus_bandwidth_gbs = Gbs.or_null("As in nccl-tests, comparable with the speed of the link; null if unknown")
    dimension = Text.or_null(
        "Parallel dimensions that the group spans: `tp`, `cp-dp`, …; `all` for every rank; null if unknown"
    )


class ComparedIteration(Row):
    """The run's median iteration."""

    subject = Text("The measured function, as it was typed")
    iteration_us = Us.or_null("The run's median iteration; null if no iteration is marked")
    of = choice("iterations that were not profiled", "captured iterations")("What that is the median of")
    reason = Text.or_null("Why nothing is compared; null otherwise")


class ComparedStep(ComparedIteration):
    """The run's median iteration compared with what `bench step` measured."""

    alone_us = Us.or_null("Median of the step alone; null if not comparable")


class ComparedLoader(ComparedIteration):
    """The run's median iteration compared with what `bench data-loader` measured."""

    batch_us = Us.or_null("Time for a batch alone, at the fastest setting; null if unknown")


class AgainstBench(Row):
    """The run compared with results of `bridge-profiling bench`."""

    file = Text("The file of results")
    found_beside_captures = Flag("Whether the file was found next to the captures instead of named")
    communication = many(ComparedCommunication)("By operation and group")
    copies = many(ComparedCopies)("By direction and memory of the host")
    step = one(ComparedStep).or_null("The step alone; null without such a result")
    data_loader = one(ComparedLoader).or_null("The data loader alone; null without such a result")


class Event(Row):
    """A place in a capture that shows a finding."""

    rank = Number("The rank whose capture contains it")
    name = Text("A kernel, an operator, a range or an allocation site")
    iteration = Int.or_null("Null outside of iterations, and for several iterations together")
    start_ns = Ns.or_null("Start on the rank's clock, of the longest one of several; null if unknown")
    duration_us = Us.or_null("Total of all that it stands for; null if unknown")
    count = Count("How many it stands for")


class Occurrence(Row):
    """The captured iterations that a cause strikes, where these are not most of them."""

    iterations = many(Int)("Numbers of the iterations")
    of = Count("How many iterations count")
    each_us = Us("Mean time that one of them loses, on the rank that loses most")


class Finding(Row):
    """A cause of lost time, or of memory trouble."""

    id = Text("Stable name, such as `data_loading`. Releases may add findings")
    title = Text("One sentence with the most important number")
    ranks = many(Number)("The responsible ranks, not those that wait for them")
    evidence = Kind({"type": "object"})("Values by name, with the unit at the end of the name; which ones depends on `id`")
    recoverable_us_per_iteration = Us.or_null("Potential saving: an estimate; null if it costs no time, or the cost is unknown")
    at_most_us_per_iteration = Us.or_null(
        "Upper bound of the potential saving: at least the estimate, and at most `verdict.unprofiled_us`, except for "
        "`slow_iterations` and for causes in captured iterations that are excluded from means. Bounds of several findings "
        "do not add up. Null if the saving is unknown or it costs no time"
    )
    confidence = CONFIDENCE("How certain the finding is")
    confidence_reason = Text("Why the confidence is not high; empty if it is")
    action = Text("What to change, the first step first")
    events = many(Event)("The places that show it best")
    severe = Flag("Whether it exceeds the threshold for trouble, not only that for attention")
    occurrence = one(Occurrence).or_null("Which iterations it strikes; null if it is about all of them")


class Caveat(Row):
    """Something that a capture cannot show, or that was read differently than it was written."""

    code = Text("Stable name, such as `few_iterations`. Releases may add codes")
    text = Text("Sentences for the reader")
    ranks = many(Number)("The ranks that it applies to; empty for the whole run")
    file = Text.or_null("The file that it is about; null if it is about none")


class RunDocument(Document):
    """Every answer about a run, as `bridge-profiling analyze RUN --json` and `bridge-profiling report RUN --json` print it."""

    verdict = one(Verdict)("The answer in short")
    scorecard = many(Check)("The checklist of a fast training")
    measured = one(Measured)("What an integration measured")
    budget = one(Budget)("Where the time of the typical iteration goes")
    ranks = many(RankAnswer)("One for each rank and profiler")
    collectives = many(Collective)("Communication by operation and group")
    collectives_by_size = many(columns.SizedCollective)(
        "The same by size of message, with what compute hides; the most time first"
    )
    memory = many(columns.DeviceMemory)("Memory by rank and device; empty if none was recorded")
    pipeline = many(columns.Stage)("Pipeline stages; empty without a pipeline, or if its messages are not recorded")
    pipeline_waits = many(columns.StageWait)("Which pipeline stage waits for which, the longest waiting first")
    gpu_metrics = many(columns.GpuMetric)("Hardware counters; empty unless nsys sampled them")
    kernel_counters = many(columns.KernelCounters)("The same while each kernel ran, most device time first")
    bench = one(AgainstBench).or_null("Comparison with benchmarks; null without any")
    findings = many(Finding)("Where time is lost or memory is short, the largest potential saving first")
    limitations = many(Text)("Sentences: what these captures cannot show, and how they were read differently")
    caveats = many(Caveat)("The same as data")
