"""Ranks of a training on CPUs compared: who waits for whom in collectives, and which rank is late."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa

from bridge_profiling.traces.tables import fields


def host_iterations(host_steps: pa.Table) -> pa.Table:
    """The rows of `host_steps` by iteration and rank, with waiting taken out of communication.

    Returns:
        `waiting_us`: what communication blocks a rank longer than the rank that it blocks least in the same iteration, which
        is the last to arrive. `communication_us`: the rest. `own_us`: the iteration without waiting. Of one rank alone waiting
        is unknown, and null.
    """
    rows = host_steps.to_pylist()
    blocked: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        blocked[row["source"], row["iteration"]].append(row["communication_us"])
    found: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["iteration"], row["rank"], row["source"])):
        others = blocked[row["source"], row["iteration"]]
        waiting_us = row["communication_us"] - min(others) if len(others) > 1 else None
        own_us = row["duration_us"] - (waiting_us or 0.0)
        known = {"communication_us": row["communication_us"] - (waiting_us or 0.0), "waiting_us": waiting_us, "own_us": own_us}
        found.append({**row, **known})
    schema = pa.schema([*host_steps.schema, *fields(pa.float64(), "waiting_us", "own_us")])
    return pa.Table.from_pylist(found, schema=schema)
