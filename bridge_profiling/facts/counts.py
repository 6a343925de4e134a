"""What one rank does how often in each iteration: passes of the model, steps of the optimizer, collectives and their sizes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import coded, names_in, rows_of, union
from bridge_profiling.facts.operators import unit_rows
from bridge_profiling.traces.tables import fields, to_int64

#: Ranges that count passes and steps, by the beginning of their names.
_RANGES = {"passes": "DistributedDataParallel.forward", "steps": "Optimizer.step#"}

#: Operators that issue a collective, by the beginning of their names. torch 1.x records the second one alone.
ISSUING = ("c10d::", "record_param_comms")

_COLLECTIVES = pa.schema(
    [
        ("iteration", pa.int32()),
        *fields(pa.string(), "operation", "group", "group_name", "group_ranks"),
        *fields(pa.int64(), "message_bytes", "count"),
    ]
)


def collective_sizes(collectives: pa.Table) -> pa.Table:
    """One row per iteration, operation, group and size of message, with the number of such operations."""
    keys = [name for name in _COLLECTIVES.names if name != "count"]
    plain = pa.table({name: collectives[name].cast(_COLLECTIVES.field(name).type) for name in keys})
    found = plain.group_by(keys).aggregate([([], "count_all")]).rename_columns([*keys, "count"])
    return found.cast(_COLLECTIVES).sort_by([(name, "ascending") for name in ("iteration", "operation", "message_bytes")])


def host_rows(host_events: pa.Table) -> NDArray[np.bool_]:
    """Which host events `loop_counts` reads."""
    names = names_in(host_events["name"])
    named = (name for name in names if name.startswith((*_RANGES.values(), *ISSUING)))
    return rows_of(host_events["name"], *named) | unit_rows(host_events)


def loop_counts(host_events: pa.Table, iterations: pa.Table) -> pa.Table:
    """One row per iteration: how often DDP's forward pass and an optimizer's step began, and the host's time in collectives.

    `issuing_us`: in the operators that issue collectives, on all threads, outside of the ranges of a sharded model's units.
    """
    codes, names = coded(host_events["name"])
    start, stop = (host_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    shown = rows_of(host_events["category"], "operator", "annotation")
    begin, end = (iterations[name].to_numpy() for name in ("start_ns", "end_ns"))

    def named(*beginnings: str) -> NDArray[np.bool_]:
        return np.array([*(bool(name and name.startswith(beginnings)) for name in names), False])[codes] & shown

    counts = {}
    for column, beginning in _RANGES.items():
        starts = np.sort(start[named(beginning)])
        counts[column] = np.searchsorted(starts, end) - np.searchsorted(starts, begin)
    issuing, of_units = (union(start[rows], stop[rows]) for rows in (named(*ISSUING), unit_rows(host_events)))
    issuing_us = (issuing - of_units).within_ns(begin, end) / 1e3
    return pa.table(
        {"iteration": pa.array(to_int64(iterations["iteration"]), pa.int32()), **counts, "issuing_us": pa.array(issuing_us)}
    )
