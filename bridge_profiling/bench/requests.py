"""Requests of benchmarks and their options, checked before anything starts. Imports no torch: the command line uses them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge_profiling.errors import ProfilingConfigError, require

#: `send` goes one way between pairs of ranks, `send_recv` both ways around a ring.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "send_recv")

BACKENDS = ("nccl", "gloo")

#: Element types of messages, and their bytes.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Larger messages are typing errors.
_LARGEST_BYTES = 1 << 36

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")

#: From, to, and the factor between two sizes.
_RANGE = re.compile(r"([^:]+):([^:]+)(?::\s*(\d+(?:\.\d+)?)\s*[xX]?\s*)?")

_SIZES_EXAMPLE = "Type --sizes 1KiB:256MiB:4x, or --sizes 1KiB,1MiB,64MiB"


@dataclass(frozen=True)
class CollectivesRequest:
    """Measure communication.

    Args:
        operations: of `OPERATIONS`.
        sizes: message sizes in bytes, ascending: the larger of one rank's input and output.
        dtype: of `DTYPES`.
        backend: of `BACKENDS`; None for nccl if there is a CUDA device, else gloo.
        processes: ranks to start on this machine; None for one per CUDA device, else 2. Unused under a launcher.
        seconds: approximate limit for each operation and size.
    """

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    backend: str | None = None
    processes: int | None = None
    seconds: float = 1.0

    def __post_init__(self) -> None:
        for operation in self.operations:
            _check_choice("operation", operation.replace("_", "-"), [each.replace("_", "-") for each in OPERATIONS])
        _check_choice("dtype", self.dtype, DTYPES)
        if self.backend is not None:
            _check_choice("backend", self.backend, BACKENDS)
        if self.processes is not None:
            _check_least("--nproc", (self.processes,), 2)
        _check_seconds(self.seconds)


@dataclass(frozen=True)
class CopiesRequest:
    """Measure copies between host and device.

    Args:
        sizes: in bytes, ascending.
        seconds: approximate limit for each kind of copy and size.
    """

    sizes: tuple[int, ...]
    seconds: float = 0.5

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


@dataclass(frozen=True)
class DataLoaderRequest:
    """Measure a data loader.

    Args:
        loader: `module:factory`, which returns a DataLoader, a dataset or any iterable.
        workers: numbers of workers to try.
        pin_memory: values of pin_memory to try.
        prefetch: numbers of batches that each worker prefetches, to try.
        batch_size: of a dataset; unused if the factory returns a DataLoader.
        seconds: approximate limit for each combination.
    """

    loader: str
    workers: tuple[int, ...] = (0, 1, 2, 4)
    pin_memory: tuple[bool, ...] = (False, True)
    prefetch: tuple[int, ...] = (2,)
    batch_size: int = 1
    seconds: float = 5.0

    def __post_init__(self) -> None:
        module_and_name(self.loader, "--loader")
        _check_least("--workers", self.workers, 0)
        _check_least("--prefetch", self.prefetch, 1)
        _check_least("--batch-size", (self.batch_size,), 1)
        _check_seconds(self.seconds)


@dataclass(frozen=True)
class StepRequest:
    """Measure a step.

    Args:
        step: `module:factory`, which returns a function without arguments that runs one iteration.
        warmup: calls before the first that counts.
        iterations: calls that count.
        seconds: approximate limit for the calls that count.
        samples: samples processed by one call; None if unknown.
    """

    step: str
    warmup: int = 5
    iterations: int = 30
    seconds: float = 60.0
    samples: int | None = None

    def __post_init__(self) -> None:
        module_and_name(self.step, "--step")
        _check_least("--warmup", (self.warmup,), 0)
        _check_least("--iterations", (self.iterations,), 1)
        _check_least("--samples", (1 if self.samples is None else self.samples,), 1)
        _check_seconds(self.seconds)


Request = CollectivesRequest | CopiesRequest | DataLoaderRequest | StepRequest

#: Requests by the kind of benchmark, the name of its module and of the kind of its results.
KINDS: dict[str, type[Request]] = {
    "collectives": CollectivesRequest,
    "copies": CopiesRequest,
    "data_loader": DataLoaderRequest,
    "step": StepRequest,
}


def kind_of(request: Request) -> str:
    """The kind of a request, a key of `KINDS`."""
    return next(name for name, kind in KINDS.items() if isinstance(request, kind))


def to_text(request: Request) -> str:
    """A request as JSON, for another process."""
    return json.dumps(asdict(request))


def from_text(kind: str, text: str) -> Request:
    """The request of a kind that `to_text` wrote."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()
    }
    return KINDS[kind](**values)


def sizes_from(text: str) -> tuple[int, ...]:
    """Sizes in bytes from `1KiB:256MiB:4x` (from, to, factor) or `1KiB,64KiB,1MiB`.

    Raises:
        ProfilingConfigError: the text is neither.
    """
    found = _RANGE.fullmatch(text)
    if found is None:
        return tuple(sorted({_bytes(part) for part in text.split(",")}))
    first, last, factor = _bytes(found[1]), _bytes(found[2]), float(found[3] or 2)
    require(first <= last and factor > 1, f"{text!r} is not a range of growing sizes", instead=_SIZES_EXAMPLE)
    sizes, size = [], float(first)
    while round(size) <= last:
        sizes.append(round(size))
        size *= factor
    return tuple(dict.fromkeys(sizes))


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text)
    size = round(float(found[1]) * _UNITS.get(found[2].upper(), 0)) if found else 0
    limit = f"{_LARGEST_BYTES >> 30} GiB"
    require(0 < size <= _LARGEST_BYTES, f"{text!r} is not a size between 1 byte and {limit}", instead=_SIZES_EXAMPLE)
    return size


def operations_from(text: str) -> tuple[str, ...]:
    """Operations from `all-reduce,all-gather`, with hyphens or underscores; all if the text is empty."""
    return tuple(dict.fromkeys(part.strip().replace("-", "_") for part in text.split(",") if part.strip())) or OPERATIONS


def integers_from(text: str, option: str) -> tuple[int, ...]:
    """Numbers from `0,2,4`, the value of a command line option.

    Raises:
        ProfilingConfigError: the text is not a list of numbers.
    """
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ProfilingConfigError(f"{option} {text!r} is not a list of numbers", instead=f"Type {option} 0,2,4") from error


def module_and_name(text: str, option: str) -> tuple[str, str]:
    """The two parts of `module:factory`, the value of a command line option.

    Raises:
        ProfilingConfigError: the text has another form.
    """
    module, _, name = text.partition(":")
    require(
        module and all(part.isidentifier() for part in (*module.split("."), *name.split("."))),
        f"{option} {text!r} does not name a factory",
        instead=f"Type {option} module:factory, as in {option} train:make",
    )
    return module, name


def _check_choice(what: str, value: str, choices: Collection[str]) -> None:
    require(value in choices, f"unknown {what} {value!r}", instead=f"Type one of {', '.join(choices)}")


def _check_least(option: str, values: Sequence[int], least: int) -> None:
    require(min(values) >= least, f"{option} {min(values)} is too small", instead=f"Type {option} {least} or more")


def _check_seconds(seconds: float) -> None:
    require(seconds > 0, f"--seconds {seconds:g} is not a positive time", instead="Type --seconds 1")
