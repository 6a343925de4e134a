"""How fast a rank's host launches, and how much work each launch is."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bridge_profiling.analysis.breakdown import rows_of
from bridge_profiling.analysis.intervals import Nanoseconds


def pace(device_events: pa.Table, iteration: np.ndarray, start_ns: Nanoseconds, end_ns: Nanoseconds) -> pa.Table:
    """One row per window: kernels that compute, by their start, and the calls that launched them.

    `kernel_count`, `mean_kernel_us`, `median_kernel_us`; `launch_count`: calls with a kernel of their own, so not those of CUDA
    graphs' kernels; `launch_call_us`: the median call; `graph_kernel_count`: kernels that share a call with others. Null where
    there are none.

    Args:
        device_events: `traces.tables.DEVICE_EVENTS` of one rank.
        iteration: numbers of the windows' iterations; null for the whole capture.
        start_ns: where each window begins.
        end_ns: where each ends.
    """
    kernels = device_events.filter(pa.array(rows_of(device_events["kind"], "compute")))
    start, end = (kernels[name].to_numpy() for name in ("start_ns", "end_ns"))
    call, begun, returned = (
        kernels[name].cast(pa.int64()).fill_null(-1).to_numpy() for name in ("correlation", "launch_start_ns", "launch_end_ns")
    )
    rows = []
    for begin, stop in zip(start_ns.tolist(), end_ns.tolist(), strict=True):
        mine = (start >= begin) & (start < stop)
        took, launched = (end - start)[mine], begun[mine] >= 0
        _, first, together = np.unique(call[mine][launched], return_index=True, return_counts=True)
        calls = (returned - begun)[mine][launched][first][together == 1]
        rows.append(
            {
                "kernel_count": int(mine.sum()),
                "mean_kernel_us": float(took.mean()) / 1e3 if len(took) else None,
                "median_kernel_us": float(np.median(took)) / 1e3 if len(took) else None,
                "launch_count": len(calls),
                "launch_call_us": float(np.median(calls)) / 1e3 if len(calls) else None,
                "graph_kernel_count": int(together[together > 1].sum()),
            }
        )
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    return table.add_column(0, "iteration", pa.array(iteration, pa.int32()))


_SCHEMA = pa.schema(
    [
        ("kernel_count", pa.int64()),
        ("mean_kernel_us", pa.float64()),
        ("median_kernel_us", pa.float64()),
        ("launch_count", pa.int64()),
        ("launch_call_us", pa.float64()),
        ("graph_kernel_count", pa.int64()),
    ]
)
