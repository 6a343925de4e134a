"""What each allocation site held over time: the areas of a picture whose sum is what the device had allocated.

Thinned out so that the peak is among the points. Needs memory snapshots: a trace's memory events know no sites.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from bridge_profiling.analysis.memory.series import Integers, Series, device_series, running, stacks
from bridge_profiling.analysis.memory.sites import site
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

#: Sites of their own in a picture; the rest is one more.
MOST_SITES = 9

#: What the rest is called.
OTHER_SITES = "other sites"

#: Points of a picture in time.
_POINTS = 400

_SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        ("device", pa.int32()),
        ("site", pa.string()),
        ("time_ns", pa.int64()),
        ("bytes", pa.int64()),
    ]
)


def memory_over_time(
    connection: duckdb.DuckDBPyConnection,
    infos: Sequence[RankInfo],
    *,
    limitations: list[str],
    ranks: Collection[int] | None = None,
    points: int = _POINTS,
) -> pa.Table:
    """Bytes held by each device's largest sites over time, from memory snapshots.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.
        ranks: those asked for; None for all.
        points: times of a device at most.

    Returns:
        rank, device, site, time_ns, bytes (held from that time on), sites by what they held at the peak, the rest of them as
        `OTHER_SITES` last. At each time of a device its sites add up to what was allocated.
    """
    found = []
    for series in device_series(connection, limitations):
        if series.allocations is not None and len(series.time_ns) and (ranks is None or series.rank in ranks):
            found.append(_by_site(series, stacks(connection), points))
    return pa.concat_tables([_SCHEMA.empty_table(), *found])


def _by_site(series: Series, every_stack: Sequence[str | None], points: int) -> pa.Table:
    assert series.allocations is not None
    code = series.allocations["code"].to_numpy()
    names = {number: site(every_stack[number]) for number in np.unique(code).tolist()}
    shown_ns = _times(series, points)
    peak = int(np.argmax(series.at(shown_ns)))
    held: dict[str, Integers] = {}
    for name in sorted(set(names.values())):
        chosen = np.isin(code, [number for number, each in names.items() if each == name])
        base, time_ns, amounts = running(series.allocations.filter(pa.array(chosen)))
        held[name] = np.concatenate(([base], amounts))[np.searchsorted(time_ns, shown_ns, side="right")]
    largest = sorted(held, key=lambda name: (-int(held[name][peak]), -int(held[name].max()), name))
    kept = {name: held[name] for name in largest[:MOST_SITES]}
    if len(largest) > MOST_SITES:
        kept[OTHER_SITES] = np.sum([held[name] for name in largest[MOST_SITES:]], axis=0)
    tables = [
        pa.table(
            {
                "rank": pa.repeat(pa.scalar(series.rank, pa.int32()), len(shown_ns)),
                "device": pa.repeat(pa.scalar(series.device, pa.int32()), len(shown_ns)),
                "site": pa.repeat(pa.scalar(name), len(shown_ns)),
                "time_ns": pa.array(shown_ns, pa.int64()),
                "bytes": pa.array(amounts, pa.int64()),
            }
        )
        for name, amounts in kept.items()
    ]
    return pa.concat_tables(tables)


def _times(series: Series, points: int) -> Integers:
    """Times to show: of equal parts of the recording in time, when most was held; so no part is empty of what was there."""
    first, last = int(series.time_ns[0]), int(series.time_ns[-1])
    bounds = np.unique(np.searchsorted(series.time_ns, np.linspace(first, last + 1, points + 1)))
    begins, ends = bounds[:-1], bounds[1:]
    if not len(begins):
        return series.time_ns[:1]
    highest = [
        begin + int(series.allocated[begin:end].argmax()) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    return np.unique(np.concatenate((series.time_ns[highest], series.time_ns[-1:])))
