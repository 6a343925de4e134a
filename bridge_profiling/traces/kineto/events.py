"""The fields of a Kineto file's events that some table needs, as types for msgspec."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from typing import Any, Literal

import msgspec

#: Kineto's categories since torch 1.8, in lower case. Another category says what a "known" one says, and better.
CATEGORIES = {
    "kernel": "kernel",
    **dict.fromkeys(("gpu_memcpy", "memcpy"), "memcpy"),
    **dict.fromkeys(("gpu_memset", "memset"), "memset"),
    **dict.fromkeys(("cpu_op", "operator"), "operator"),
    "user_annotation": "annotation",
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "runtime", "hip_runtime"), "runtime"),
    "python_function": "python",
    "overhead": "overhead",
    "cuda_sync": "synchronization",
    "trace": "span",
    **dict.fromkeys(("gpu_user_annotation", "ac2g", "fwdbwd", "async_cpu_to_gpu", "forward_backward"), "known"),
    "cpu_instant_event": "instant",
}

# Field types are permissive: ROCm writes numbers as strings, torch 1.8 wrote process and thread ids as text.
Number = int | float | str | None

#: An argument that is missing: an integer, so that a column of them stays a column of integers.
ABSENT = -(1 << 63)

NO_TEXT = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    """The arguments that some table needs. Names are Kineto's; alternatives are those of torch 1.8 and of ROCm."""

    external_id: Number = msgspec.field(default=ABSENT, name="External id")
    old_external_id: Number = msgspec.field(default=ABSENT, name="external id")
    sequence: Number = msgspec.field(default=ABSENT, name="Sequence number")
    input_dims: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input Dims")
    old_input_dims: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input dims")
    call_stack: str | None = msgspec.field(default=None, name="Call stack")
    device: Number = ABSENT
    stream: Number = ABSENT
    # The stream that the work ran on, where torch 2.15 has moved work of CUDA graphs to lanes and calls the lane its stream.
    original_stream: Number = ABSENT
    correlation: Number = ABSENT
    graph: Number = msgspec.field(default=ABSENT, name="graph id")
    bytes: Number = ABSENT
    grid: msgspec.Raw = NO_TEXT
    block: msgspec.Raw = NO_TEXT
    registers: msgspec.Raw = msgspec.field(default=NO_TEXT, name="registers per thread")
    shared_memory: msgspec.Raw = msgspec.field(default=NO_TEXT, name="shared memory")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_elements: Number = msgspec.field(default=ABSENT, name="In msg nelems")
    out_elements: Number = msgspec.field(default=ABSENT, name="Out msg nelems")
    group_size: Number = msgspec.field(default=ABSENT, name="Group size")
    dtype: str | None = None
    group_name: str | int | None = msgspec.field(default=None, name="Process Group Name")
    group_description: str | None = msgspec.field(default=None, name="Process Group Description")
    group_ranks: str | None = msgspec.field(default=None, name="Process Group Ranks")
    source_rank: Number = msgspec.field(default=ABSENT, name="Src Rank")
    destination_rank: Number = msgspec.field(default=ABSENT, name="Dst Rank")
    producer_stream: Number = msgspec.field(default=ABSENT, name="wait_on_stream")
    producer_correlation: Number = msgspec.field(default=ABSENT, name="wait_on_cuda_event_record_corr_id")
    memory_bytes: Number = msgspec.field(default=ABSENT, name="Bytes")
    address: Number = msgspec.field(default=ABSENT, name="Addr")
    device_type: Number = msgspec.field(default=ABSENT, name="Device Type")
    device_id: Number = msgspec.field(default=ABSENT, name="Device Id")
    total_allocated: Number = msgspec.field(default=ABSENT, name="Total Allocated")
    total_reserved: Number = msgspec.field(default=ABSENT, name="Total Reserved")


_LAUNCHED = ("external_id", "old_external_id", "correlation")
_COLLECTIVE = (
    *("collective", "in_elements", "out_elements", "group_size", "dtype", "group_name", "group_description", "group_ranks"),
    *("source_rank", "destination_rank"),
)

_ON_DEVICE = ("device", "stream", "original_stream", "graph", "bytes")
_CONFIGURATION = ("grid", "block", "registers", "shared_memory")

#: Arguments that are read, by the meaning of the category. Every argument in a file is compared with each of them, so fewer are
#: faster. Those of a table are of one type: Python reads a field of objects of one type twice as fast as of several in turn.
_READ = {
    **dict.fromkeys(
        ("operator", "annotation", "runtime", "python", "overhead"),
        (*_LAUNCHED, "sequence", "input_dims", "old_input_dims", "call_stack", *_COLLECTIVE),
    ),
    **dict.fromkeys(("kernel", "memcpy", "memset"), (*_LAUNCHED, *_ON_DEVICE, *_CONFIGURATION, *_COLLECTIVE)),
    "synchronization": ("device", "stream", "correlation", "producer_stream", "producer_correlation"),
    "instant": ("memory_bytes", "address", "device_type", "device_id", "total_allocated", "total_reserved"),
    "span": (),
}

#: Arrows between events.
_ARROWS = ("ac2g", "fwdbwd", "async_cpu_to_gpu", "forward_backward")


class Event(msgspec.Struct, gc=False):
    """One event of any phase and category. Times are in microseconds, as written."""

    cat: str | None = None
    name: str = ""
    pid: Number = None
    tid: Number = None
    ts: Number = None
    dur: Number = None
    args: Args | None = None
    ph: str = ""


class ExactEvent(Event):
    """The same with its start as text, for files whose times have more digits than a float holds."""

    ts: msgspec.Raw = NO_TEXT  # type: ignore[assignment]


#: One of a category's own type has the fields of an `Event` that its table needs.
AnyEvent = Any
Decode = Callable[[bytes | bytearray], list[AnyEvent]]


@cache
def usual_types(*, exact: bool) -> dict[type[msgspec.Struct], str]:
    """A type for the events of each category as torch writes them, with its meaning: the value in `CATEGORIES`.

    Each has only what its table needs, and the type says the category: a trace is read in nine tenths of the time.

    Args:
        exact: starts stay text.
    """
    found: dict[type[msgspec.Struct], str] = {}
    for category, meaning in CATEGORIES.items():
        fields: list[Any] = [("ph", Literal["X"]), ("dur", int | float)]
        if category in _ARROWS:
            fields = [("ph", Literal["s", "t", "f"])]
        elif meaning == "instant":
            fields = [("ph", Literal["i"])]
        if meaning in _READ:
            times: list[Any] = [("ts", msgspec.Raw if exact else int | float), *fields[1:]]
            track: list[Any] = [("name", str), ("pid", Number), ("tid", Number)]
            fields = [fields[0], *track, *times, ("args", _arguments(_READ[meaning]) | None, None)]
        written = "Trace" if category == "trace" else category
        found[msgspec.defstruct(f"_{category}", fields, tag_field="cat", tag=written, gc=False)] = meaning
    return found


@cache
def _arguments(names: tuple[str, ...]) -> Any:
    """A type with some of the fields of `Args`."""
    every = {field.name: field for field in msgspec.structs.fields(Args)}
    written = {name: msgspec.field(default=every[name].default, name=every[name].encode_name) for name in names}
    fields = [(name, every[name].type, field) for name, field in written.items()]
    return msgspec.defstruct("_Args", fields, gc=False)


def decoders(*, exact: bool) -> tuple[Decode, Decode]:
    """Decode arrays of events: of categories and phases as torch writes them, into `usual_types`, and of any others.

    Args:
        exact: starts stay text.
    """
    usual: Any = reduce(or_, usual_types(exact=exact))
    decoders: list[msgspec.json.Decoder[Any]] = [
        msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
        for kind in (usual, ExactEvent if exact else Event)
    ]
    return decoders[0].decode, decoders[1].decode
