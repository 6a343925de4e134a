"""A rank's compute kernels in the order in which they ran, with their names and the operators that launched them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.host import Operators
from bridge_profiling.facts.intervals import Nanoseconds, coded, rows_of
from bridge_profiling.traces.tables import to_int64

#: Operators on many tensors at once.
_ON_LISTS = ("aten::_foreach_", "aten::_fused_")


@dataclass(frozen=True)
class Kernels:
    """A rank's compute kernels by start, with indices into the names of kernels and of the operators that launched them."""

    start_ns: Nanoseconds
    end_ns: Nanoseconds
    launch_ns: Nanoseconds
    thread: NDArray[np.int64]
    iteration: pa.ChunkedArray
    name: NDArray[np.int64]
    names: list[str | None]
    operator: NDArray[np.int64]  # -1 where unknown
    operators: list[str | None]

    def named(self, judge: Callable[[str], object]) -> NDArray[np.bool_]:
        """The kernels whose name a function accepts. It is called once for each name."""
        used = np.bincount(self.name, minlength=len(self.names)) > 0
        return np.array([bool(of and name and judge(name)) for of, name in zip(used, self.names, strict=True)])[self.name]

    def launched_by(self, *wanted: str) -> NDArray[np.bool_]:
        """The kernels that one of some operators launched."""
        names = frozenset(wanted)
        return np.array([*(name in names for name in self.operators), False])[self.operator]

    @property
    def without_operators(self) -> bool:
        """Whether the capture has none of torch's operators; libraries such as CUB have ranges that look like some."""
        return not any(name and name.startswith("aten::") for name in self.operators)

    @property
    def launched_by_one_tensor(self) -> NDArray[np.bool_]:
        """The kernels of torch's operators on one tensor: neither on lists of them, nor fused, nor a program's own."""
        alone = (bool(name and name.startswith("aten::") and not name.startswith(_ON_LISTS)) for name in self.operators)
        return np.array([*alone, False])[self.operator]


def compute_kernels(device_events: pa.Table, kernel_names: pa.Table, operators: Operators) -> Kernels:
    """The compute kernels of device events, whose names are in a table of their own."""
    rows = np.flatnonzero(rows_of(device_events["kind"], "compute"))
    rows = rows[np.argsort(device_events["start_ns"].to_numpy()[rows], kind="stable")]
    start, end, launch, thread, operator = (
        to_int64(device_events[name])[rows] for name in ("start_ns", "end_ns", "launch_start_ns", "launch_thread", "operator")
    )
    name, names = coded(kernel_names["name"])
    iteration, operator = device_events["iteration"].take(rows), operators.codes_of(operator)
    return Kernels(start, end, launch, thread, iteration, name[rows], names, operator, operators.names)


def between(first: NDArray[np.int64], last: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Which places are in one of some spans, ends included."""
    depth = np.zeros(size + 1, np.int64)
    np.add.at(depth, first, 1)
    np.subtract.at(depth, last + 1, 1)
    return np.cumsum(depth[:-1]) > 0
