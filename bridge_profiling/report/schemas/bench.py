"""The documents of `bench … --json`, one for each benchmark: also the entries of `results` in the file that `-o` writes."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from bridge_profiling.report.schemas.units import Bandwidth, Bytes, Count, Nanoseconds, RankKey, doc


class Estimate(TypedDict):
    """Statistics of a repeated measurement, in the unit of the key."""

    count: Annotated[Count, doc("Number of samples")]
    median: Annotated[float, doc("Median")]
    mean: Annotated[float, doc("Mean")]
    low: Annotated[float | None, doc("Lower bound of the median at 95%; null with too few samples")]
    high: Annotated[float | None, doc("Upper bound of the median at 95%; null with too few samples")]


class _Result(TypedDict):
    measured_unix_ns: Annotated[Nanoseconds, doc("Time of the measurement, since 1970")]
    host: Annotated[str, doc("Name of the host")]
    device: Annotated[str, doc("Name of the GPU, or `cpu`")]
    devices_of_host: Annotated[Count, doc("Number of GPUs of the host")]
    subject: Annotated[str | None, doc("The measured function, as it was typed; null for links and copies")]
    versions: Annotated[dict[str, str | None], doc("Versions of Python, torch, CUDA, …")]
    limitations: Annotated[list[str], doc("Sentences: what was not measured, and why")]


class CollectivesRow(TypedDict):
    """One operation with messages of one size."""

    operation: Annotated[
        Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "send_recv"], doc("The operation")
    ]
    message_bytes: Annotated[Bytes, doc("The larger of one rank's input and output")]
    operations_per_sample: Annotated[Count, doc("Operations that were timed together")]
    time_us: Annotated[Estimate, doc("Microseconds of one operation, on the slowest rank")]
    algorithm_bandwidth_gbs: Annotated[Bandwidth, doc("Message size over the median time")]
    bus_bandwidth_gbs: Annotated[Bandwidth, doc("As in nccl-tests, comparable with the speed of the link")]
    correct: Annotated[bool, doc("Whether every rank received the right data")]


class Link(TypedDict):
    """What selects the links between the ranks."""

    environment: Annotated[dict[str, str], doc("Variables that select links")]
    peer_access: NotRequired[Annotated[dict[RankKey, bool], doc("Whether a GPU can access each other one; only with GPUs")]]
    topology: NotRequired[Annotated[list[str] | None, doc("Lines of `nvidia-smi topo -m`; only with GPUs")]]


class CollectivesResult(_Result):
    """Communication by operation and size."""

    kind: Annotated[Literal["collectives"], doc("The benchmark")]
    world_size: Annotated[Count, doc("Number of ranks")]
    hosts: Annotated[Count, doc("Number of hosts")]
    ranks_per_host: Annotated[Count, doc("Most ranks on one host")]
    backend: Annotated[str, doc("`nccl` or `gloo`")]
    link: Annotated[Link, doc("What selects the links")]
    dtype: Annotated[str, doc("Element type")]
    rows: Annotated[list[CollectivesRow], doc("By operation and size")]


class CopiesRow(TypedDict):
    """Copies of one kind and size."""

    direction: Annotated[Literal["HtoD", "DtoH"], doc("From host to device, or from device to host")]
    host_memory: Annotated[Literal["pinned", "pageable"], doc("The host's memory")]
    bytes: Annotated[Bytes, doc("Size of the copy")]
    time_us: Annotated[Estimate, doc("Microseconds of one copy")]
    bandwidth_gbs: Annotated[Bandwidth, doc("Size over the median time")]
    correct: Annotated[bool, doc("Whether the right data arrived")]


class CopiesResult(_Result):
    """Copies between host and device."""

    kind: Annotated[Literal["copies"], doc("The benchmark")]
    rows: Annotated[list[CopiesRow], doc("By direction, memory of the host and size")]


class LoaderSetting(TypedDict):
    """A setting of the data loader."""

    workers: Annotated[Count, doc("Worker processes")]
    pin_memory: Annotated[bool, doc("Whether batches are pinned")]
    prefetch: Annotated[Count | None, doc("Batches that each worker prefetches; null without workers")]


class LoaderRow(LoaderSetting):
    """The data loader with one setting. Without a measurement, rates are null."""

    status: Annotated[str, doc("`measured`, or why it is not")]
    batches: Annotated[Count, doc("Number of batches loaded")]
    samples_per_batch: Annotated[Count | None, doc("Samples of a batch; null if unknown")]
    first_batch_s: Annotated[float | None, doc("Seconds until the first batch")]
    batches_per_s: Annotated[Estimate | None, doc("Batches per second")]
    samples_per_s: Annotated[Estimate | None, doc("Samples per second; null if the size of a batch is unknown")]


class LoaderAdvice(LoaderSetting):
    """The cheapest of the settings that are as fast as the fastest."""

    reason: Annotated[str, doc("Why this setting")]


class DataLoaderResult(_Result):
    """A data loader by workers, pinning and prefetching."""

    kind: Annotated[Literal["data_loader"], doc("The benchmark")]
    rows: Annotated[list[LoaderRow], doc("By setting")]
    recommendation: Annotated[
        LoaderAdvice | None, doc("The recommended setting; null if none can be set, or none was measured")
    ]


class StepRow(TypedDict):
    """The step's measurement."""

    warmup: Annotated[Count, doc("Iterations before the first one measured")]
    iterations: Annotated[Count, doc("Iterations measured")]
    time_us: Annotated[Estimate, doc("Microseconds of one iteration")]
    iterations_per_s: Annotated[Estimate, doc("Iterations per second")]
    samples_per_iteration: Annotated[Count | None, doc("Value of --samples; null without it")]
    samples_per_s: Annotated[Estimate | None, doc("Samples per second; null without --samples")]


class StepResult(_Result):
    """A step on its own."""

    kind: Annotated[Literal["step"], doc("The benchmark")]
    rows: Annotated[list[StepRow], doc("One row")]
