"""Of one rank, for facts across ranks: its communication operations, and when its device worked meanwhile."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bridge_profiling.facts.device import DeviceWork
from bridge_profiling.facts.intervals import EMPTY, plain, rows_of, union
from bridge_profiling.traces.tables import to_int64

#: Operations between two ranks.
POINT_TO_POINT = ("send", "recv", "send_recv")

#: Columns of the table `collectives` that facts across ranks read.
COLUMNS = (
    *("iteration", "collective", "operation", "group", "group_name", "group_ranks", "group_size"),
    *("sequence", "message_bytes", "peer", "start_ns", "end_ns"),
)


def operations(collectives: pa.Table) -> pa.Table:
    """One row per communication operation, in the columns of `COLUMNS`; `operation` is `unknown` where it is."""
    found = plain(collectives)  # text in dictionaries would be of another type to DuckDB
    place = found.column_names.index("operation")
    return found.set_column(place, "operation", found["operation"].fill_null("unknown"))


def activity(device_events: pa.Table, operations: pa.Table, work: DeviceWork) -> pa.Table:
    """When the device worked, as far as other ranks' facts depend on it: start_ns, end_ns, computes, in merged intervals.

    A rank that sends or receives may be a stage of a pipeline: all of its compute, and in intervals of their own all other work
    except its sends and receipts. Of other ranks, compute during communication.
    """
    exchanges = rows_of(operations["operation"], *POINT_TO_POINT)
    computing, other = work.compute & work.communication, EMPTY
    if exchanges.any():
        start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
        exchanging = np.isin(to_int64(device_events["collective"], -1), operations["collective"].to_numpy()[exchanges])
        rest = ~exchanging & ~rows_of(device_events["kind"], "compute")
        computing, other = work.compute, union(start[rest], end[rest])
    return pa.table(
        {
            "start_ns": np.concatenate([computing.start_ns, other.start_ns]),
            "end_ns": np.concatenate([computing.end_ns, other.end_ns]),
            "computes": np.repeat([True, False], [len(computing), len(other)]),
        }
    )
