"""Ranges of one rank by name: host time, and the device time launched inside, descendants included, in an iteration.

Work that autograd's thread launches counts for a range of the loop's thread that is open meanwhile, since the call of
`backward()` waits for it. The backward pass of the operators in a range is a figure of its own, by sequence number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.device import until_next
from bridge_profiling.facts.intervals import (
    Nanoseconds,
    Ranged,
    Threads,
    coded,
    inside,
    judged,
    names_in,
    outermost,
    ranged,
    rows_of,
    run_starts,
    sums_inside,
)
from bridge_profiling.facts.parts import counted_iterations
from bridge_profiling.facts.sampled import Counted, means
from bridge_profiling.facts.types import declared, schema
from bridge_profiling.traces.joins import distinct
from bridge_profiling.traces.tables import NULL, to_int64

#: Names that the hook and its integrations give to the phases of a step.
PHASES = (
    "forward",
    "backward",
    "forward-backward",
    "optimizer",
    "data-loading",
    "host-to-device",
    "checkpoint",
    "evaluation",
)

#: Kinds of ranges, in the order of rows.
KINDS = ("phase", "autograd", "range", "library")

#: Ranges that libraries open on their own: torch's around collectives, optimizers, loaders and compiled code, NCCL's, CUB's.
_LIBRARY = re.compile(
    r"p?nccl(?:[A-Z]|:)|(?:gloo|mpi|ucc|xccl|c10d):|(?:cub|thrust|FSDP|ZeRO)::|CompiledFxGraph$|Optimizer\.\w+#|"
    r"enumerate\(DataLoader\)|DistributedDataParallel\.|Torch-Compiled Region|TorchDynamo|Pregraph|.*\(dynamo_timed\)"
)

#: torch names a compiled graph by its hash, which differs from rank to rank.
_COMPILED = re.compile(r"## Call (CompiledFxGraph) \S+ ##")

#: Ranges around whole iterations and windows.
WHOLE = re.compile(r"ProfilerStep|iteration[_ #-]?\d+$|bridge_profiling_window$", re.IGNORECASE)

#: The operator that autograd records around each node, with the name of the function that the node runs.
_NODE = re.compile(r"autograd::engine::evaluate_function(?:: (.+))?")

#: Operators that have that number because they run the node.
_OF_NODE = re.compile(r"autograd::|.*Backward\d*$")

_SCHEMA = pa.schema([*declared("Phase").schema(), *schema("longest_iteration", "longest_start_ns", "longest_ns")])


class HostRows:
    """Which host events `phases` reads: annotations, autograd's, and those that show what else there is."""

    def __init__(self) -> None:
        self._functions: set[str] = set()

    def __call__(self, host_events: pa.Table) -> NDArray[np.bool_]:
        """Of the next block of them: a node of autograd begins before the function that it runs."""
        operators = rows_of(host_events["category"], "operator")
        found = _of_autograd(host_events, self._functions)
        numbered = np.flatnonzero(found & operators & host_events["sequence"].is_valid().to_numpy())
        names = names_in(host_events["name"])
        kept = [name for name in names if _OF_NODE.match(text := _without_hash(name)) or text in self._functions]
        numbered = numbered[~rows_of(host_events["name"], *kept)[numbered]]
        # Of a number's operators the last one counts: a fifth of them.
        found[numbered] = False
        last = np.unique(to_int64(host_events["sequence"])[numbered][::-1], return_index=True)[1]
        found[numbered[len(numbered) - 1 - last]] = True
        found |= rows_of(host_events["category"], "annotation")
        if len(found):
            # Whether operators were recorded, and from when to when anything was.
            found[operators.argmax()] = True
            found[[host_events["start_ns"].to_numpy().argmin(), host_events["end_ns"].to_numpy().argmax()]] = True
        return found


def phases(host_events: pa.Table, device_events: pa.Table, iterations: pa.Table, counted: Counted) -> pa.Table:
    """One row per name of an annotation, and one for autograd; by kind, then the most host time first.

    A range belongs to the last iteration that began before it. Of ranges of one name inside each other, the outermost counts.

    Returns:
        `kind`: `phase` (opened by the hook and its integrations), `autograd` (all that autograd ran), `range` (the program's
        own) or `library`. `iterations`: how many count; 0 where none is marked, and then times are of the whole capture.
        `present`: in how many of them the range occurs. `calls`, `host_ns`, `device_ns`, `compute_ns`, `communication_ns`,
        `kernel_count`: means of an iteration; `…_low_ns` and `…_high_ns`: its smallest and largest; `…_share`: the mean as a
        share of the iteration's duration. `device_ns` adds up the durations of the device events launched inside, `compute_ns`
        and `communication_ns` those of the kernels among them. `backward_host_ns`, `backward_device_ns`: the backward pass of
        the operators that ran in the range; null where the capture records no sequence numbers. `host_ns` of autograd is null
        where it records no operators. The columns of `sampled.MEASURES`: means of hardware counters while the device events
        launched inside ran; null unless nsys sampled them. `longest_…`: iteration, start and duration of the longest call;
        null for autograd.
    """
    steps, launches = _Steps.of(iterations, host_events, device_events), _Launches.of(device_events, counted)
    annotations, names = _Ranges.of(host_events, "annotation")
    operators, operator_names = _Ranges.of(host_events, "operator", _of_autograd(host_events, set()))
    whole = annotations.named(names, WHOLE)
    nodes = _nodes(operators, operator_names)
    # The loop's thread is that of most iterations, else of most annotations.
    marks = annotations[whole].thread if iterations.num_rows else annotations.thread
    known_threads, count = np.unique(marks if len(marks) else annotations.thread, return_counts=True)
    loop = int(known_threads[count.argmax()]) if len(count) else NULL
    # Autograd has a thread for each device. Without operators, it is every thread but a known loop's that launches compute.
    recorded = bool(rows_of(host_events["category"], "operator").any())
    others = launches.thread[launches.compute & (loop != NULL)]
    threads = np.setdiff1d(nodes.thread if recorded else others, [loop, NULL])

    ranges = annotations[~whole].outermost
    known = bool((operators.sequence != NULL).any())
    forward = operators[~operators.named(operator_names, _OF_NODE) & (operators.sequence != NULL)]
    del operators  # of a large capture, 100 MB
    launched = launches.also_on(loop, threads).inside(ranges)
    later = _backward_of(ranges, forward, nodes, launches.inside(nodes)[:, 0])
    amounts = np.column_stack((np.ones(len(ranges), np.int64), ranges.duration_ns, launched, later))
    step = steps.holding(ranges.start_ns)
    columns = _means(steps, ranges.code, step, amounts, names) | _longest(ranges[step >= 0], step[step >= 0], iterations)
    found = [_table(columns, *([] if known else ["backward_"]))]
    if len(nodes) or len(threads):
        found.append(_autograd(steps, nodes, launches, threads, host_known=bool(len(nodes))))
    table = pa.concat_tables(found)
    table = table.append_column("order", pa.array([KINDS.index(kind) for kind in table["kind"].to_pylist()], pa.int64()))
    return table.sort_by([("order", "ascending"), ("host_ns", "descending"), ("name", "ascending")]).drop_columns("order")


@dataclass(frozen=True)
class _Steps:
    """The iterations, or the whole capture as one."""

    start_ns: Nanoseconds
    counted: NDArray[np.bool_]
    mean_ns: float  # duration of those that count, with the time until the next one
    marked: bool

    @classmethod
    def of(cls, iterations: pa.Table, host_events: pa.Table, device_events: pa.Table) -> _Steps:
        if not iterations.num_rows:
            both = (host_events, device_events)
            start, end = (np.concatenate([to_int64(each[name]) for each in both]) for name in ("start_ns", "end_ns"))
            first, last = (int(start.min()), int(end.max())) if len(start) else (0, 0)
            return cls(np.array([first]), np.ones(1, bool), float(last - first), False)
        (start, until), counted = until_next(iterations), counted_iterations(iterations)
        return cls(start, counted, float((until - start)[counted].mean()), True)

    def holding(self, time_ns: Nanoseconds) -> NDArray[np.int64]:
        """Place of the last iteration that began before each time; -1 if there is none, or it does not count."""
        place = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        return np.where((place >= 0) & self.counted[np.maximum(place, 0)], place, -1)


@dataclass(frozen=True)
class _Ranges:
    """Ranges of the host by start, each with the code of its name."""

    code: NDArray[np.int64]
    thread: Threads
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    sequence: NDArray[np.int64]

    @classmethod
    def of(cls, host_events: pa.Table, category: str, among: NDArray[np.bool_] | bool = True) -> tuple[_Ranges, list[str]]:
        """The ranges of a category `among` some rows, and the names that their codes stand for."""
        events = host_events.filter(pa.array(rows_of(host_events["category"], category) & among))
        code, names = coded(events["name"])
        alike = [_without_hash(name or "") for name in names]
        known = {name: place for place, name in enumerate(dict.fromkeys(alike))}
        same = np.array([*(known[name] for name in alike), 0], np.int64)
        return cls(same[code], *ranged(events), to_int64(events["sequence"])), list(known)

    def __len__(self) -> int:
        return len(self.code)

    def __getitem__(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> _Ranges:
        return _Ranges(*(column[rows] for column in vars(self).values()))

    @property
    def ranged(self) -> Ranged:
        return self.thread, self.start_ns, self.end_ns

    @property
    def duration_ns(self) -> Nanoseconds:
        return self.end_ns - self.start_ns

    @property
    def outermost(self) -> _Ranges:
        """Without ranges inside others of the same name and thread."""
        threads, place = distinct(self.thread)
        return self[np.sort(outermost(self.start_ns, self.end_ns, self.code * len(threads) + place))]

    def named(self, names: list[str], pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        """Which ranges have a name that begins as a pattern says."""
        return judged(self.code, names, pattern.match)


@dataclass(frozen=True)
class _Launches:
    """Device events by launch.

    `amounts` of each: time, that of compute and of communication, whether it is a kernel, and those of `Counted`.
    """

    thread: Threads
    at_ns: Nanoseconds
    amounts: NDArray[np.int64]
    compute: NDArray[np.bool_]

    @classmethod
    def of(cls, device_events: pa.Table, counted: Counted) -> _Launches:
        duration = to_int64(device_events["end_ns"]) - to_int64(device_events["start_ns"])
        compute, communication = (rows_of(device_events["kind"], kind) for kind in ("compute", "communication"))
        amounts = np.column_stack((duration, duration * compute, duration * communication, compute | communication))
        if counted.amounts.shape[1]:
            amounts = np.column_stack((amounts, counted.amounts))
        thread, at_ns = (to_int64(device_events[name]) for name in ("launch_thread", "launch_start_ns"))
        return cls(thread, at_ns, amounts, compute)

    def __getitem__(self, rows: NDArray[np.bool_]) -> _Launches:
        return _Launches(*(column[rows] for column in vars(self).values()))

    def also_on(self, thread: int, others: Threads) -> _Launches:
        """The same, with what some other threads launched counted for this one as well."""
        rows = np.isin(self.thread, others)
        more = replace(self[rows], thread=np.full(rows.sum(), thread))
        return _Launches(*map(np.concatenate, zip(vars(self).values(), vars(more).values(), strict=True)))

    def inside(self, ranges: _Ranges) -> NDArray[np.int64]:
        """The amounts of what was launched in each range."""
        return sums_inside(ranges.ranged, (self.thread, self.at_ns), self.amounts)


@lru_cache(maxsize=1 << 14)
def _without_hash(name: str) -> str:
    return _COMPILED.sub(r"\1", name)


def _nodes(operators: _Ranges, names: list[str]) -> _Ranges:
    """Autograd's nodes. The sequence number of each is that of the forward operator that made it.

    Kineto's traces have it at the node, NVTX ranges at the function that the node runs.
    """
    matches = [_NODE.match(name) for name in names]
    nodes = operators[operators.named(names, _NODE)]
    if not len(nodes) or (nodes.sequence != NULL).any():
        return nodes
    functions = {match[1] for match in matches if match and match[1]}
    run = operators[judged(operators.code, names, functions.__contains__)]
    sequence = nodes.sequence.copy()
    order, first, last = inside((nodes.thread, nodes.start_ns, nodes.end_ns + 1), (run.thread, run.start_ns))
    mine = np.flatnonzero(first < last)
    row = order[first[mine]]
    within = run.end_ns[row] <= nodes.end_ns[mine]
    sequence[mine[within]] = run.sequence[row[within]]
    return replace(nodes, sequence=sequence)


def _of_autograd(host_events: pa.Table, functions: set[str]) -> NDArray[np.bool_]:
    """Which events can be autograd's nodes, what these run, or what made them: a fifth of the operators.

    Args:
        functions: those that the nodes of earlier events run; these events' are added.
    """
    alike = {name: _without_hash(name) for name in names_in(host_events["name"])}
    matches = [match for name in alike.values() if (match := _NODE.match(name))]
    functions |= {match[1] for match in matches if match[1]}
    wanted = {match.string for match in matches} | functions
    named = [name for name, text in alike.items() if text in wanted]
    return rows_of(host_events["name"], *named) | host_events["sequence"].is_valid().to_numpy()


def _backward_of(ranges: _Ranges, forward: _Ranges, nodes: _Ranges, device_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each range, host and device time of autograd's nodes of the `forward` operators with a number that ran in it.

    torch counts the number up when an operator makes a node: of all that have a number, the one that began last made it.
    """
    numbers, last = np.unique(forward.sequence[::-1], return_index=True)
    made_by = forward[len(forward) - 1 - last]
    place = np.minimum(np.searchsorted(numbers, nodes.sequence), max(len(numbers) - 1, 0))
    known = numbers[place] == nodes.sequence if len(numbers) else np.zeros(len(nodes), bool)
    place = place[known]
    at = made_by.thread[place], made_by.start_ns[place]
    return sums_inside(ranges.ranged, at, np.column_stack((nodes.duration_ns, device_ns))[known])


def _means(
    steps: _Steps, code: NDArray[np.int64], step: NDArray[np.int64], amounts: NDArray[np.int64], names: list[str]
) -> dict[str, Any]:
    """Columns by name. Amounts of a range: calls, host time, those of `_Launches`, backward's time on host and device."""
    counted, mine = int(steps.counted.sum()), step >= 0
    cells, cell = np.unique(code[mine] * len(steps.start_ns) + step[mine], return_inverse=True)
    sums = np.column_stack([np.bincount(cell, column[mine], len(cells)) for column in amounts.T])
    codes, first, present = np.unique(cells // len(steps.start_ns), return_index=True, return_counts=True)
    totals = np.add.reduceat(sums, first) if len(first) else sums
    low, high = (each.reduceat(sums, first) if len(first) else sums for each in (np.minimum, np.maximum))
    low = np.where((present < counted)[:, None], 0.0, low)
    mean = totals / counted
    named = [names[place] for place in codes.tolist()]
    share = 1 / steps.mean_ns if steps.mean_ns else 0.0
    columns = {
        "name": named,
        "kind": ["phase" if name in PHASES else "library" if _LIBRARY.match(name) else "range" for name in named],
        "iterations": np.full(len(named), counted if steps.marked else 0),
        "present": present,
        "calls": mean[:, 0],
        "kernel_count": mean[:, 5],
        **means(totals[:, 6:-2]),
    }
    for place, name in enumerate(("host", "device", "compute", "communication"), 1):
        columns[f"{name}_ns"] = np.rint(mean[:, place])
    for place, name in ((1, "host"), (2, "device")):
        columns |= {f"{name}_low_ns": low[:, place], f"{name}_high_ns": high[:, place]}
        columns |= {f"{name}_share": mean[:, place] * share, f"backward_{name}_ns": np.rint(mean[:, place - 3])}
    return columns


def _table(columns: dict[str, Any], *unknown: str) -> pa.Table:
    """Rows of some columns, without those whose names begin as some unknown ones do; the others are null."""
    known = {name: column for name, column in columns.items() if not name.startswith(unknown)}
    return pa.table([known.get(each.name, pa.nulls(len(known["name"]), each.type)) for each in _SCHEMA], schema=_SCHEMA)


def _longest(ranges: _Ranges, step: NDArray[np.int64], iterations: pa.Table) -> dict[str, Any]:
    """The longest range of each name, in the order of `_means`."""
    order = np.lexsort((-ranges.duration_ns, ranges.code))
    rows = order[run_starts(ranges.code[order])]
    numbers = iterations["iteration"].take(pa.array(step[rows])) if iterations.num_rows else pa.nulls(len(rows), pa.int32())
    times = {"longest_start_ns": ranges.start_ns[rows], "longest_ns": ranges.duration_ns[rows]}
    return {"longest_iteration": numbers, **times}


def _autograd(steps: _Steps, nodes: _Ranges, launches: _Launches, threads: Threads, *, host_known: bool) -> pa.Table:
    """The row of autograd: its nodes on the host, and what they and its threads launched."""
    on_threads = np.isin(launches.thread, threads)
    elsewhere = nodes[~np.isin(nodes.thread, threads)].outermost
    outer = replace(nodes, code=np.zeros(len(nodes), np.int64)).outermost
    step = np.concatenate(
        (steps.holding(launches.at_ns[on_threads]), steps.holding(elsewhere.start_ns), steps.holding(outer.start_ns))
    )
    amounts = np.zeros((len(step), 2 + launches.amounts.shape[1] + 2), np.int64)
    first = on_threads.sum()
    amounts[:first, 2:-2] = launches.amounts[on_threads]
    amounts[first : first + len(elsewhere), 2:-2] = launches.inside(elsewhere)
    amounts[first + len(elsewhere) :, 0] = 1
    amounts[first + len(elsewhere) :, 1] = outer.duration_ns
    columns = _means(steps, np.zeros(len(step), np.int64), step, amounts, ["autograd"])
    columns["kind"] = columns["name"]
    return _table(columns, "backward_", *(() if host_known else ("host_", "calls")))
