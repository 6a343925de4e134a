"""Kernels by what they do: one table of patterns that their names are compared with. The first that matches counts."""

from __future__ import annotations

import os
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.facts.kernel_names import FUSED_ATTENTION, LOG_SOFTMAX, MATRIX_PRODUCT, SOFTMAX
from bridge_profiling.traces.kinds import COMMUNICATION, kernel_kind
from bridge_profiling.traces.tables import fields

#: Names a TOML file whose table `groups` has more patterns, which come first: `"my group" = "regular expression"`.
VARIABLE = "BRIDGE_PROFILING_KERNEL_GROUPS"

#: Kernels that no pattern knows.
OTHER = "other"

#: Copies, and kernels that copy.
COPY = "copy"

_CONVOLUTION = re.compile(r"conv|[dw]grad_(?:engine|alg)|winograd|scudnn|fft2d_|implicit_gemm", re.IGNORECASE)

#: Group, and the pattern of its kernels' names, by convention of cuBLAS, CUTLASS, cuDNN, PyTorch, CUB, Triton, Apex and TE.
GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("attention", FUSED_ATTENTION),
    ("loss", LOG_SOFTMAX),
    ("loss", re.compile(r"nll_loss|mse_(?:kernel|loss)|_loss_", re.IGNORECASE)),
    ("attention", SOFTMAX),
    ("optimizer", re.compile(r"multi_tensor|adam|lamb_|_sgd|foreach", re.IGNORECASE)),
    ("convolution", _CONVOLUTION),
    ("matrix product", MATRIX_PRODUCT),
    ("normalization", re.compile(r"(?:layer|rms|batch|group|instance)_?norm|GammaBeta|\bbn_[fb]w", re.IGNORECASE)),
    ("sort and scan", re.compile(r"\bcub::|radix_?sort|bitonic|DeviceScan|topk|_scan_", re.IGNORECASE)),
    ("indexing", re.compile(r"embedding|index|gather|scatter|compute_grad_weight|krn_partial|partial_segments", re.IGNORECASE)),
    (COPY, re.compile(r"copy_kernel|CatArray|transpose|nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw|_cast_", re.IGNORECASE)),
    ("reduction", re.compile(r"reduce|triton_(?:red|per)_|welford", re.IGNORECASE)),
    ("elementwise", re.compile(r"elementwise|triton_poi_|dropout|triu_tril|gelu|silu|swiglu|rope|rotary", re.IGNORECASE)),
)

_SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        *fields(pa.string(), "source", "group"),
        *fields(pa.int64(), "count", "name_count"),
        *fields(pa.float64(), "total_us", "share"),
        ("names", pa.list_(pa.string())),
    ]
)

#: Names of a group that are listed, those with the most time.
_NAMES = 5


def kernel_groups(kernels: pa.Table, copies: pa.Table) -> pa.Table:
    """One row per rank, source and group over the whole capture, most time first.

    Returns:
        `count` and `total_us` of its kernels, or copies; `share` of the time of the rank's kernels and copies; `name_count`:
        different names in it, and `names`: those with the most time. Communication has a group for each operation.
    """
    sums: dict[tuple[int, str, str], list[Any]] = defaultdict(lambda: [0, 0.0, {}])
    read = kernels.select(["rank", "source", "name", "group", "count", "total_us"])
    rows = [(row, row["group"]) for row in read.to_pylist()]
    rows += [
        ({**row, "name": f"{row['direction']} {row['from_memory']} to {row['to_memory']}"}, COPY)
        for row in copies.to_pylist()
        if row["kind"] == "memcpy"
    ]
    for row, group in rows:
        mine = sums[row["rank"], row["source"], group]
        mine[0] += row["count"]
        mine[1] += row["total_us"]
        mine[2][row["name"]] = mine[2].get(row["name"], 0.0) + row["total_us"]
    whole: dict[tuple[int, str], float] = defaultdict(float)
    for (rank, source, _), (_, total_us, _) in sums.items():
        whole[rank, source] += total_us
    found = [
        {
            "rank": rank,
            "source": source,
            "group": group,
            "count": count,
            "total_us": total_us,
            "share": total_us / whole[rank, source] if whole[rank, source] else 0.0,
            "name_count": len(names),
            "names": sorted(names, key=lambda name: -names[name])[:_NAMES],
        }
        for (rank, source, group), (count, total_us, names) in sums.items()
    ]
    found.sort(key=lambda row: (row["rank"], row["source"], -row["total_us"]))
    return pa.Table.from_pylist(found, schema=_SCHEMA)


@cache
def group_of(name: str, kind: str) -> str:
    """The group of a kernel, by its name and `kind` in `device_events`.

    Raises:
        ProfilingConfigError: the file that `VARIABLE` names cannot be used.
    """
    if kind == COMMUNICATION:
        return f"communication: {kernel_kind(name).operation or OTHER}"
    return next((group for group, pattern in (*_more(), *GROUPS) if pattern.search(name)), OTHER)


@cache
def _more() -> tuple[tuple[str, re.Pattern[str]], ...]:
    path = os.environ.get(VARIABLE)
    if not path:
        return ()
    try:
        written = tomllib.loads(Path(path).read_text(encoding="utf-8"))["groups"]
        return tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in written.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, re.error) as error:
        raise ProfilingConfigError(
            f"{path}, which {VARIABLE} names, cannot be used",
            why=str(error),
            instead='Write a TOML file: [groups], then lines such as "my group" = "my_kernel|other_kernel"',
        ) from error
