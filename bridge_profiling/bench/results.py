"""Results of benchmarks: estimates from samples, bus bandwidth, the file that holds them, and errors. Imports no torch.

The fields of the file are stable: times are in microseconds, sizes in bytes, bandwidths in 10⁹ bytes per second. Keys may be
added; none changes its meaning within a `schema_version`. One file holds results of several benchmarks: a new result replaces
the one of its kind measured under the same conditions, and leaves the others.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_profiling.common.atomic import write_text
from bridge_profiling.common.errors import ProfilingConfigError, TraceError
from bridge_profiling.common.regular_files import read_regular

SCHEMA_VERSION = 1

#: Name of a result file that is found automatically in a directory of captures.
NAME = "bench.json"

#: No benchmark writes a thousandth of it.
_MAX_BYTES = 64 << 20

#: Identifies a result file.
_FORMAT = "bridge-profiling bench"

#: Two results of a kind with equal values of these were measured under the same conditions.
_CONDITIONS = ("kind", "world_size", "hosts", "backend", "dtype", "device", "subject")

_NUMBER = (int, float)

#: Probability with which the bounds hold the true median.
LEVEL = 0.95

#: Fields that a comparison with a capture reads, by kind: those of a result, and those of each of its rows.
_FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "collectives": (
        {"world_size": int, "hosts": int, "backend": str, "device": str},
        {"operation": str, "message_bytes": int, "algorithm_bandwidth_gbs": _NUMBER, "correct": bool},
    ),
    # A setting that could not be measured has no rate.
    "data_loader": ({"subject": str}, {"batches_per_s": (dict, type(None))}),
}


class MeasurementError(RuntimeError):
    """The measured code or operation failed. The message has its error and where it was raised."""

    exit_code = 1


class UnavailableError(MeasurementError):
    """This machine lacks the required hardware or backend. The message says which."""

    exit_code = 4


@dataclass(frozen=True)
class BenchDocument:
    """Results of benchmarks and their file; each result has its `kind`, its conditions and its `rows`."""

    path: Path
    results: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Results of one benchmark, a key of `_FIELDS`."""
        return [result for result in self.results if result["kind"] == kind]


@dataclass(frozen=True)
class Estimate:
    """Statistics of a repeated measurement."""

    count: int  # number of samples
    median: float  # in the unit of the samples
    mean: float  # of the samples
    low: float | None  # lower bound of the median at `LEVEL`; None for fewer than six samples, which give no such bound
    high: float | None  # upper bound

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit; `factor` is above 0."""
        bounds = [None if bound is None else bound * factor for bound in (self.low, self.high)]
        return Estimate(self.count, self.median * factor, self.mean * factor, *bounds)

    def inverted(self, amount: float = 1.0) -> Estimate:
        """The rate that follows from a time: `amount` per sample over it. The mean rate covers all samples together."""
        low, high = (None if bound is None or bound <= 0 else amount / bound for bound in (self.high, self.low))
        median, mean = (amount / time if time else math.inf for time in (self.median, self.mean))
        return Estimate(self.count, median, mean, low, high)

    def as_json(self) -> dict[str, float | int | None]:
        """The numbers with six digits, more than the precision of any clock."""
        numbers = {"median": self.median, "mean": self.mean, "low": self.low, "high": self.high}
        return {"count": self.count} | {name: None if n is None else float(f"{n:.6g}") for name, n in numbers.items()}


def estimate(samples: Sequence[float]) -> Estimate:
    """The median of at least one sample, with bounds that assume no distribution.

    The number of samples below the median is binomial, so the k-th smallest and the k-th largest hold the median between them
    with a probability that is summed up here (Conover, Practical Nonparametric Statistics, section 3.2). Samples are taken to
    be independent.
    """
    ordered, count = sorted(samples), len(samples)
    outside, low, high = 0.0, None, None
    for below in range(count // 2):
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - LEVEL:
            break
        low, high = ordered[below], ordered[-1 - below]
    return Estimate(count, statistics.median(ordered), statistics.fmean(ordered), low, high)


#: Operations that have a bus bandwidth, and whether its factor depends on the number of ranks.
BUS_OPERATIONS = {
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), True),
    **dict.fromkeys(("broadcast", "reduce", "send", "recv", "send_recv"), False),
}


def bus_factor(operation: str, ranks: int) -> float:
    """Ratio of bus bandwidth to algorithm bandwidth of an operation among at least one rank.

    2(n-1)/n for all_reduce, whose every byte is sent out and comes back reduced; (n-1)/n for operations that leave one part in
    n where it is; 1 for others. Source: nccl-tests,
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    """
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if BUS_OPERATIONS.get(operation) else 1.0


def read(path: Path) -> BenchDocument:
    """Read a file of results."""
    try:
        found = json.loads(read_regular(path, _MAX_BYTES))
    except OSError as error:
        made_by = f"bridge-profiling bench collectives -o {path / NAME if path.is_dir() else path}"
        raise ProfilingConfigError(f"{path} cannot be read: {error.strerror}", instead=f"Type {made_by}") from error
    except TraceError as error:
        raise _not_results(path, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _not_results(path, f"it is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise _not_results(path, f"it lacks the format {_FORMAT!r}")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise _not_results(path, f"it has schema version {found.get('schema_version')}; this version reads {SCHEMA_VERSION}")
    results = found.get("results")
    if not isinstance(results, list) or not all(map(_is_result, results)):
        raise _not_results(path, "its results are damaged")
    return BenchDocument(path, results)


def check_addable(path: Path) -> list[dict[str, Any]]:
    """The results in a file to which one can be added; empty if the file does not exist."""
    try:
        return read(path).results if path.exists() else []
    except ProfilingConfigError as error:
        raise ProfilingConfigError(error.what, why=error.why, instead="Use another file with -o, or remove this one") from error


def add(path: Path, result: dict[str, Any]) -> None:
    """Write a result into a file, which is created if missing and keeps results of other conditions."""
    kept = [each for each in check_addable(path) if any(each.get(name) != result.get(name) for name in _CONDITIONS)]
    write(path, [*kept, result])


def write(path: Path, results: list[dict[str, Any]]) -> None:
    """Write a file that holds exactly these results."""
    text = json.dumps({"format": _FORMAT, "schema_version": SCHEMA_VERSION, "results": results}, indent=1, allow_nan=False)
    try:
        write_text(path, text + "\n")
    except OSError as error:
        raise ProfilingConfigError(f"{path} cannot be written: {error.strerror}", instead="Use another file with -o") from error


def _is_result(result: Any) -> bool:
    if not _has(result, {"kind": str, "rows": list}):
        return False
    # Other kinds, of another version, have fields that are unknown here, and are never read.
    of_result, of_row = _FIELDS.get(result["kind"], ({}, {}))
    return _has(result, of_result) and all(_has(row, of_row) for row in result["rows"])


def _has(found: Any, fields: dict[str, Any]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name, ...), kind) for name, kind in fields.items())


def _not_results(path: Path, why: str) -> ProfilingConfigError:
    what = f"{path} is not a result file of bridge-profiling bench"
    return ProfilingConfigError(what, why=why, instead="Name a file made with bridge-profiling bench -o")
