"""Hardware counters that nsys sampled (`--gpu-metrics-devices`), where a report has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from bridge_profiling.traces.nsys_database import Database
from bridge_profiling.traces.tables import NULL, coded_column


def metric_columns(database: Database, base: int) -> dict[str, pa.Array] | None:
    """Sampled counters of every GPU that nsys watched; it samples GPUs, not processes."""
    if not database.has("GPU_METRICS", "timestamp", "typeId", "metricId", "value"):
        return None
    columns = database.columns("GPU_METRICS", ("timestamp", "typeId", "metricId", "value"))
    columns = {name: values[columns["timestamp"] != NULL] for name, values in columns.items()}
    if not len(columns["timestamp"]):
        return None
    names: dict[tuple[Any, Any], str] = {}
    if database.has("TARGET_INFO_GPU_METRICS", "typeId", "metricId", "metricName"):
        query = "SELECT typeId, metricId, metricName FROM TARGET_INFO_GPU_METRICS"
        names = {(row[0], row[1]): str(row[2]) for row in database.rows(query)}
    pairs = np.stack((columns["typeId"], columns["metricId"]), axis=1)
    used, place = np.unique(pairs, axis=0, return_inverse=True)
    texts = [names.get((kind, metric), f"metric {metric}") for kind, metric in used.tolist()]
    order = np.argsort(columns["timestamp"], kind="stable")
    return {
        "time_ns": pa.array(columns["timestamp"][order] + base),
        # The lowest byte of a type is the GPU that it was sampled on.
        "device": pa.array(columns["typeId"][order] & 0xFF),
        "metric": coded_column(place.reshape(-1)[order], texts),
        "value": pa.array(columns["value"][order]).cast(pa.float64()),
    }
