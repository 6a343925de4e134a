"""Events counted by kind: per iteration, for comparisons of runs, and copies by size, for comparisons with benchmarks."""

from __future__ import annotations

import pyarrow as pa

from bridge_profiling.facts.database import Connection, queried

#: Columns that tell kinds of events apart.
KEYS = {
    "kernels": ("kind", "name"),
    "copies": ("kind", "direction", "from_memory", "to_memory"),
    "communication": ("operation", "group", "group_size"),
}

_DEVICE_EVENTS = (
    "select *, total_ns as ns, null as wait_ns, null as kernel_ns from device_sums where kind in {kinds} and source = $source"
)

#: Events of each kind. Only matched operations have transfer and waiting; for others, the kernel's time counts as transfer.
_EVENTS = {
    "kernels": _DEVICE_EVENTS.format(kinds=("compute", "communication")),
    "copies": _DEVICE_EVENTS.format(kinds=("memcpy", "memset")),
    "communication": """
        select operations.operation, coalesce("group", '') as "group", coalesce(group_size, 0) as group_size, rank,
            operations.iteration, operations.message_bytes as bytes, wait_ns, 1 as count,
            operations.end_ns - operations.start_ns as kernel_ns, coalesce(transfer_ns, kernel_ns) as ns
        from operations left join waiting using (rank, collective)
    """,
}

# Nanoseconds are added up as integers: DuckDB adds doubles in an order that changes from run to run.
_CELLS = """
with cells as (
    select {keys}, rank, {step} as step, sum(count) as count, sum(ns) as ns, sum(bytes) as bytes, sum(wait_ns) as wait_ns,
        sum(kernel_ns) as kernel_ns
    from ({events}) where {chosen} group by all
)
select {keys}, step as iteration, sum(count)::double as count, sum(ns) / 1e3 as us, min(ns / 1e3 / count) as fastest,
    max(ns / 1e3 / count) as slowest, coalesce(sum(bytes), 0)::double as bytes, coalesce(sum(wait_ns), 0) / 1e3 as wait_us,
    sum(kernel_ns) / 1e3 as kernel_us
from cells group by all order by step
"""

_COPIES_BY_SIZE = """
select direction, host_memory, bytes, sum(count)::bigint as count, sum(copy_ns) / 1e3 as copy_us from copy_sizes
where source = $source group by all order by direction, host_memory, bytes
"""


def event_cells(
    connection: Connection,
    device_sums: pa.Table,
    *,
    of: str,
    source: str,
    iterations: tuple[int, ...] = (),
    ranks: tuple[int, ...] = (),
) -> pa.Table:
    """Events per kind and iteration. Needs `measure_waiting`.

    Args:
        connection: the run's tables.
        device_sums: the fact of that name.
        of: `kernels`, `copies` or `communication`.
        source: the profiler of the captures.
        iterations: to count; without any, the whole capture counts as one.
        ranks: to count.

    Returns:
        The columns of `KEYS`, iteration, count, us (sum over ranks), fastest and slowest (mean per call of a rank), bytes; of
        communication also wait_us and kernel_us, which are null or 0 otherwise.
    """
    numbers, members = (", ".join(str(int(number)) for number in numbers) for numbers in (iterations, ranks))
    query = _CELLS.format(
        keys=", ".join(f'"{name}"' for name in KEYS[of]),
        events=_EVENTS[of],
        step="iteration" if iterations else "0",
        chosen=f"iteration in ({numbers}) and rank in ({members})" if iterations else "true",
    )
    return queried(connection, query, {} if of == "communication" else {"source": source}, device_sums=device_sums)


def copies_by_size(connection: Connection, copy_sizes: pa.Table, source: str) -> pa.Table:
    """Copies between host and device of all ranks by direction, memory and size: number and time."""
    return queried(connection, _COPIES_BY_SIZE, {"source": source}, copy_sizes=copy_sizes)
