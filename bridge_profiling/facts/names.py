"""Names of kernels, of ranges and of runtime calls, and what they show; `names.toml` has the patterns.

A name that does not say what is asked gives None or False: nothing is guessed. Each kernel is also in a group: that of the
first pattern of a group that its name matches.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.traces.kinds import COMMUNICATION, kernel_kind
from bridge_profiling.traces.types import texts

#: Names whose answers are kept: the ranks that a process reads have the same kernels.
_NAMES = 1 << 13

_NAMES_OF = texts(__package__, "names.toml")


def _patterns(table: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    return {name: re.compile(pattern, re.IGNORECASE) for name, pattern in table.items()}


_KERNELS, _PRECISIONS = _patterns(_NAMES_OF["kernels"]), _patterns(_NAMES_OF["precisions"])

#: Matrix products and convolutions; attention; softmaxes, and those of a loss; kernels that memory bounds.
MATRIX_PRODUCT, FUSED_ATTENTION = _KERNELS["matrix_product"], _KERNELS["fused_attention"]
_SOFTMAX, _LOG_SOFTMAX, _BOUND_BY_MEMORY = (_KERNELS[name] for name in ("softmax", "log_softmax", "bound_by_memory"))

#: Precisions of matrix products that 16 bits make much faster, as `product_precision` names them.
FULL_PRECISIONS = ("fp64", "fp32", "tf32")

#: Copies of an image between channels first and channels last.
LAYOUT = re.compile(r"nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw", re.IGNORECASE)

_CONVOLUTION = re.compile(r"conv(?!ert)|implicit_gemm|fprop|[dw]grad|winograd|scudnn|\bfft2d_", re.IGNORECASE)

#: torch copies with this kernel where the two tensors differ in strides; others copy several elements at a time.
STRIDED_COPY = re.compile(r"at::native::elementwise_kernel<.*direct_copy_kernel")

#: Normalization of a batch of images in channels first.
CHANNELS_FIRST_NORM = re.compile(r"at::native::batch_norm_(?!\w*channels_last)")

_NOT_FP32 = re.compile(r"bfloat16|half|double|multi_tensor", re.IGNORECASE)


@lru_cache(maxsize=_NAMES)
def is_product(name: str) -> bool:
    """Whether it is a matrix product or a convolution, and not one inside fused attention."""
    return bool(MATRIX_PRODUCT.search(name)) and not FUSED_ATTENTION.search(name)


@lru_cache(maxsize=_NAMES)
def is_product_or_attention(name: str) -> bool:
    """Whether it is a matrix product, a convolution or fused attention."""
    return bool(MATRIX_PRODUCT.search(name) or FUSED_ATTENTION.search(name))


@lru_cache(maxsize=_NAMES)
def product_precision(name: str) -> str | None:
    """The precision of a product or a convolution whose name says it, else None."""
    found = (precision for precision, pattern in _PRECISIONS.items() if pattern.search(name))
    return next(found, None) if is_product_or_attention(name) else None


@lru_cache(maxsize=_NAMES)
def is_softmax(name: str) -> bool:
    """Whether it computes a softmax by itself: not that of a loss, and not inside fused attention."""
    return bool(_SOFTMAX.search(name)) and not (_LOG_SOFTMAX.search(name) or FUSED_ATTENTION.search(name))


@lru_cache(maxsize=_NAMES)
def is_convolution(name: str) -> bool:
    """Whether it is a convolution or a gradient of one."""
    return is_product(name) and bool(_CONVOLUTION.search(name))


@lru_cache(maxsize=_NAMES)
def is_fp32_elementwise(name: str) -> bool:
    """Whether it is one of torch's kernels that memory bounds, on fp32 as far as its name says."""
    return bool(_BOUND_BY_MEMORY.search(name)) and not _NOT_FP32.search(name)


@lru_cache(maxsize=_NAMES)
def is_fp64_elementwise(name: str) -> bool:
    """Whether it is one of torch's kernels that memory bounds, on fp64."""
    return bool(_BOUND_BY_MEMORY.search(name)) and "<double" in name


#: Names a TOML file whose table `groups` has more patterns, which come first: `"my group" = "regular expression"`.
VARIABLE = "BRIDGE_PROFILING_KERNEL_GROUPS"

#: Kernels that no pattern knows.
OTHER = "other"

#: Copies, and kernels that copy.
COPY = "copy"

#: Group, and the pattern of its kernels' names.
GROUPS = tuple((group, _KERNELS[name]) for name, group in _NAMES_OF["groups"].items())


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
        return tuple(_patterns(written).items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, re.error) as error:
        raise ProfilingConfigError(
            f"{path}, which {VARIABLE} names, cannot be used",
            why=str(error),
            instead='Write a TOML file: [groups], then lines such as "my group" = "my_kernel|other_kernel"',
        ) from error


#: Names of ranges in which a program waits for its data, writes a checkpoint, collects garbage, compiles.
DATA_LOADING, CHECKPOINT, GARBAGE, COMPILING = (
    str(_NAMES_OF["ranges"][name]) for name in ("data_loading", "checkpoint", "garbage", "compiling")
)

#: Names of calls that put work on the device.
ENQUEUING = re.compile("Launch|Mem(?:cpy|set)")

#: Calls that return when the device has finished; that give memory back to the driver; and these with those that get some.
SYNCHRONIZING: tuple[str, ...] = tuple(_NAMES_OF["calls"]["synchronizing"])
FREEING: tuple[str, ...] = tuple(_NAMES_OF["calls"]["freeing"])
ALLOCATING = (*FREEING, *_NAMES_OF["calls"]["getting"])


def operators_of(kind: str) -> tuple[str, ...]:
    """torch's operators of a kind."""
    return tuple(f"aten::{name}" for name in _NAMES_OF["operators"][kind])


#: Ranges around whole iterations and windows.
WHOLE = re.compile(r"ProfilerStep|iteration[_ #-]?\d+$|bridge_profiling_window$", re.IGNORECASE)
