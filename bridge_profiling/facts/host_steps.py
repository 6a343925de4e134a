"""Iterations of a rank without device work, as in training on CPUs: what its loop's thread did, in parts that add up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from bridge_profiling.facts.counts import ISSUING
from bridge_profiling.facts.host_names import CHECKPOINT, DATA_LOADING
from bridge_profiling.facts.intervals import Intervals, coded, parents, rows_of, union
from bridge_profiling.traces.tables import fields, to_int64

#: Ranges of collectives on CPUs, mostly on a thread of the backend, and the operators that issue them.
_COLLECTIVE = re.compile(r"(?:gloo|mpi|ucc):")
_ISSUING = re.compile("|".join(ISSUING))

#: Parts of an iteration, in the order in which a time that fits several is attributed.
PARTS = ("data_loading_us", "checkpoint_us", "communication_us", "operators_us", "other_us")

_SCHEMA = pa.schema(
    [("iteration", pa.int32()), ("boundary", pa.bool_()), *fields(pa.float64(), "duration_us", *PARTS, "collectives_us")]
)


def host_steps(
    host_blocks: Callable[[], Iterable[pa.Table]],
    device_events: pa.Table,
    iterations: pa.Table,
    *,
    data_loading: str = DATA_LOADING,
    checkpoint: str = CHECKPOINT,
) -> pa.Table:
    """One row per iteration of a rank without device work; none otherwise.

    Returns:
        `duration_us`: to the start of the next iteration. Its parts, of the loop's thread: in ranges of data loading and of
        checkpoints, blocked by communication (a collective runs, and the thread computes in no operator), in operators, and the
        rest, which is Python for the most part. `collectives_us`: collectives of all threads, hidden ones included.

    Args:
        host_blocks: `host.COLUMNS` of the host events.
        data_loading: regular expression, found anywhere in the names of data-loading ranges; case is ignored.
        checkpoint: the same for saving.
    """
    if device_events.num_rows or not iterations.num_rows:
        return _SCHEMA.empty_table()
    host_events = pa.concat_tables(host_blocks())
    code, names = coded(host_events["name"])
    thread, start, end = (to_int64(host_events[name]) for name in ("thread", "start_ns", "end_ns"))
    number, begin, stop = (to_int64(iterations[name]) for name in ("iteration", "start_ns", "end_ns"))
    stop = np.append(np.where(np.diff(number) == 1, begin[1:], stop[:-1]), stop[-1:])
    ranges = rows_of(host_events["category"], "annotation", "python", "operator")
    operators = rows_of(host_events["category"], "operator")

    def named(pattern: re.Pattern[str]) -> np.ndarray:
        return np.array([*(bool(name and pattern.search(name)) for name in names), False], bool)[code]

    marks = (
        rows_of(host_events["category"], "annotation") & np.isin(start, begin) & np.isin(end, to_int64(iterations["end_ns"]))
    )
    known, count = np.unique(thread[marks], return_counts=True)
    loop = thread == known[count.argmax()] if len(known) else np.ones(len(thread), bool)

    def during(rows: np.ndarray) -> Intervals:
        return union(start[rows], end[rows])

    issuing, mine = named(_ISSUING), np.flatnonzero(operators & loop)
    outer = np.zeros(len(code), bool)
    above = parents(thread[mine], start[mine], end[mine])
    outer[mine[above[above >= 0]]] = True
    computing = during(operators & loop & ~outer & ~issuing)
    collectives = during((named(_COLLECTIVE) & ranges) | (issuing & operators & loop))
    loading = during(ranges & loop & named(re.compile(data_loading, re.IGNORECASE)))
    saving = during(ranges & loop & named(re.compile(checkpoint, re.IGNORECASE))) - loading
    blocked = collectives - computing - loading - saving
    working = during(operators & loop) - loading - saving - blocked
    found = [each.within_ns(begin, stop) / 1e3 for each in (loading, saving, blocked, working)]
    duration = (stop - begin) / 1e3
    columns = dict(zip(PARTS, [*found, duration - sum(found)], strict=True))
    return pa.table(
        {"iteration": iterations["iteration"], "boundary": iterations["boundary"], "duration_us": duration}
        | columns
        | {"collectives_us": collectives.within_ns(begin, stop) / 1e3},
        schema=_SCHEMA,
    )
