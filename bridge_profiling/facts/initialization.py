"""When a host set up the driver or a library on first use: contexts, handles, modules with kernels."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.host import NO_RANGES, Ranges, launching_threads, on_threads, outermost_ranges
from bridge_profiling.facts.host_names import SYNCHRONIZING
from bridge_profiling.facts.intervals import Intervals, rows_of, union
from bridge_profiling.traces.tables import NULL, to_int64

#: A call that does not wait for the device, and holds the host of an idle device for so long, sets something up. Loading a
#: library's kernels took 0.3 to 4 s in the captures seen, usual calls take microseconds.
_SETS_UP_NS = 100_000_000

#: An operator that spends this share of its time in such calls is setting up for all of it.
_MOSTLY = 0.5

#: Calls that take as long as the memory they are about is large.
_BY_SIZE = ("Memcpy", "Memset", "Host")


def initializing(host_events: pa.Table, device_events: pa.Table, starved: Intervals) -> tuple[Ranges, Ranges]:
    """Calls that set something up, and the outermost of them and of the operators that mostly consist of such calls.

    Args:
        host_events: `host.COLUMNS`, of all events that last so long.
        device_events: of the same rank.
        starved: when the device waited for a launch.
    """
    took = host_events["end_ns"].to_numpy() - host_events["start_ns"].to_numpy()
    long = np.flatnonzero((took >= _SETS_UP_NS) & on_threads(host_events, launching_threads(device_events)))
    if not len(long):
        return NO_RANGES, NO_RANGES
    events = host_events.take(pa.array(long))
    calls = rows_of(events["category"], "runtime") & ~rows_of(events["name"], *SYNCHRONIZING)
    calls &= np.array([not any(part in name for part in _BY_SIZE) for name in events["name"].to_pylist()], bool)
    idle = starved - union(device_events["start_ns"].to_numpy(), device_events["end_ns"].to_numpy())
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    calls[calls] = idle.within_ns(start[calls], end[calls]) >= _SETS_UP_NS
    operators = _operators(events, calls, union(start[calls], end[calls]))
    return outermost_ranges(events, calls), outermost_ranges(events, calls | operators)


def _operators(events: pa.Table, calls: NDArray[np.bool_], inside: Intervals) -> NDArray[np.bool_]:
    """Operators that made some of the calls, and spent most of their time in them."""
    ids = to_int64(events["operator"])
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    made = rows_of(events["category"], "operator") & np.isin(ids, ids[calls]) & (ids != NULL)
    return made & (inside.within_ns(start, end) >= _MOSTLY * (end - start))
