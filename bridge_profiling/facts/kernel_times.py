"""Times of one rank's kernels that questions across ranks need: of its compute, and of communication that nothing hides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from bridge_profiling.facts.device import WHOLE_CAPTURE, DeviceWork
from bridge_profiling.facts.intervals import rows_of, union
from bridge_profiling.traces.tables import fields, to_int64

_KERNEL_TIMES = pa.schema(
    [
        ("iteration", pa.int32()),
        *fields(pa.int64(), "start_ns", "end_ns", "compute_start_ns", "compute_end_ns"),
        ("compute_us", pa.float64()),
    ]
)

_EXPOSURE = pa.schema(
    [
        *fields(pa.string(), "group_name", "group_ranks", "operation"),
        ("message_bytes", pa.int64()),
        *fields(pa.float64(), "exposed_us", "overlapped_us"),
    ]
)


def kernel_times(device_events: pa.Table) -> pa.Table:
    """One row per iteration that launched a kernel; null for kernels outside of all.

    Columns: iteration; start_ns and end_ns: the first start and the last end of its kernels; the same of its compute kernels,
    null without any; compute_us: the time in which one of those ran.
    """
    computes = rows_of(device_events["kind"], "compute")
    kernels = np.flatnonzero(computes | rows_of(device_events["kind"], "communication"))
    iteration = to_int64(device_events["iteration"], WHOLE_CAPTURE)[kernels]
    order = np.argsort(iteration, kind="stable")
    kernels = kernels[order]
    numbers, first = np.unique(iteration[order], return_index=True)
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    rows = []
    for number, mine in zip(numbers.tolist(), np.split(kernels, first[1:]), strict=False):
        compute = mine[computes[mine]]
        rows.append(
            {
                "iteration": None if number == WHOLE_CAPTURE else number,
                "start_ns": int(start[mine].min()),
                "end_ns": int(end[mine].max()),
                "compute_start_ns": int(start[compute].min()) if len(compute) else None,
                "compute_end_ns": int(end[compute].max()) if len(compute) else None,
                "compute_us": union(start[compute], end[compute]).total_ns / 1e3,
            }
        )
    return pa.Table.from_pylist(rows, schema=_KERNEL_TIMES)


def exposure(device_events: pa.Table, collectives: pa.Table, work: DeviceWork) -> pa.Table:
    """One row per group, operation and message size: how much of the communication nothing else hides.

    Columns: group_name and group_ranks (empty if unknown), operation, message_bytes (null if unknown), exposed_us (nothing else
    ran), overlapped_us (compute ran too).
    """
    return pa.Table.from_pylist(list(_exposed(device_events, collectives, work)), schema=_EXPOSURE)


def _exposed(device_events: pa.Table, collectives: pa.Table, work: DeviceWork) -> Iterator[dict[str, object]]:
    if not device_events.num_rows:
        return
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    other = work.compute | work.memcpy | work.memset
    names = [collectives[name].to_pylist() for name in _EXPOSURE.names[:4]]
    codes: dict[tuple[str, str, str, int | None], int] = {}
    code = np.array(
        [
            codes.setdefault((name or "", ranks or "", "unknown" if operation is None else operation, size), len(codes))
            for name, ranks, operation, size in zip(*names, strict=True)
        ],
        np.int64,
    )
    number, of_event = collectives["collective"].to_numpy(), to_int64(device_events["collective"], -1)
    # The last one is that of events which do not communicate.
    of_collective = np.full(max(int(of_event.max()), int(number.max(initial=-1))) + 2, -1)
    of_collective[number] = code
    mine = of_collective[of_event]
    for key, place in codes.items():
        rows = mine == place
        time = union(start[rows], end[rows])
        hidden_ns, overlapped_ns = (int(each.within_ns(time.start_ns, time.end_ns).sum()) for each in (other, work.compute))
        times = {"exposed_us": (time.total_ns - hidden_ns) / 1e3, "overlapped_us": overlapped_ns / 1e3}
        yield dict(zip(_EXPOSURE.names, key, strict=False)) | times
