"""Sweeps over parameters: rows of kernels for one tensor after the other, as of an optimizer that is not fused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts import kernel_names
from bridge_profiling.facts.compute_kernels import Kernels, between
from bridge_profiling.facts.intervals import Nanoseconds

#: Kernels in a row that make a sweep over parameters. A block of a transformer has at most 20 between two matrix products.
SWEEP = 64

#: Operators on one tensor that a sweep outside of an optimizer consists of.
_ELEMENTWISE = tuple(
    f"aten::{name}"
    for name in (
        "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "pow", "pow_", "square", "sqrt", "sqrt_",
        "rsqrt", "reciprocal", "exp", "log", "abs", "sign", "addcmul", "addcmul_", "addcdiv", "addcdiv_",
        "lerp", "lerp_", "copy_", "zero_", "fill_", "clamp", "clamp_", "clamp_min", "clamp_max", "maximum", "minimum",
        "norm", "linalg_vector_norm", "sum", "mean", "amax", "max", "std", "var",
        "isfinite", "isnan", "isinf", "all", "any", "eq", "ne", "gt", "ge", "lt", "le", "where",
    )
)  # fmt: skip

#: Operators that update or measure a parameter. A sweep of others, outside an optimizer, is what the model computes.
_OF_PARAMETERS = frozenset(
    f"aten::{name}" for name in ("lerp", "lerp_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "linalg_vector_norm", "norm")
)
#: Of a moving average: `average.mul_(decay).add_(parameter, alpha=1 - decay)`.
_SCALES, _ADDS = frozenset(["aten::mul", "aten::mul_"]), frozenset(["aten::add", "aten::add_"])

#: With so many collectives for each kernel, a sweep waits for these.
_COLLECTIVES = 0.5

#: With so many copies to the host for each kernel, the host reads a result for each parameter.
_READ = 0.1

#: Parameters differ in size. A sweep whose kernels take equally long, but for this factor, visits parts of something else.
_UNEQUAL = 1.5

#: The most sweeps over parameters in an iteration: of two networks' optimizers, and of a moving average.
_A_FEW = 3


def of_operators(
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
        alone = bool(operators & _OF_PARAMETERS or average) and met < _COLLECTIVES * (end - begin)
        return bool(of_optimizer[begin:end].any() or alone)

    return _long_runs(of_optimizer | (kernels.launched_by(*_ELEMENTWISE) & outside), visits_parameters)


def by_names(kernels: Kernels, communicates: Nanoseconds, copies: Nanoseconds) -> NDArray[np.bool_]:
    """Kernels of sweeps over parameters in a capture without operators, by their names, their lengths and how often they come.

    A loop that each layer of a model has runs more often. Where the host reads what they compute, it waits for the device.

    Args:
        communicates: as of `of_operators`.
        copies: when copies to the host started.
    """
    length = kernels.end_ns - kernels.start_ns
    iterations = len(kernels.iteration.unique().drop_null())

    def visits_parameters(begin: int, end: int) -> bool:
        shorter, longer = np.quantile(length[begin:end], (0.1, 0.9))
        met, read = (_meanwhile(times, kernels, begin, end) for times in (communicates, copies))
        names = (kernels.names[code] or "" for code in np.unique(kernels.name[begin:end]).tolist())
        alone = longer >= _UNEQUAL * shorter and met < _COLLECTIVES * (end - begin) and read < _READ * (end - begin)
        return bool(alone and kernel_names.update_parameters(names))

    found = _long_runs(kernels.named(kernel_names.is_of_one_tensor), visits_parameters)
    runs = int(np.count_nonzero(np.diff(found, prepend=False) & found))
    return found & (runs <= _A_FEW * iterations)


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


def outside_passes(
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
