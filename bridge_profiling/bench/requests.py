"""Requests of benchmarks and their options, checked before anything starts. Imports no torch: the command line uses them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from bridge_profiling.common.errors import ProfilingConfigError, did_you_mean, require

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


#: Fields with a smallest value, for each number of a list too.
_LEAST = {"processes": 2, "workers": 0, "prefetch": 1, "batch_size": 1}

#: Fields that name one of some choices, or several of them.
_CHOICES = {"operations": OPERATIONS, "dtype": DTYPES, "backend": BACKENDS}


@dataclass(frozen=True)
class Request:
    """Base of all requests, checked on creation; `kind` names the benchmark, its module, and its results."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None:
                    _check(name, value)


@dataclass(frozen=True)
class CollectivesRequest(Request):
    """Measure communication."""

    kind = "collectives"
    operations: tuple[str, ...]  # of `OPERATIONS`
    sizes: tuple[int, ...]  # message sizes in bytes, ascending: the larger of one rank's input and output
    dtype: str = "float32"  # of `DTYPES`
    backend: str | None = None  # of `BACKENDS`; None for nccl if there is a CUDA device, else gloo
    # Ranks to start on this machine; None for one per CUDA device, else 2. Unused under a launcher.
    processes: int | None = None
    seconds: float = 1.0  # approximate limit for each operation and size


@dataclass(frozen=True)
class DataLoaderRequest(Request):
    """Measure a data loader."""

    kind = "data_loader"
    loader: str  # `module:factory`, which returns a DataLoader, a dataset or any iterable
    workers: tuple[int, ...] = (0, 1, 2, 4)  # numbers of workers to try
    pin_memory: tuple[bool, ...] = (False, True)  # values of pin_memory to try
    prefetch: tuple[int, ...] = (2,)  # numbers of batches that each worker prefetches, to try
    batch_size: int = 1  # of a dataset; unused if the factory returns a DataLoader
    seconds: float = 5.0  # approximate limit for each combination


#: Requests by kind.
KINDS: dict[str, type[Any]] = {each.kind: each for each in (CollectivesRequest, DataLoaderRequest)}


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
    """Sizes in bytes from `1KiB:256MiB:4x` (from, to, factor) or `1KiB,64KiB,1MiB`."""
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
    """Numbers from `0,2,4`, the value of a command line option."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ProfilingConfigError(f"{option} {text!r} is not a list of numbers", instead=f"Type {option} 0,2,4") from error


def module_and_name(text: str, option: str) -> tuple[str, str]:
    """The two parts of `module:factory`, the value of a command line option."""
    module, _, name = text.partition(":")
    require(
        module and all(part.isidentifier() for part in (*module.split("."), *name.split("."))),
        f"{option} {text!r} does not name a factory",
        instead=f"Type {option} module:factory, as in {option} train:make",
    )
    return module, name


def _check(name: str, value: Any) -> None:
    option = "--nproc" if name == "processes" else f"--{name.replace('_', '-')}"
    if name in _LEAST:
        least = _LEAST[name]
        require(value >= least, f"{option} {value} is too small", instead=f"Type {option} {least} or more")
    elif name in _CHOICES:
        typed, choices = value.replace("_", "-"), [choice.replace("_", "-") for choice in _CHOICES[name]]
        require(typed in choices, f"unknown {name.removesuffix('s')} {typed!r}", instead=did_you_mean(typed, choices))
    elif name == "seconds":
        require(value > 0, f"--seconds {value:g} is not a positive time", instead="Type --seconds 1")
    elif name == "loader":
        module_and_name(value, option)
