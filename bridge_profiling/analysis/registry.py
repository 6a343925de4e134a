"""Every question about a run: its inputs, and the function that answers it. A new question is one more entry here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.analysis.questions import Blocks, Collected, Columns, Derived, Given, Question, SideTables
from bridge_profiling.compare import bench, events
from bridge_profiling.facts import (
    clocks,
    communication,
    counters,
    counts,
    device,
    device_roles,
    flame_graph,
    host,
    host_iterations,
    host_steps,
    idle,
    idle_gaps,
    kernel_groups,
    kernel_times,
    matching,
    message_sizes,
    nsys_tables,
    operators,
    parts,
    phases,
    pipeline,
    products,
    profiler_cost,
    ranks,
    recording,
)
from bridge_profiling.facts import memory as tables
from bridge_profiling.facts.types import Answer, Chosen
from bridge_profiling.findings import scorecard


def _chosen(rows: Callable[[pa.Table], NDArray[np.bool_]], *names: str) -> Collected:
    """Columns of the host events that a function chooses."""
    return Collected("host_events", names, partial(Chosen, rows))


_DEVICE_EVENTS = Columns(
    "device_events",
    (
        *("kind", "device", "stream", "start_ns", "end_ns", "iteration"),
        *("correlation", "operator", "launch_start_ns", "launch_end_ns", "launch_thread"),
        *("bytes", "direction", "from_memory", "to_memory", "collective"),
    ),
    shared=True,
)
_ITERATIONS = Columns("iterations", ("iteration", "start_ns", "end_ns", "boundary"))
_WAIT_CALLS = _chosen(idle_gaps.host_rows, "name", "start_ns", "correlation")
_SYNCHRONIZATIONS = Columns("synchronizations", ("kind", "stream", "correlation", "producer_stream", "producer_correlation"))
_WORK = Derived(device.device_work, (_DEVICE_EVENTS,))
_WINDOWS = Derived(device.windows, (_ITERATIONS, _DEVICE_EVENTS))
_SPANS = Derived(device.spans, (_WINDOWS, _WORK))
_GAPS = Derived(idle_gaps.gaps, (_DEVICE_EVENTS, _WAIT_CALLS, _SYNCHRONIZATIONS, _WORK, _WINDOWS))
_HOST_EVENTS = Blocks("host_events", host.COLUMNS)
_ACTIVITY = Collected(
    "host_events", host.COLUMNS, host.ActivityCollector, (_DEVICE_EVENTS,), options=("data_loading", "checkpoint")
)
_OPERATORS_BY_ID = Collected("host_events", host.Operators.COLUMNS, host.Operators)
_RECORDING = Collected("host_events", recording.COLUMNS, recording.Recorded, (_DEVICE_EVENTS,))
_PROFILER = Derived(profiler_cost.replay, (_RECORDING, _DEVICE_EVENTS, _GAPS, _WORK, Given.SOURCE))
_ROLES_ON_HOST = _chosen(device_roles.host_rows, "category", "thread", "name", "start_ns", "end_ns")
_OPERATORS = Blocks(
    "host_events",
    ("category", "thread", "name", "start_ns", "end_ns", "operator"),
    optional=(("shapes", "shapes"), ("stacks", "stack")),
)
_MEMORY_EVENTS = Columns("memory_events", ("time_ns", "thread", "device_type", "bytes"))
_KERNEL_NAMES = Columns("device_events", ("name",))
_RANGE_NAMES = _chosen(counts.host_rows, "category", "name", "start_ns", "end_ns")
_COLLECTIVES = Columns("collectives", ("iteration", "operation", "group", "group_name", "group_ranks", "message_bytes"))
_COMMUNICATED = Columns("collectives", ("group_name", "group_ranks", "operation", "message_bytes", "collective"))
_TIMED_RANGES = Collected(
    "host_events",
    ("category", "thread", "name", "start_ns", "end_ns", "sequence"),
    lambda: Chosen(phases.HostRows()),
)
_SHAPED = _chosen(products.host_rows, "category", "thread", "name", "start_ns", "end_ns", "shapes")
_CALLS = Columns("host_events", ("category", "name", "start_ns", "end_ns"))
_ANNOTATIONS = _chosen(operators.unit_rows, "category", "thread", "name", "start_ns", "end_ns")
_FRAMES = Columns("host_events", host.COLUMNS)

_SYSTEM_CALLS = Columns("system_calls", ("thread", "name", "start_ns", "end_ns"))
_CUDA_MEMORY = Columns("cuda_memory", ("time_ns", "device", "memory", "bytes"))

_GPU_METRICS = Columns("gpu_metrics", ("device", "metric", "time_ns", "value"))
_COUNTED = Derived(counters.counted, (_GPU_METRICS, _DEVICE_EVENTS))

_MEMORY = Derived(tables.memory_tables, (Given.DATABASE,))
_MATCHED = SideTables(matching.match, (Given.DATABASE,))
CLOCK_OFFSETS = Question("clock_offsets", "run", clocks.clock_offsets, (_MATCHED, Given.DATABASE, Given.INFOS))
_WAITING = SideTables(communication.measure_waiting, (_MATCHED, Given.DATABASE, CLOCK_OFFSETS))


def _recorded(name: str) -> Callable[[tables.MemoryTables], Answer]:
    return lambda recorded: Answer(getattr(recorded, name), recorded.caveats)


BREAKDOWN = Question("breakdown", "rank", device.breakdown, (_WORK,))
ITERATIONS = Question("iterations", "rank", device.iterations, (_WINDOWS, _WORK, _GAPS))
IDLE_GAPS = Question("idle_gaps", "rank", idle_gaps.idle_gaps, (_GAPS, _SPANS))
IDLE_CAUSES = Question(
    "idle_causes",
    "rank",
    idle.idle_causes,
    (_GAPS, _DEVICE_EVENTS, _ACTIVITY, _OPERATORS_BY_ID, _HOST_EVENTS, _SPANS, _PROFILER),
)
COPIES = Question("copies", "rank", device.copies, (_DEVICE_EVENTS,))
KERNELS = Question("kernels", "source", device.kernels, (Given.DATABASE,))
PRODUCTS = Question("products", "rank", products.products, (_SHAPED, _DEVICE_EVENTS, _KERNEL_NAMES, _COUNTED))
BY_KERNEL = Question("counters_by_kernel", "rank", counters.by_kernel, (_COUNTED, _DEVICE_EVENTS, _KERNEL_NAMES))
HOST_STEPS = Question("host_steps", "rank", host_steps.host_steps, (_HOST_EVENTS, _DEVICE_EVENTS, _ITERATIONS))
KERNEL_TIMES = Question("kernel_times", "rank", kernel_times.kernel_times, (_DEVICE_EVENTS,))
EXPOSURE = Question("exposure", "rank", kernel_times.exposure, (_DEVICE_EVENTS, _COMMUNICATED, _WORK))
_EXPOSURE = SideTables(communication.measure_exposure, (_MATCHED, Given.DATABASE, EXPOSURE, Given.INFOS))
RANKS = Question("ranks", "run", ranks.ranks, (_WAITING, Given.DATABASE, Given.INFOS, ITERATIONS, KERNEL_TIMES))
PIPELINE_BY_RANK = Question(
    "pipeline_by_rank", "run", pipeline.pipeline_by_rank, (_WAITING, Given.DATABASE, Given.INFOS, CLOCK_OFFSETS, KERNEL_TIMES)
)

MEMORY = Question("memory", "run", _recorded("summary"), (_MEMORY,))
LAUNCHES = Question("launch_statistics", "rank", device.launch_statistics, (_DEVICE_EVENTS, _SPANS))
ROLES = Question(
    "device_roles", "rank", device_roles.device_roles, (_DEVICE_EVENTS, _KERNEL_NAMES, _ROLES_ON_HOST, _OPERATORS_BY_ID, _GAPS)
)
ATTRIBUTION = Question("attribution", "run", parts.attribution, (ITERATIONS, IDLE_CAUSES, RANKS))
HOST_ITERATIONS = Question("host_iterations", "run", host_iterations.host_iterations, (HOST_STEPS,))

QUESTIONS = {
    question.name: question
    for question in (
        BREAKDOWN,
        ITERATIONS,
        IDLE_GAPS,
        IDLE_CAUSES,
        COPIES,
        KERNEL_TIMES,
        EXPOSURE,
        Question("profiler_cost", "rank", profiler_cost.recorded, (_PROFILER, _SPANS, _ITERATIONS)),
        LAUNCHES,
        ROLES,
        Question("collective_sizes", "rank", counts.collective_sizes, (_COLLECTIVES,)),
        Question("loop_counts", "rank", counts.loop_counts, (_RANGE_NAMES, _ITERATIONS)),
        Question("operators", "rank", operators.operators, (_OPERATORS, _DEVICE_EVENTS, _MEMORY_EVENTS)),
        Question("longest_calls", "rank", operators.longest_calls, (_CALLS,)),
        Question("flame_graph", "rank", flame_graph.flame_graph, (_FRAMES, _DEVICE_EVENTS, _ITERATIONS)),
        Question("phases", "rank", phases.phases, (_TIMED_RANGES, _DEVICE_EVENTS, _ITERATIONS, _COUNTED)),
        Question("system_calls", "rank", nsys_tables.system_calls, (_SYSTEM_CALLS, _DEVICE_EVENTS, _ITERATIONS)),
        Question("cuda_memory", "rank", nsys_tables.cuda_memory, (_CUDA_MEMORY, _ITERATIONS)),
        PRODUCTS,
        HOST_STEPS,
        HOST_ITERATIONS,
        Question(
            "scorecard",
            "run",
            scorecard.scorecard,
            (ATTRIBUTION, HOST_ITERATIONS, ITERATIONS, ROLES, KERNELS, LAUNCHES, MEMORY, Given.INFOS),
        ),
        Question("matrix_products", "run", products.matrix_products, (PRODUCTS, Given.INFOS)),
        BY_KERNEL,
        Question("kernel_counters", "run", counters.kernel_counters, (BY_KERNEL, Given.INFOS)),
        Question("units", "rank", operators.units, (_ANNOTATIONS, _DEVICE_EVENTS)),
        KERNELS,
        Question("kernel_groups", "run", kernel_groups.kernel_groups, (KERNELS, COPIES)),
        Question("typical_iteration", "run", parts.typical_iteration, (ITERATIONS,)),
        ATTRIBUTION,
        RANKS,
        CLOCK_OFFSETS,
        PIPELINE_BY_RANK,
        Question("communication", "run", communication.communication, (_WAITING, Given.DATABASE, Given.INFOS)),
        Question("communication_by_rank", "run", communication.communication_by_rank, (_WAITING, _EXPOSURE, Given.DATABASE)),
        Question(
            "communication_by_size",
            "run",
            message_sizes.communication_by_size,
            (_WAITING, _EXPOSURE, Given.DATABASE, Given.INFOS),
        ),
        Question("waits", "run", ranks.waits, (_WAITING, Given.DATABASE)),
        Question("stragglers", "run", ranks.stragglers, (RANKS, Given.INFOS)),
        Question("start_skew", "run", ranks.start_skew, (_WAITING, Given.DATABASE, CLOCK_OFFSETS)),
        Question("pipeline", "run", pipeline.pipeline, (PIPELINE_BY_RANK,)),
        Question("pipeline_waits", "run", pipeline.pipeline_waits, (PIPELINE_BY_RANK, _WAITING, Given.DATABASE)),
        Question("event_cells", "run", events.event_cells, (_WAITING, Given.DATABASE)),
        Question("transfers_by_size", "run", bench.transfers_by_size, (_WAITING, Given.DATABASE)),
        Question("copies_by_size", "run", bench.copies_by_size, (Given.DATABASE,)),
        MEMORY,
        *(Question(f"memory_{of}", "run", _recorded(of), (_MEMORY,)) for of in ("timeline", "sites", "at_peak", "growth")),
        Question("memory_over_time", "run", tables.memory_over_time, (_MEMORY,)),
        Question("gpu_metrics", "source", device.gpu_metrics, (Given.DATABASE,)),
        Question("gpu_metrics_over_time", "source", device.gpu_metrics_over_time, (Given.DATABASE,)),
        Question("out_of_memory", "run", tables.out_of_memory, (Given.DATABASE,)),
    )
}

#: Small answers, computed whenever a capture's tables are loaded: together they cost less than loading the tables again.
WITH_EVERY_PASS = (BREAKDOWN, ITERATIONS, IDLE_GAPS, COPIES, KERNEL_TIMES, EXPOSURE)

#: Questions whose caveats are those of a run as a whole.
WITH_CAVEATS = ("breakdown", "idle_gaps", "typical_iteration", "communication", "stragglers", "pipeline", "memory")
