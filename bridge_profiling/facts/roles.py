"""What one rank's compute kernels are for, where a change of the program would make them faster or needless.

Roles, by what shows them:

- `optimizer_sweep`: `SWEEP` or more kernels in a row, each launched by an operator on one tensor: an optimizer, a moving
  average of weights or a clipping of gradients that visits one parameter after the other. Outside of an optimizer's range
  only element-wise operators count; no layer of a network launches so many without a matrix product in between. A capture
  without operators shows none.
- `attention_other`, `attention_product`: what runs between two batched matrix products and has a softmax in it (scale, mask,
  dropout, casts), and these products. Fused attention has none of that. In a capture without operators any product counts
  as batched, if the softmax takes half as long at least: attention has more scores than values. A router's takes far less.
- `layout`: copies between channels first and channels last, by their names; where convolutions are `_OF_IMAGES` of the compute,
  all that `contiguous`, `clone` and `to` copy to other strides. `layout_norm`: batch norms in channels first.
- `fp64`, `fp32`, `tf32`, `reduced`: matrix products and convolutions by precision; `fp64_elementwise`, `fp32_elementwise`.
  Products of attention are attention's alone if most others are reduced.
- `recomputation`: kernels of forward operators that ran inside the backward pass.

`own_ns` leaves out what an earlier role has that costs time, so that savings of several roles can be added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.device import IdleGaps
from bridge_profiling.facts.host import Operators
from bridge_profiling.facts.intervals import (
    Intervals,
    Nanoseconds,
    coded,
    judged,
    outermost,
    ranged,
    rows_named,
    rows_of,
    totals,
)
from bridge_profiling.facts.kernels import Kernels, between, compute_kernels
from bridge_profiling.facts.names import (
    CHANNELS_FIRST_NORM,
    FULL_PRECISIONS,
    LAYOUT,
    STRIDED_COPY,
    is_convolution,
    is_fp32_elementwise,
    is_fp64_elementwise,
    is_product,
    is_softmax,
    operators_of,
    product_precision,
)
from bridge_profiling.facts.types import schema
from bridge_profiling.traces.tables import NULL, to_int64

#: Kernels in a row that make a sweep over parameters. A block of a transformer has at most 20 between two matrix products.
SWEEP = 64

#: Operators on one tensor that a sweep outside of an optimizer consists of, and those of them that show that it is one.
_ELEMENTWISE, _OF_PARAMETERS = operators_of("elementwise"), frozenset(operators_of("of_parameters"))

#: Of a moving average: `average.mul_(decay).add_(parameter, alpha=1 - decay)`.
_SCALES, _ADDS = frozenset(["aten::mul", "aten::mul_"]), frozenset(["aten::add", "aten::add_"])

#: With so many collectives for each kernel, a sweep waits for these.
_MEETS = 0.5

#: Parameters differ in size. A sweep whose kernels take equally long, but for this factor, visits parts of something else.
_UNEQUAL = 1.5


def _sweeps_of_operators(
    kernels: Kernels, of_optimizer: NDArray[np.bool_], outside: NDArray[np.bool_], communicates: Nanoseconds
) -> NDArray[np.bool_]:
    """Kernels of sweeps over parameters.

    Args:
        of_optimizer: which ones an optimizer launched for one tensor, other than matrix products.
        outside: which ones are launched outside of forward and backward passes.
        communicates: when communication started. Between the kernels of a sweep, it is the reason that these are apart.
    """
    length = kernels.end_ns - kernels.start_ns

    def visits_parameters(begin: int, end: int) -> bool:
        operators = {kernels.operators[code] for code in np.unique(kernels.operator[begin:end]).tolist()}
        shorter, longer = np.quantile(length[begin:end], (0.1, 0.9))
        average = operators & _SCALES and operators & _ADDS and longer >= _UNEQUAL * shorter
        met = _meanwhile(communicates, kernels, begin, end)
        alone = bool(operators & _OF_PARAMETERS or average) and met < _MEETS * (end - begin)
        return bool(of_optimizer[begin:end].any() or alone)

    return _long_runs(of_optimizer | (kernels.launched_by(*_ELEMENTWISE) & outside), visits_parameters)


def _meanwhile(times_ns: Nanoseconds, kernels: Kernels, begin: int, end: int) -> int:
    """How many of some ascending times are between the starts of the first and the last kernel of a run."""
    return int(np.ptp(np.searchsorted(times_ns, kernels.start_ns[[begin, end - 1]])))


def _long_runs(member: NDArray[np.bool_], is_sweep: Callable[[int, int], bool]) -> NDArray[np.bool_]:
    """The members of runs of at least `SWEEP` that a function accepts by their first place and the place after their last."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], member, [False]))))
    begins, ends = edges[::2], edges[1::2]
    real = ends - begins >= SWEEP
    real[real] = [is_sweep(begin, end) for begin, end in zip(begins[real].tolist(), ends[real].tolist(), strict=True)]
    return between(begins[real], ends[real] - 1, len(member))


def _outside_passes(
    time_ns: Nanoseconds, host_events: pa.Table, node: NDArray[np.bool_], forward: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which times are neither inside a node of a backward pass nor after a forward pass: there, loops do not visit layers."""
    start, end = (host_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    # An operator of a forward pass that a node of the backward pass calls belongs to the backward pass.
    until = np.maximum.accumulate(np.where(node, end, np.iinfo(np.int64).min))
    forward = forward & (start >= until)
    mark = np.flatnonzero(node | forward)
    before = np.searchsorted(start[mark], time_ns, side="right") - 1
    in_forward = np.append(forward[mark], False)[before]
    return ~in_forward & (time_ns >= np.append(until[mark], np.iinfo(np.int64).min)[before])


#: The most kernels between a softmax and the products around it: scale, two masks, casts and dropout are eight.
_NEAR = 16

#: A product of attention's backward pass is at most this many kernels before or after the two around the softmax.
_NEXT_PRODUCT = 6

#: A kernel takes this long however little it does: 1.5 to 2.5 µs with its start on an H200.
_LEAST_NS = 2_000

#: Share of the compute in convolutions of a network on images. Patches for a transformer take a hundredth.
_OF_IMAGES = 0.05

_BATCHED = ("aten::bmm", "aten::baddbmm")

_OPTIMIZER = "Optimizer.step#"

_BACKWARD = "autograd::engine::evaluate_function"

#: The forward pass of a compiled function whose result needs a gradient.
_COMPILED = "CompiledFunction"

#: Operators of forward passes that no formula of a backward pass calls.
_FORWARD = (_COMPILED, *operators_of("forward"))

#: Roles that cost nothing by themselves.
_DESCRIBE = ("reduced", "layout_norm")

#: The name of a sweep that no optimizer's range contains.
OUTSIDE = "outside an optimizer"

#: A softmax of attention takes at least this share of the time of the products around it.
_OF_PRODUCTS = 0.5

_ROLES = schema("iteration", "role", "name", "count", "start_ns", "device_ns", "own_ns", "short_ns", "idle_ns")


def host_rows(host_events: pa.Table) -> NDArray[np.bool_]:
    """Which host events `device_roles` reads: ranges of optimizers, nodes of the backward pass, forward operators."""
    named = rows_named(host_events["name"], lambda name: name.startswith((_OPTIMIZER, _BACKWARD)) or name in _FORWARD)
    return rows_of(host_events["category"], "annotation", "operator") & named


def device_roles(
    device_events: pa.Table, kernel_names: pa.Table, host_events: pa.Table, operators: Operators, gaps: IdleGaps
) -> pa.Table:
    """One row per iteration, role and name (of the kernel; of the optimizer for a sweep), most time first.

    Columns: count and start_ns (of the longest) of its kernels; device_ns: their durations; own_ns: without those of an earlier
    role; short_ns: `_LEAST_NS` for each of its own, as far as it takes so long; idle_ns: of a sweep, the device's idle time
    between its kernels that neither communication nor copies explain; of recomputation, the same without starved time, and the
    starved time while the host recomputed.

    Args:
        kernel_names: `name` of each device event.
        host_events: `host_rows` of them.
        operators: of the same rank.
    """
    kernels = compute_kernels(device_events, kernel_names, operators)
    if not len(kernels.start_ns):
        return _ROLES.empty_table()
    length = kernels.end_ns - kernels.start_ns
    taken = np.zeros(len(length), bool)
    found: dict[str, pa.Table] = {}
    optimizer, optimizers = _optimizers(kernels, host_events)
    for role, mine, idle in _roles(kernels, optimizer < len(optimizers) - 1, host_events, device_events, gaps):
        own = mine & ~taken
        taken |= mine & (role not in _DESCRIBE)
        if not mine.any():
            continue
        rows = np.flatnonzero(mine)
        rows = rows[np.argsort(-length[rows], kind="stable")]
        columns = {
            "role": np.full(len(rows), len(found), np.int8),
            "iteration": kernels.iteration.take(rows),
            # Optimizers are numbered after the kernels' names: the names themselves, of a million kernels, take 200 MB.
            "name": optimizer[rows] + len(kernels.names) if role == "optimizer_sweep" else kernels.name[rows],
            "start_ns": kernels.start_ns[rows],
            "device_ns": length[rows],
            "own_ns": np.where(own, length, 0)[rows],
            "short_ns": np.where(own, np.minimum(length, _LEAST_NS), 0)[rows],
            "idle_ns": idle[rows],
        }
        found[role] = pa.table(columns)
    if not found:
        return _ROLES.empty_table()
    return _summed(pa.concat_tables(found.values()), list(found), [*kernels.names, *optimizers])


def _summed(kernels: pa.Table, roles: list[str], names: list[str | None]) -> pa.Table:
    """Kernels by role and name, indices of `roles` and `names`, and iteration. Of each role, the longest kernel comes first."""
    times = ("device_ns", "own_ns", "short_ns", "idle_ns")
    sums = {"count": ("device_ns", "count"), "start_ns": ("start_ns", "first")} | {name: (name, "sum") for name in times}
    table = totals(kernels, ("role", "iteration", "name"), **sums)
    table = table.sort_by([("role", "ascending"), ("device_ns", "descending"), ("start_ns", "ascending")])
    role = pa.array(roles, pa.string()).take(table["role"].combine_chunks())
    return pa.table(
        {"iteration": table["iteration"], "role": role, "name": pa.array(names, pa.string()).take(table["name"])}
        | {name: table[name] for name in ("count", "start_ns", *times)}
    ).cast(_ROLES)


def _roles(
    kernels: Kernels,
    of_optimizer: NDArray[np.bool_],
    host_events: pa.Table,
    device_events: pa.Table,
    gaps: IdleGaps,
) -> Iterator[tuple[str, NDArray[np.bool_], Nanoseconds]]:
    """Each role, its kernels and the idle time of each kernel.

    Args:
        of_optimizer: which kernels an optimizer launched.
    """
    no_idle = np.zeros(len(kernels.start_ns), np.int64)
    operators = rows_of(host_events["category"], "operator")
    # Nodes of the backward pass, and operators of the forward pass.
    nodes = operators & rows_named(host_events["name"], lambda name: name.startswith(_BACKWARD))
    passes = nodes, operators & rows_of(host_events["name"], *_FORWARD)
    products = kernels.named(is_product)
    communicates = np.sort(to_int64(device_events["start_ns"])[rows_of(device_events["kind"], "communication")])
    outside = _outside_passes(kernels.launch_ns, host_events, *passes)
    of_one = of_optimizer & ~products & kernels.launched_by_one_tensor
    sweep = _sweeps_of_operators(kernels, of_one, outside, communicates)
    yield "optimizer_sweep", sweep, _before_ns(kernels, gaps.launch_starved | gaps.dependency_stalled, sweep)
    batched = products & (kernels.launched_by(*_BATCHED) | (kernels.operator < 0))
    least_ns = np.where(kernels.operator < 0, _OF_PRODUCTS * (kernels.end_ns - kernels.start_ns), 0)
    attention = _around_softmax(kernels, kernels.named(is_softmax), products, batched, least_ns)
    yield "attention_other", attention & ~products, no_idle
    yield "layout", _layout_copies(kernels), no_idle
    yield "layout_norm", kernels.named(CHANNELS_FIRST_NORM.search), no_idle
    by_precision = {each: kernels.named(partial(_has_precision, each)) for each in (*FULL_PRECISIONS, "reduced")}
    of_products = [*by_precision.items(), ("attention_product", attention & products)]
    # If attention alone computes in full precision, its products go as well: fused attention does not.
    length = kernels.end_ns - kernels.start_ns
    elsewhere = {name: length[mine & ~attention].sum() for name, mine in by_precision.items()}
    if elsewhere["reduced"] > sum(elsewhere[name] for name in FULL_PRECISIONS):
        of_products.insert(0, of_products.pop())
    for role, mine in of_products:
        yield role, mine, no_idle
    again, idle = _recomputed(kernels, host_events, *passes, products, gaps)
    yield "recomputation", again, idle
    yield "fp64_elementwise", kernels.named(is_fp64_elementwise), no_idle
    yield "fp32_elementwise", kernels.named(is_fp32_elementwise), no_idle


def _layout_copies(kernels: Kernels) -> NDArray[np.bool_]:
    length = kernels.end_ns - kernels.start_ns
    of_images = length[kernels.named(is_convolution)].sum() >= _OF_IMAGES * length.sum()
    found = kernels.named(LAYOUT.search)
    if of_images:  # Concatenations and slices of channels copy with the same kernel, and keep the format.
        found |= kernels.named(STRIDED_COPY.search) & kernels.launched_by("aten::copy_")
    return found


def _has_precision(precision: str, name: str) -> bool:
    found = product_precision(name)
    return found == precision or (precision == "reduced" and found not in (*FULL_PRECISIONS, None))


def _around_softmax(
    kernels: Kernels,
    softmax: NDArray[np.bool_],
    products: NDArray[np.bool_],
    batched: NDArray[np.bool_],
    least_ns: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Attention: from the batched product before each softmax to the one after it, and products next to these.

    Args:
        least_ns: what a softmax next to each product takes at least, if they belong together.
    """
    size = len(softmax)
    places = np.flatnonzero(products)
    at = np.flatnonzero(softmax)
    if not len(places) or not len(at):
        return np.zeros(size, bool)
    after = np.searchsorted(places, at)
    inner = (after > 0) & (after < len(places))
    at, after = at[inner], after[inner]
    first, last = places[after - 1], places[after]
    near = batched[first] & batched[last] & (at - first <= _NEAR) & (last - at <= _NEAR)
    near &= (kernels.end_ns - kernels.start_ns)[at] >= np.maximum(least_ns[first], least_ns[last])
    first, last, after = first[near], last[near], after[near]
    found = between(first, last, size)
    for edge, other, exists in (
        (first, places[np.maximum(after - 2, 0)], after >= 2),
        (last, places[np.minimum(after + 1, len(places) - 1)], after + 1 < len(places)),
    ):
        next_to = exists & batched[other] & (np.abs(edge - other) <= _NEXT_PRODUCT)
        found[other[next_to]] = True
    return found


def _optimizers(kernels: Kernels, host_events: pa.Table) -> tuple[NDArray[np.int64], list[str | None]]:
    """The index of the optimizer in whose range each kernel was launched, and the names; the last one is `OUTSIDE`."""
    codes, names = coded(host_events["name"])
    is_optimizer = judged(codes, names, lambda name: name.startswith(_OPTIMIZER))
    rows = np.flatnonzero(rows_of(host_events["category"], "annotation", "operator") & is_optimizer)
    found = np.full(len(kernels.launch_ns), len(names))
    if len(rows):
        start, end = (host_events[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
        last = np.maximum(np.searchsorted(start, kernels.launch_ns, side="right") - 1, 0)
        inside = (start[last] <= kernels.launch_ns) & (kernels.launch_ns < end[last])
        found = np.where(inside, codes[rows][last], found)
    return found, [*names, OUTSIDE]


def _recomputed(
    kernels: Kernels,
    host_events: pa.Table,
    backward: NDArray[np.bool_],
    forward: NDArray[np.bool_],
    products: NDArray[np.bool_],
    gaps: IdleGaps,
) -> tuple[NDArray[np.bool_], Nanoseconds]:
    """Kernels launched from the first to the last forward operator inside one node of the backward pass.

    At least two different forward operators and a matrix product: one alone can be part of a gradient's formula, unless it is a
    compiled function. The first kernel of a node has the time that the device was idle for want of launches meanwhile.
    """
    found, idle = np.zeros(len(products), bool), np.zeros(len(products), np.int64)
    codes, names = coded(host_events["name"])
    if not backward.any() or not forward.any():
        return found, idle
    compiled = names.index(_COMPILED) if _COMPILED in names else NULL
    thread, start, end = ranged(host_events)
    for one in np.unique(thread[backward]):
        nodes = np.flatnonzero(backward & (thread == one))
        nodes = nodes[outermost(start[nodes], end[nodes])]
        inside = np.flatnonzero(forward & (thread == one))
        node = np.searchsorted(start[nodes], start[inside], side="right") - 1
        within = (node >= 0) & (start[inside] < end[nodes[np.maximum(node, 0)]])
        node, inside = node[within], inside[within]
        if not len(node):
            continue
        first, last = np.full(len(nodes), np.iinfo(np.int64).max), np.full(len(nodes), NULL)
        np.minimum.at(first, node, start[inside])
        np.maximum.at(last, node, end[inside])
        different = np.bincount(np.unique(np.stack((node, codes[inside])), axis=1)[0], minlength=len(nodes))
        different[node[codes[inside] == compiled]] += 1
        chosen = np.flatnonzero(different >= 2)
        place = np.searchsorted(first[chosen], kernels.launch_ns, side="right") - 1
        real = chosen[np.maximum(place, 0)] if len(chosen) else np.zeros(len(place), np.int64)
        again = (place >= 0) & (kernels.thread == one) & (kernels.launch_ns < last[real])
        with_product = np.bincount(real[again & products], minlength=len(nodes)) > 0
        mine = again & with_product[real]
        node, kernel = np.unique(real[mine], return_index=True)
        idle[np.flatnonzero(mine)[kernel]] = gaps.launch_starved.within_ns(first[node], last[node])
        found |= mine
    return found, idle + _before_ns(kernels, gaps.dependency_stalled, found)


def _before_ns(kernels: Kernels, idle: Intervals, mine: NDArray[np.bool_]) -> Nanoseconds:
    """Idle time of the device directly before each kernel that follows another one of some kernels."""
    before = np.concatenate(([False], mine[:-1])) & mine
    ends = np.concatenate(([0], np.maximum.accumulate(kernels.end_ns)[:-1]))
    return idle.within_ns(np.where(before, ends, kernels.start_ns), kernels.start_ns)
