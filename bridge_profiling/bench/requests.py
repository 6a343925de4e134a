"""What can be measured and with which settings, checked before anything starts. Imports no torch: the command line uses it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from bridge_profiling.errors import ProfilingConfigError

#: As the command line and the tables call them. `send` goes one way between pairs, `send_recv` both ways around a ring.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "send_recv")

BACKENDS = ("nccl", "gloo")

#: Element types of messages, and their bytes.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Larger messages are a slip of the keyboard.
_LARGEST_BYTES = 1 << 36

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class CollectivesRequest:
    """Measure communication.

    Args:
        operations: of `OPERATIONS`.
        sizes: message sizes in bytes, ascending: the larger of one rank's input and output.
        dtype: of `DTYPES`.
        backend: of `BACKENDS`; None for nccl where there is a CUDA device, else gloo.
        processes: ranks to start here; None for one per CUDA device, else 2. Unused where a launcher has started the ranks.
        seconds: for each operation and size, at the most, about.
    """

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    backend: str | None = None
    processes: int | None = None
    seconds: float = 1.0

    def __post_init__(self) -> None:
        for operation in self.operations:
            _one_of(operation, OPERATIONS, "operation", _hyphened)
        _one_of(self.dtype, tuple(DTYPES), "dtype")
        if self.backend is not None:
            _one_of(self.backend, BACKENDS, "backend")
        if self.processes is not None and self.processes < 2:
            raise ProfilingConfigError(
                f"--nproc {self.processes} leaves nobody to communicate with", instead="Type --nproc 2 or more"
            )
        _positive(self.seconds, "--seconds")


@dataclass(frozen=True)
class CopiesRequest:
    """Measure copies between host and device.

    Args:
        sizes: in bytes, ascending.
        seconds: for each kind of copy and size, at the most, about.
    """

    sizes: tuple[int, ...]
    seconds: float = 0.5

    def __post_init__(self) -> None:
        _positive(self.seconds, "--seconds")


@dataclass(frozen=True)
class DataLoaderRequest:
    """Measure a data loader.

    Args:
        loader: `module:factory`, which gives a DataLoader, a dataset or anything that can be iterated over.
        workers: numbers of workers to try.
        pin_memory: whether batches are pinned, to try.
        prefetch: numbers of batches that each worker makes ahead, to try.
        batch_size: of a dataset; unused where the factory gives a DataLoader.
        seconds: for each cell, at the most, about.
    """

    loader: str
    workers: tuple[int, ...] = (0, 1, 2, 4)
    pin_memory: tuple[bool, ...] = (False, True)
    prefetch: tuple[int, ...] = (2,)
    batch_size: int = 1
    seconds: float = 5.0

    def __post_init__(self) -> None:
        module_and_name(self.loader, "--loader")
        _at_least(self.workers, 0, "--workers")
        _at_least(self.prefetch, 1, "--prefetch")
        _at_least((self.batch_size,), 1, "--batch-size")
        _positive(self.seconds, "--seconds")


@dataclass(frozen=True)
class StepRequest:
    """Measure a step.

    Args:
        step: `module:factory`, which gives a function without arguments: one iteration.
        warmup: calls before the first that counts.
        iterations: calls that count.
        seconds: for calls that count, at the most, about.
        samples: that one call works off; None when that is not said.
    """

    step: str
    warmup: int = 5
    iterations: int = 30
    seconds: float = 60.0
    samples: int | None = None

    def __post_init__(self) -> None:
        module_and_name(self.step, "--step")
        _at_least((self.warmup,), 0, "--warmup")
        _at_least((self.iterations,), 1, "--iterations")
        _positive(self.seconds, "--seconds")
        if self.samples is not None:
            _at_least((self.samples,), 1, "--samples")


Request = CollectivesRequest | CopiesRequest | DataLoaderRequest | StepRequest

#: Every benchmark by its name in results.
KINDS: dict[str, type[Request]] = {
    "collectives": CollectivesRequest,
    "copies": CopiesRequest,
    "data_loader": DataLoaderRequest,
    "step": StepRequest,
}


def kind_of(request: Request) -> str:
    """The name of a request's benchmark."""
    return next(name for name, kind in KINDS.items() if isinstance(request, kind))


def to_text(request: Request) -> str:
    """A request as JSON, for another process.

    Args:
        request: which.
    """
    return json.dumps(asdict(request))


def from_text(kind: str, text: str) -> Request:
    """The request that `to_text` wrote.

    Args:
        kind: a key of `KINDS`.
        text: JSON.
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()
    }
    return KINDS[kind](**values)


def sizes_from(text: str) -> tuple[int, ...]:
    """Sizes in bytes from `1KiB:256MiB:4x` (from, to, factor) or `1KiB,64KiB,1MiB`.

    Args:
        text: as typed.

    Raises:
        ProfilingConfigError: it is neither.
    """
    if ":" not in text:
        return tuple(sorted({_bytes(part) for part in text.split(",")}))
    parts = text.split(":")
    factor = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[xX]?\s*", parts[2]) if len(parts) == 3 else None
    if len(parts) > 3 or (len(parts) == 3 and (factor is None or float(factor[1]) <= 1)):
        raise _no_sizes(text)
    first, last, by = _bytes(parts[0]), _bytes(parts[1]), float(factor[1]) if factor else 2.0
    if last < first:
        raise _no_sizes(text, "it ends before it begins")
    sizes, size = [], float(first)
    while round(size) <= last:
        sizes.append(round(size))
        size *= by
    return tuple(dict.fromkeys(sizes))


def operations_from(text: str) -> tuple[str, ...]:
    """Operations from `all-reduce,all-gather`; `send-recv` stands for both ways of it, underscores for hyphens.

    Args:
        text: as typed.
    """
    return tuple(dict.fromkeys(part.strip().replace("-", "_") for part in text.split(",") if part.strip())) or OPERATIONS


def integers_from(text: str, option: str) -> tuple[int, ...]:
    """Numbers from `0,2,4`.

    Args:
        text: as typed.
        option: whose value it is.

    Raises:
        ProfilingConfigError: it is no such list.
    """
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ProfilingConfigError(f"{option} {text!r} is no list of numbers", instead=f"Type {option} 0,2,4") from error
    return found


def module_and_name(text: str, option: str) -> tuple[str, str]:
    """The two parts of `module:factory`.

    Args:
        text: as typed.
        option: whose value it is.

    Raises:
        ProfilingConfigError: it has no such parts.
    """
    module, _, name = text.partition(":")
    if not module or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ProfilingConfigError(
            f"{option} {text!r} names no factory", instead=f"Type {option} module:factory, as in {option} train:make"
        )
    return module, name


def _bytes(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise _no_sizes(text)
    size = round(float(found[1]) * _UNITS[found[2].upper()])
    if not 0 < size <= _LARGEST_BYTES:
        raise _no_sizes(text, f"a size is from 1 to {_LARGEST_BYTES >> 30} GiB")
    return size


def _no_sizes(text: str, why: str = "") -> ProfilingConfigError:
    return ProfilingConfigError(
        f"{text!r} is no size or range of sizes", why=why, instead="Type --sizes 1KiB:256MiB:4x, or --sizes 1KiB,1MiB,64MiB"
    )


def _hyphened(name: str) -> str:
    return name.replace("_", "-")


def _one_of(value: str, known: tuple[str, ...], what: str, shown: Callable[[str], str] = str) -> None:
    if value not in known:
        raise ProfilingConfigError(
            f"there is no {what} {shown(value)!r}", instead=f"Type one of {', '.join(shown(name) for name in known)}"
        )


def _at_least(values: tuple[int, ...], least: int, option: str) -> None:
    if min(values) < least:
        raise ProfilingConfigError(f"{option} {min(values)} is too few", instead=f"Type {least} or more")


def _positive(value: float, option: str) -> None:
    if not value > 0:
        raise ProfilingConfigError(f"{option} {value:g} is no time", instead=f"Type {option} 1")
