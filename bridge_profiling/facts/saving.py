"""Saving that no range names, recognised by what it does: it copies a model's states to the host, one after the other.

`torch.save` copies each tensor to pageable memory, waits, and writes it, so that the host launches no compute until it is done.
`torch.distributed.checkpoint` copies to page-locked memory.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bridge_profiling.facts.device import Windows
from bridge_profiling.facts.host import NO_RANGES, HostActivity, Ranges, joined
from bridge_profiling.facts.intervals import rows_of
from bridge_profiling.traces.tables import NULL, to_int64

#: A name for such copies that the finding recognises.
COPIES = "copies of states to the host, one after the other"

#: Least number and bytes of copies in a row: logs copy a few numbers, an output is one or two tensors.
_COPIES, _BYTES = 8, 1 << 20

#: Writing begins this soon after a copy, or after other writing; a copy, this soon after its file is open.
_NEXT_NS = 1_000_000


def with_saving(host: HostActivity, device_events: pa.Table, spans: Windows) -> Ranges:
    """The ranges of saving, and copies in a row outside of them with the pauses around them, to open a file or write it.

    A loop that copies in most iterations does not save, and of a single iteration that is unknown.
    """
    found = _copies_in_a_row(host, device_events)
    struck = np.unique(np.searchsorted(spans.start_ns, found.start_ns, side="right"))
    if not len(found.name) or 2 * len(struck) > len(spans.start_ns) or len(spans.start_ns) < 2:
        return host.checkpoint
    return joined(host.checkpoint, _before(found, host.checkpoint))


def _before(found: Ranges, named: Ranges) -> Ranges:
    """What of each range comes before named ones: states are often gathered before the range begins in which they are saved.

    That part has the name of the range that follows in it.
    """
    following = np.searchsorted(named.start_ns, found.start_ns)
    next_ns = np.append(named.start_ns, np.iinfo(np.int64).max)[following]
    name = np.where(next_ns <= found.end_ns, np.append(named.name, np.array([None], object))[following], found.name)
    clipped = Ranges(name, found.start_ns, np.minimum(found.end_ns, next_ns))
    inside = named.time.within_ns(found.start_ns, found.start_ns + 1) > 0
    return clipped[~inside & (clipped.end_ns > clipped.start_ns)]


def _copies_in_a_row(host: HostActivity, device_events: pa.Table) -> Ranges:
    out = rows_of(device_events["direction"], "DtoH")
    launched = to_int64(device_events["launch_start_ns"])
    relevant = np.flatnonzero((out | rows_of(device_events["kind"], "compute")) & (launched != NULL))
    relevant = relevant[np.argsort(launched[relevant], kind="stable")]
    copies = out[relevant]
    if copies.sum() < _COPIES:
        return NO_RANGES
    change = np.flatnonzero(np.diff(np.concatenate(([0], copies.astype(np.int8), [0]))))
    begin, last = change[::2], change[1::2] - 1
    size = np.concatenate(([0], np.cumsum(np.where(copies, np.maximum(to_int64(device_events["bytes"])[relevant], 0), 0))))
    long = (last - begin + 1 >= _COPIES) & (size[last + 1] - size[begin] >= _BYTES)
    start, last = launched[relevant][begin[long]], relevant[last[long]]
    end = np.maximum(*(to_int64(device_events[name])[last] for name in ("launch_end_ns", "end_ns")))
    silent = host.silent
    for place in range(len(end)):
        # A host opens a file, and gets the first memory to copy to.
        pause = np.searchsorted(silent.start_ns, start[place]) - 1
        while pause >= 0 and start[place] - silent.end_ns[pause] <= _NEXT_NS:
            start[place] = silent.start_ns[pause]
            pause -= 1
        # It writes what it copied last, waits for a file, and so on.
        pause = np.searchsorted(silent.end_ns, end[place], side="right")
        while pause < len(silent) and silent.start_ns[pause] - end[place] <= _NEXT_NS:
            end[place] = silent.end_ns[pause]
            pause += 1
    return Ranges(np.array([COPIES] * len(start), object), start, end)
