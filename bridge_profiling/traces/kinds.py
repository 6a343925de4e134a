"""What an event's name says: communication and its backend and operation, or a copy and its memories.

A kernel is judged by its own qualified name (`ncclDevKernel_…`, `deep_ep::…`), not by its template arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
_BACKENDS = [
    (backend, re.compile(_QUALIFIED + pattern))
    for backend, pattern in (
        # Both spellings of DeepEP's namespace: the published one, and the one its authors' own traces carry.
        ("deepep", r"(?:deep_ep|dpsk::ep)::"),
        ("hybridep", r"(?:\w+::)*hybrid_?ep(?:::|_)"),
        ("nvshmem", r"(?:\w+::)*_?nvshmem"),
        ("userbuffers", r"(?:\w+::)*k?userbuffers_"),
        ("rccl", r"(?:rccl|msccl)\w*"),
        ("nccl", r"nccl\w*"),
        # torch's symmetric memory, and the custom all-reduces of inference engines.
        ("other", r"(?:\w+::)*(?:(?:one|two)_shot_all_reduce|multimem_\w*(?:reduce|gather)|cross_device_reduce|mscclpp|hccl)"),
    )
]

_OPERATIONS = [
    (operation, re.compile(pattern, re.IGNORECASE))
    for operation, pattern in (
        ("all_reduce", r"all_?reduce|cross_device_reduce|userbuffers_\w*sum(?!\w*(?:_rs|_ag))"),
        ("all_gather", r"all_?gather|_ag(?:_|$|<|\()"),
        ("reduce_scatter", r"reduce_?scatter|_rs(?:_|$|<|\()"),
        ("all_to_all", r"all_?to_?all"),
        ("send_recv", r"send_?recv"),
        ("send", r"(?:^|_|push)send(?:_|$|<|\()"),
        ("recv", r"(?:^|_|pull)recv(?:_|$|<|\()"),
        ("broadcast", r"broadcast"),
        ("reduce", r"(?<!all)(?<!all_)reduce(?!_?scatter)"),
        ("dispatch", r"dispatch"),
        ("combine", r"combine"),
        ("barrier", r"barrier|device_sync"),
    )
]

#: Our names of collectives, by torch's without underscores and suffixes.
_TORCH_OPERATIONS = {
    name.replace("_", ""): name
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
} | {name: name for name in ("send", "recv", "barrier")}

_SYNCHRONIZATIONS = {
    "stream wait event": "stream_wait_event",
    "event sync": "event",
    "stream sync": "stream",
    "context sync": "context",
}

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
    return _SYNCHRONIZATIONS.get(name.lower().removesuffix("hronize"))
