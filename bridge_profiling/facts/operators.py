"""Host operators of one rank, and the units of a sharded model: how often they run, and at what cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import (
    coded,
    launched_inside,
    names_in,
    parents,
    ranged,
    rows_named,
    rows_of,
    self_times_ns,
    sums_inside,
    totals,
)
from bridge_profiling.traces.tables import NULL, to_int64

#: A step and its unit, as fully_shard names its ranges, and our integrations those of libraries that name none.
#: With several parameter groups in a module, fully_shard appends the group's size.
_STEP = re.compile(r"(?:FSDP|ZeRO)::(all_gather|post_backward_reduce|reduce)(?: \((.*?)\))?(?: \[pg=\d+\])?")

#: How torch names a call of a module among Python frames: "nn.Module: Linear_3".
_MODULE = re.compile(r"nn\.Module: (.+)")

#: Calls whose times are summed up at a time: some 50 MB.
_BLOCK_ROWS = 1 << 19

#: Columns of memory, in the order of own and total, host and device.
MEMORY = ("cpu_memory_self_bytes", "cpu_memory_total_bytes", "device_memory_self_bytes", "device_memory_total_bytes")


def operators(
    host_events: Callable[[], Iterable[pa.Table]],
    device_events: pa.Table,
    memory_events: pa.Table,
    *,
    category: str = "operator",
    shapes: bool = False,
    stacks: bool = False,
    modules: bool = False,
) -> pa.Table:
    """One row per name (and input shapes, call stack, and module; null if not recorded), most own time first.

    `total_ns` adds up the calls' durations, `self_ns` is without the ranges of the same category directly inside.
    `device_total_ns` adds up the device events launched inside on the same thread, and `device_self_ns` those of them launched
    in no operator or annotation further in: torch's `device_time_total` and `self_device_time_total`.

    `module` is the innermost `nn.Module` that called the operator, as Python stacks name it (`Linear_3`); without `modules`,
    the one with the most own time. `cpu_memory_total_bytes` and `device_memory_total_bytes` add up what was allocated inside
    on the same thread, less what was freed; for annotations as for torch's, on all threads, since autograd's does the work
    of a range around `backward`. `…_self_bytes` leave out operators and annotations further in. They are null unless the
    capture records allocations (`profile_memory`).
    """
    keys = ["name", *(["shapes"] if shapes else []), *(["stack"] if stacks else []), *(["module"] if modules else [])]
    launched = device_events.select(["operator", "start_ns", "end_ns", "launch_start_ns", "launch_thread"])
    launching, place = np.unique(to_int64(launched["operator"]), return_inverse=True)
    device_ns = launched["end_ns"].to_numpy() - launched["start_ns"].to_numpy()
    own = launching, np.bincount(place, device_ns, len(launching)).astype(np.int64)
    del place, device_ns
    wanted = list(dict.fromkeys([*keys, "module"]))
    # Python frames may be modules, and memory belongs to the innermost of both.
    also = (*(["python"] if category == "operator" else []), *(["operator", "annotation"] if memory_events.num_rows else []))
    sums = []
    for events in _closed(host_events(), dict.fromkeys((category, *also)), modules_alone=category != "python"):
        rows = rows_of(events["category"], category)
        module = _modules(events, rows) if category == "operator" else pa.nulls(int(rows.sum()), pa.string())
        memory = _memory_bytes(events, rows, memory_events)
        mine = events.filter(pa.array(rows)).append_column("module", module)
        sums.append(_sums(mine, launched, own, wanted, memory, launches_operators=category != "runtime"))
    by_module = pa.concat_tables(sums)
    sums = [name for name in by_module.column_names if name not in (*keys, "module")]
    found = totals(by_module, keys, **{name: (name, "max" if name == "max_ns" else "sum") for name in sums})
    found = found.sort_by([("self_ns", "descending"), *((key, "ascending") for key in keys)])
    mean_ns = np.rint(found["total_ns"].to_numpy() / found["count"].to_numpy())
    found = found.append_column("mean_ns", pa.array(mean_ns, pa.int64()))
    times = ("self_ns", "total_ns", "mean_ns", "max_ns", "device_self_ns", "device_total_ns")
    return pa.table(
        {name: found[name] for name in (*keys, "count", *times)}
        | {name: found[name] if name in sums else pa.nulls(found.num_rows, pa.int64()) for name in MEMORY}
        | ({} if modules else {"module": _most_often(by_module, found, keys)})
    )


def _closed(blocks: Iterable[pa.Table], categories: Iterable[str], *, modules_alone: bool) -> Iterator[pa.Table]:
    """Host events of some categories, about `_BLOCK_ROWS` at a time: no range reaches into the next table. At least one.

    Args:
        modules_alone: of Python frames, only those of modules.
    """
    pending: list[pa.Table] = []
    rows, enough = 0, _BLOCK_ROWS
    for block in blocks:
        of_module = rows_named(block["name"], _MODULE.fullmatch)
        unused = rows_of(block["category"], "python") & ~of_module if modules_alone else np.zeros(block.num_rows, bool)
        pending.append(block.filter(pa.array(rows_of(block["category"], *categories) & ~unused)))
        rows += pending[-1].num_rows
        if rows >= enough:
            events = pa.concat_tables(pending)
            start, end = (events[name].to_numpy() for name in ("start_ns", "end_ns"))
            last = np.flatnonzero(start[1:] >= np.maximum.accumulate(end)[:-1])[-1:] + 1
            for place in last.tolist():
                yield events.slice(0, place).unify_dictionaries()
                events = events.slice(place)
            pending, rows = [events], events.num_rows
            enough = rows + _BLOCK_ROWS if len(last) else 2 * rows
    yield pa.concat_tables(pending).unify_dictionaries()


def _sums(
    events: pa.Table,
    device_events: pa.Table,
    own: tuple[NDArray[np.int64], NDArray[np.int64]],
    keys: list[str],
    memory: dict[str, NDArray[np.int64]],
    *,
    launches_operators: bool,
) -> pa.Table:
    """Sums over some calls, by `keys`; none of them is open before the first one or after the last one of these.

    Args:
        own: operators, ascending, and the device time that each launched itself.
    """
    thread, start, end = ranged(events)
    device_ns = np.zeros(len(start), np.int64)
    launching, spent_ns = own
    if launches_operators and len(launching):
        operator = to_int64(events["operator"])
        place = np.minimum(np.searchsorted(launching, operator), len(launching) - 1)
        device_ns = np.where((launching[place] == operator) & (operator != NULL), spent_ns[place], 0)
    at_ns = to_int64(device_events["launch_start_ns"])
    first, last = (int(start.min()), int(end.max())) if len(start) else (0, 0)
    meanwhile = (at_ns >= first) & (at_ns <= last)
    launched = device_events.filter(pa.array(meanwhile))
    table = pa.table(
        {key: events[key] for key in keys}
        | {
            "duration_ns": end - start,
            "self_ns": self_times_ns(parents(thread, start, end), start, end),
            "device_self_ns": device_ns,
            # What an operator launched counts even if the time of the launch was not recorded.
            "device_total_ns": np.maximum(device_ns, launched_inside((thread, start, end), launched)[1]),
        }
        | memory
    )
    of_calls = {"count": "count", "total_ns": "sum", "max_ns": "max"}
    sums = ("self_ns", "device_self_ns", "device_total_ns", *memory)
    return totals(
        table, keys, **{name: ("duration_ns", how) for name, how in of_calls.items()}, **{name: (name, "sum") for name in sums}
    )


def unit_rows(host_events: pa.Table) -> NDArray[np.bool_]:
    """Which host events `units` reads."""
    return rows_of(host_events["category"], "annotation") & rows_named(host_events["name"], _STEP.fullmatch)


def longest_rows(host_events: pa.Table) -> NDArray[np.bool_]:
    """Which host events are the longest call of an operator; of several that take as long, the first."""
    code, names = coded(host_events["name"])
    duration = host_events["end_ns"].to_numpy() - host_events["start_ns"].to_numpy()
    rows = np.flatnonzero(rows_of(host_events["category"], "operator") & (code >= 0))
    longest = np.zeros(len(names), np.int64)
    np.maximum.at(longest, code[rows], duration[rows])
    rows = rows[duration[rows] == longest[code[rows]]]
    found = np.zeros(len(code), bool)
    found[rows[np.unique(code[rows], return_index=True)[1]]] = True
    return found


def longest_calls(host_events: pa.Table) -> pa.Table:
    """`name`, `start_ns` and `duration_ns` of the longest call of each operator, by name."""
    longest = host_events.filter(pa.array(longest_rows(host_events)))
    duration_ns = pc.subtract(longest["end_ns"], longest["start_ns"])
    found = {"name": longest["name"].cast(pa.string()), "start_ns": longest["start_ns"], "duration_ns": duration_ns}
    return pa.table(found).sort_by("name")


def _modules(host_events: pa.Table, operators: NDArray[np.bool_]) -> pa.Array:
    """For each operator, the innermost module that was open on its thread when it started."""
    modules = {name: match[1] for name in names_in(host_events["name"]) if (match := _MODULE.fullmatch(name))}
    of_module = rows_of(host_events["category"], "python") & rows_of(host_events["name"], *modules) if modules else None
    if of_module is None or not of_module.any():
        return pa.nulls(int(operators.sum()), pa.string())
    rows = np.flatnonzero(operators | of_module)
    parent = parents(*(times[rows] for times in ranged(host_events)))
    place, inside = parent, of_module[rows]
    while (further := (place >= 0) & ~inside[place]).any():
        place = np.where(further, parent[place], place)
    place = place[operators[rows]]
    names = host_events["name"].cast(pa.string()).take(pa.array(rows[place], mask=place < 0))
    return pa.array([None if name is None else modules[name] for name in names.to_pylist()], pa.string())


def _most_often(by_module: pa.Table, found: pa.Table, keys: list[str]) -> pa.Array:
    """The module with the most own time of each row."""
    if by_module["module"].null_count == len(by_module):
        return pa.nulls(len(found), pa.string())
    known = totals(by_module.filter(by_module["module"].is_valid()), [*keys, "module"], self_ns=("self_ns", "sum"))
    ordered = known.sort_by([("self_ns", "ascending"), ("module", "descending")])
    last = {tuple(row[key] for key in keys): row["module"] for row in ordered.to_pylist()}
    return pa.array([last.get(tuple(row[key] for key in keys)) for row in found.select(keys).to_pylist()], pa.string())


def _memory_bytes(host_events: pa.Table, wanted: NDArray[np.bool_], memory_events: pa.Table) -> dict[str, NDArray[np.int64]]:
    """Columns of `MEMORY` for the wanted ranges; none if no allocations are recorded."""
    if not memory_events.num_rows:
        return {}
    rows = np.flatnonzero(wanted | rows_of(host_events["category"], "operator", "annotation"))
    thread, start, end = (times[rows] for times in ranged(host_events))
    on_cpu = rows_of(memory_events["device_type"], "cpu")
    amount = to_int64(memory_events["bytes"], null=0)
    # One thread for all: an annotation counts every thread's allocations.
    annotation = rows_of(host_events["category"], "annotation")[rows]
    at_thread, at_ns = (to_int64(memory_events[name]) for name in ("thread", "time_ns"))
    amounts, total = np.column_stack((amount * on_cpu, amount * ~on_cpu)), np.zeros((len(rows), 2), np.int64)
    until = end + 1  # torch counts what happens at a range's last nanosecond
    for chosen, of_range, of_event in ((~annotation, thread, at_thread), (annotation, 0 * thread, 0 * at_thread)):
        total[chosen] = sums_inside((of_range[chosen], start[chosen], until[chosen]), (of_event, at_ns), amounts)
    parent = parents(thread, start, end)
    own = total.copy()
    np.subtract.at(own, parent[parent >= 0], total[parent >= 0])
    mine = wanted[rows]
    return dict(zip(MEMORY, (own[mine, 0], total[mine, 0], own[mine, 1], total[mine, 1]), strict=True))


def units(host_events: pa.Table, device_events: pa.Table) -> pa.Table:
    """Communication of a sharded model, one row per FSDP unit or ZeRO step, most device time first, then most host time.

    Returns:
        `unit` (a module's name; empty for the root's, or if everything is sent at once), `step` (`all_gather` or `reduce`),
        `count` and `host_ns` of its ranges, `communication_count` and `device_ns` of the device events launched in them.
        `device_ns` is null without such events: on a CPU, the host's time is that of the communication.
    """
    annotations = host_events.filter(pa.array(rows_of(host_events["category"], "annotation")))
    steps = {name: match for name in names_in(annotations["name"]) if (match := _STEP.fullmatch(name))}
    chosen = annotations.filter(pa.array(rows_of(annotations["name"], *steps)))
    communication = device_events.filter(pa.array(rows_of(device_events["kind"], "communication")))
    launched, device_ns = launched_inside(ranged(chosen), communication)
    matches = [steps[name] for name in chosen["name"].to_pylist()]
    table = pa.table(
        {
            "unit": pa.array([match[2] or "" for match in matches], pa.string()),
            "step": pa.array(["all_gather" if match[1] == "all_gather" else "reduce" for match in matches], pa.string()),
            "host_ns": pc.subtract(chosen["end_ns"], chosen["start_ns"]),
            "communication_count": launched,
            "device_ns": device_ns,
        }
    )
    sums = {name: (name, "sum") for name in ("host_ns", "communication_count", "device_ns")}
    found = totals(table, ("unit", "step"), count=("host_ns", "count"), **sums)
    order = [("device_ns", "descending"), ("host_ns", "descending"), ("unit", "ascending"), ("step", "ascending")]
    found = found.sort_by(order)
    device_ns = pa.array(found["device_ns"].to_numpy(), mask=found["communication_count"].to_numpy() == 0)
    names = ("unit", "step", "count", "host_ns", "communication_count")
    return pa.table({name: found[name] for name in names} | {"device_ns": device_ns})
