"""Numbers of inferred iterations, so that the ranks' agree.

Iterations that no range numbers are numbered from the first in each capture, and captures of ranks can begin in different ones.
Devices finish the same iteration together, because each one ends with communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bridge_profiling.traces.types import RankInfo

_INFERRED = "iterations_inferred"

#: Iterations are the same if their ends are at most this share of an iteration apart, by clocks that a network may synchronize.
_SAME = 0.25


def offsets(captures: Sequence[tuple[RankInfo, Path]]) -> dict[int, int]:
    """What to add to each rank's numbers; nothing unless all ranks' iterations are inferred, and their ends agree.

    Args:
        captures: of one profiler, with the folders of their tables.
    """
    inferred = [any(caveat.code == _INFERRED for caveat in info.caveats) for info, _ in captures]
    if len(captures) < 2 or not all(inferred):
        return {}
    ends = {info.rank: _ends_ns(folder) for info, folder in captures}
    first, *others = sorted(ends)
    found = {first: 0}
    for rank in others:
        offset = _offset(ends[rank], ends[first])
        if offset is None:
            return {}
        found[rank] = offset
    least = min(found.values())
    return {rank: offset - least for rank, offset in found.items()} if any(found.values()) else {}


def renumbered(table: pa.Table, offset: int) -> pa.Table:
    """A table with other numbers of iterations, if it has any."""
    if not offset or "iteration" not in table.column_names:
        return table
    place = table.column_names.index("iteration")
    column = table["iteration"]
    return table.set_column(place, table.field(place), pc.add(column, pa.scalar(offset, column.type)))


def in_sql(numbers: Mapping[int, int]) -> str:
    """A projection that renumbers all ranks' rows."""
    cases = " ".join(f"when {rank} then {offset}" for rank, offset in numbers.items())
    return f"* replace (cast(iteration + case rank {cases} else 0 end as integer) as iteration)"


def _ends_ns(folder: Path) -> dict[int, int]:
    """When the device finished what each iteration launched, as the host may run ahead of it; empty without a device."""
    path = folder / "device_events.parquet"
    if not path.is_file():
        return {}
    table = pq.read_table(path, columns=["kind", "iteration", "end_ns"])
    mine = table.filter(pc.and_(pc.equal(table["kind"].cast(pa.string()), "compute"), pc.is_valid(table["iteration"])))
    last = mine.group_by("iteration").aggregate([("end_ns", "max")])
    return dict(zip(last["iteration"].to_pylist(), last["end_ns_max"].to_pylist(), strict=True))


def _offset(ends_ns: Mapping[int, int], others_ns: Mapping[int, int]) -> int | None:
    """By how much a rank's numbers are below another one's; None if no iterations of both end together."""
    if not ends_ns or not others_ns:
        return None
    numbers, times = (np.array(list(each)) for each in (others_ns.keys(), others_ns.values()))
    apart = np.diff(np.sort(times))
    nearest: dict[int, list[int]] = {}
    for number, end_ns in ends_ns.items():
        place = int(np.abs(times - end_ns).argmin())
        nearest.setdefault(int(numbers[place]) - number, []).append(abs(int(times[place]) - end_ns))
    offset, differences = max(nearest.items(), key=lambda item: (len(item[1]), -_median(item[1])))
    return offset if len(apart) and _median(differences) <= _SAME * _median(apart) else None


def _median(values: Sequence[int] | NDArray[np.int64]) -> float:
    return float(np.median(values))
