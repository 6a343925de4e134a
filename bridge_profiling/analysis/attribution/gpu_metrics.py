"""Hardware counters that nsys sampled (`--gpu-metrics-devices`): each counter's level, and its course over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    import duckdb

#: Samples within each rank's marked iterations, or all of a rank that has none. Counters are those of the whole GPU.
_SAMPLES = """
create or replace temp view metric_samples as
with marked as (select rank, min(start_ns) as first_ns, max(end_ns) as last_ns from iterations group by rank),
bounds as (select rank, min(time_ns) as first_ns, max(time_ns) as last_ns from gpu_metrics group by rank)
select sample.rank, sample.device, cast(sample.metric as varchar) as metric, sample.value, sample.time_ns,
  coalesce(marked.first_ns, bounds.first_ns) as first_ns, coalesce(marked.last_ns, bounds.last_ns) as last_ns
from gpu_metrics as sample join bounds using (rank) left join marked using (rank)
where sample.time_ns between coalesce(marked.first_ns, bounds.first_ns) and coalesce(marked.last_ns, bounds.last_ns)
"""


def gpu_metrics(connection: duckdb.DuckDBPyConnection) -> pa.Table:
    """Each counter within the marked iterations; over the whole capture of a rank without any.

    Returns:
        rank, device, metric (nsys' name, which ends with the unit in brackets), samples, mean, p95, max; the highest mean first
        among the counters of a device.
    """
    connection.execute(_SAMPLES)
    return connection.sql(
        """select rank, device, metric, count(*)::bigint as samples, avg(value) as mean, quantile_cont(value, 0.95) as p95,
        max(value) as max from metric_samples group by rank, device, metric order by rank, device, mean desc, metric"""
    ).to_arrow_table()


def gpu_metrics_over_time(connection: duckdb.DuckDBPyConnection, *, intervals: int = 300) -> pa.Table:
    """The mean of each counter in equal intervals of that time.

    Args:
        connection: the run's tables.
        intervals: their number.

    Returns:
        rank, device, metric, time_us (middle of the interval, since the first marked iteration began), value.
    """
    connection.execute(_SAMPLES)
    return connection.sql(
        """with placed as (
          select *, (last_ns - first_ns + 1) / $intervals as width_ns from metric_samples
        ), numbered as (select *, floor((time_ns - first_ns) / width_ns) as place from placed)
        select rank, device, metric, (place + 0.5) * any_value(width_ns) / 1000 as time_us, avg(value) as value
        from numbered group by rank, device, metric, place order by rank, device, metric, place""",
        params={"intervals": intervals},
    ).to_arrow_table()
