"""Every question about a run: its inputs, and the function that answers it. A new question is one more entry here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import pyarrow as pa

from bridge_profiling.analysis.attribution import device, host, idle, operators, parts
from bridge_profiling.analysis.memory import out_of_memory, over_time, tables
from bridge_profiling.analysis.questions import Answer, Columns, Derived, Given, Question
from bridge_profiling.analysis.ranks import clocks, communication, pipeline, ranks
from bridge_profiling.traces.types import Caveat


def filled(function: Callable[..., Any]) -> Callable[..., Answer | pa.Table]:
    """A question that fills a list of sentences, as one that returns an answer."""
    signature = inspect.signature(function)
    if "limitations" not in signature.parameters:
        return function

    @wraps(function)
    def answer(*inputs: Any, **options: Any) -> Answer:
        said: list[str] = []
        table = function(*inputs, limitations=said, **options)
        return Answer(table, tuple(Caveat("across_ranks", sentence) for sentence in said))

    kept = [each for each in signature.parameters.values() if each.name != "limitations"]
    answer.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return answer


_DEVICE_EVENTS = Columns(
    "device_events",
    (
        "kind",
        "device",
        "stream",
        "start_ns",
        "end_ns",
        "correlation",
        "operator",
        "launch_start_ns",
        "launch_end_ns",
        "launch_thread",
        "iteration",
        "bytes",
        "direction",
        "from_memory",
        "to_memory",
    ),
    shared=True,
)
_ITERATIONS = Columns("iterations", ("iteration", "start_ns", "end_ns", "boundary"))
_WAIT_CALLS = Columns("host_events", ("name", "start_ns", "correlation"))
_SYNCHRONIZATIONS = Columns("synchronizations", ("kind", "stream", "correlation", "producer_stream", "producer_correlation"))
_WORK = Derived(device.device_work, (_DEVICE_EVENTS,))
_WINDOWS = Derived(device.windows, (_ITERATIONS, _DEVICE_EVENTS))
_SPANS = Derived(device.spans, (_WINDOWS, _WORK))
_GAPS = Derived(idle.gaps, (_DEVICE_EVENTS, _WAIT_CALLS, _SYNCHRONIZATIONS, _WORK, _WINDOWS))
_ACTIVITY = Columns("host_events", host.COLUMNS)
_OPERATORS = Columns(
    "host_events",
    ("category", "thread", "name", "start_ns", "end_ns", "operator"),
    optional=(("shapes", "shapes"), ("stacks", "stack")),
)
_ANNOTATIONS = Columns("host_events", ("category", "thread", "name", "start_ns", "end_ns"))

_ACROSS = (Given.DATABASE, Given.INFOS)
_WITH_MEMORY = (Given.DATABASE, Given.INFOS_WITH_SNAPSHOTS)

BREAKDOWN = Question("breakdown", "rank", device.breakdown, (_WORK,))
ITERATIONS = Question("iterations", "rank", device.iterations, (_WINDOWS, _WORK, _GAPS))
IDLE_GAPS = Question("idle_gaps", "rank", idle.idle_gaps, (_GAPS, _SPANS))
IDLE_CAUSES = Question("idle_causes", "rank", idle.idle_causes, (_GAPS, _DEVICE_EVENTS, _ACTIVITY, _SPANS))
COPIES = Question("copies", "rank", device.copies, (_DEVICE_EVENTS,))
RANKS = Question("ranks", "run", filled(ranks.ranks), _ACROSS)

QUESTIONS = {
    question.name: question
    for question in (
        BREAKDOWN,
        ITERATIONS,
        IDLE_GAPS,
        IDLE_CAUSES,
        COPIES,
        Question("launch_statistics", "rank", device.launch_statistics, (_DEVICE_EVENTS, _SPANS)),
        Question("operators", "rank", operators.operators, (_OPERATORS, _DEVICE_EVENTS)),
        Question("units", "rank", operators.units, (_ANNOTATIONS, _DEVICE_EVENTS)),
        Question("kernels", "source", device.kernels, (Given.DATABASE,)),
        Question("typical_iteration", "run", parts.typical_iteration, (ITERATIONS,)),
        Question("attribution", "run", parts.attribution, (ITERATIONS, IDLE_CAUSES, RANKS)),
        RANKS,
        Question("communication", "run", filled(communication.communication), _ACROSS),
        Question("communication_by_rank", "run", filled(communication.communication_by_rank), _ACROSS),
        Question("waits", "run", filled(ranks.waits), _ACROSS),
        Question("stragglers", "run", filled(ranks.straggler), _ACROSS),
        Question("clock_offsets", "run", filled(clocks.clock_offsets), _ACROSS),
        Question("start_skew", "run", filled(ranks.start_skew), _ACROSS),
        Question("pipeline", "run", filled(pipeline.pipeline), _ACROSS),
        Question("pipeline_by_rank", "run", filled(pipeline.pipeline_by_rank), _ACROSS),
        Question("memory", "run", filled(tables.memory), _WITH_MEMORY),
        Question("memory_timeline", "run", filled(tables.timeline), _WITH_MEMORY),
        Question("memory_sites", "run", filled(tables.sites), _WITH_MEMORY),
        Question("memory_at_peak", "run", filled(tables.live_at_peak), _WITH_MEMORY),
        Question("memory_growth", "run", filled(tables.growth), _WITH_MEMORY),
        Question("memory_over_time", "run", filled(over_time.memory_over_time), _WITH_MEMORY),
        Question("out_of_memory", "run", filled(out_of_memory.out_of_memory), _WITH_MEMORY),
    )
}

#: Small answers, computed whenever a capture's tables are loaded: together they cost less than loading the tables again.
WITH_EVERY_PASS = (BREAKDOWN, ITERATIONS, IDLE_GAPS, COPIES)

#: Questions whose caveats are those of a run as a whole.
WITH_CAVEATS = ("breakdown", "idle_gaps", "typical_iteration", "communication", "stragglers", "pipeline", "memory")
