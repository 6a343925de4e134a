"""What an event's name says: communication and its backend and operation, or a copy and its memories.

A kernel is judged by its own qualified name (`ncclDevKernel_…`, `deep_ep::…`), not by its template arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bridge_profiling.traces.types import texts

#: Names whose answers are kept: the ranks that a process reads have the same.
_NAMES = 1 << 13

COMPUTE, COMMUNICATION, MEMCPY, MEMSET = "compute", "communication", "memcpy", "memset"


@dataclass(frozen=True)
class Kernel:
    """What a kernel's name says; values as in the tables, None for those it does not say."""

    kind: str
    backend: str | None = None
    operation: str | None = None


@dataclass(frozen=True)
class Copy:
    """What a copy's name says."""

    direction: str
    from_memory: str
    to_memory: str


# A return type, then perhaps "(anonymous namespace)::".
_QUALIFIED = r"^(?:(?:void|int|float|__global__)\s+)*(?:\(anonymous namespace\)::|<unnamed>::)*"
_NAMES_OF = texts(__package__, "names.toml")
_BACKENDS = [(backend, re.compile(_QUALIFIED + pattern)) for backend, pattern in _NAMES_OF["backends"].items()]
_OPERATIONS = [(operation, re.compile(pattern, re.IGNORECASE)) for operation, pattern in _NAMES_OF["operations"].items()]

#: Our names of collectives, by torch's without underscores and suffixes.
_TORCH_OPERATIONS = {
    name.replace("_", ""): name
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
} | {name: name for name in ("send", "recv", "barrier")}

_COPY = re.compile(r"(H|D)(?:ost|evice)?to(H|D)|(P)to(P)", re.IGNORECASE)
_MEMORIES = re.compile(r"\(\s*(\w+)\s*->\s*(\w+)\s*\)")
_MEMORY_KINDS = {"pageable", "pinned", "device", "managed", "array"}


@lru_cache(maxsize=_NAMES)
def kernel_kind(name: str, *, rocm: bool = False) -> Kernel:
    """What a kernel is, from its demangled name. On an AMD device, NCCL's kernels are RCCL's."""
    for backend, pattern in _BACKENDS:
        if pattern.match(name):
            own = re.split(r"[(]ncclDevKernelArgs|[(]", name, maxsplit=1)[0] or name
            operation = next((operation for operation, pattern in _OPERATIONS if pattern.search(own)), None)
            return Kernel(COMMUNICATION, "rccl" if rocm and backend == "nccl" else backend, operation)
    return Kernel(COMPUTE)


@lru_cache(maxsize=_NAMES)
def torch_operation(name: str) -> str:
    """torch's name of a collective (`allgather_into_tensor_coalesced`, `_reduce_scatter_base`) as `collectives.operation`."""
    plain = re.sub(r"_(?:base|tensor|into|coalesced|single|v)(?=_|$)", "", name.lower()).replace("_", "")
    return _TORCH_OPERATIONS.get(plain.removesuffix("v"), _TORCH_OPERATIONS.get(plain, name))


def configuration(grid: Sequence[int], block: Sequence[int], registers: int | None, shared_bytes: int | None) -> str | None:
    """A kernel's launch as `device_events.configuration`; None where it is not recorded, or no GPU can launch it."""
    numbers = [number for number in (*grid, *block, registers, shared_bytes) if number is not None]
    if len(grid) != 3 or len(block) != 3 or not all(0 <= number < 1 << 31 for number in numbers) or 0 in (*grid, *block):
        return None
    return json.dumps([[*grid], [*block], registers, shared_bytes], separators=(",", ":"))


@lru_cache(maxsize=_NAMES)
def copy_kind(name: str) -> Copy:
    """What a copy is, from a name like `Memcpy HtoD (Pinned -> Device)` or ROCm's `CopyHostToDevice`."""
    found = _COPY.search(name)
    direction = "to".join(letter.upper() for letter in found.groups() if letter) if found else "other"
    memories = _MEMORIES.search(name)
    return Copy(direction, *(map(memory_kind, memories.groups()) if memories else ("unknown", "unknown")))


def memory_kind(name: str) -> str:
    """A profiler's word for a memory as the tables have it; `unknown` when it does not say how the memory is held."""
    return lowered if (lowered := name.lower()) in _MEMORY_KINDS else "unknown"


def synchronization_kind(name: str) -> str | None:
    """What a synchronization record is, from its name; None when the name is not one."""
    return _NAMES_OF["synchronizations"].get(name.lower().removesuffix("hronize"))
