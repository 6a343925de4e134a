"""The fields of a Kineto file's events that some table needs, as types for msgspec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

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


class _Fields(msgspec.Struct, gc=False):
    """What every kind of event has besides its phase. Times are in microseconds, as written."""

    cat: str | None = None
    name: str = ""
    pid: Number = None
    tid: Number = None
    ts: Number = None
    dur: Number = None
    args: Args | None = None


class Event(_Fields):
    """One event of any phase."""

    ph: str = ""


class ExactEvent(Event):
    """The same with its start as text, for files whose times have more digits than a float holds."""

    ts: msgspec.Raw = NO_TEXT  # type: ignore[assignment]


class _Complete(_Fields, tag_field="ph", tag="X"):
    ph: ClassVar[str] = "X"


class _ExactComplete(_Complete):
    ts: msgspec.Raw = NO_TEXT  # type: ignore[assignment]


class _Instant(_Complete, tag="i"):
    ph: ClassVar[str] = "i"


class _ExactInstant(_ExactComplete, tag="i"):
    ph: ClassVar[str] = "i"


class _NoEvent(msgspec.Struct, gc=False):
    """Nothing of an arrow or of a process's name is read; a third of the events are arrows."""

    dur: ClassVar[None] = None


class _ArrowStart(_NoEvent, tag_field="ph", tag="s"):
    ph: ClassVar[str] = "s"


class _ArrowStep(_NoEvent, tag_field="ph", tag="t"):
    ph: ClassVar[str] = "t"


class _ArrowEnd(_NoEvent, tag_field="ph", tag="f"):
    ph: ClassVar[str] = "f"


class _Metadata(_NoEvent, tag_field="ph", tag="M"):
    ph: ClassVar[str] = "M"


AnyEvent = Event | ExactEvent
Decode = Callable[[bytes | bytearray], list[AnyEvent]]

_UsualEvent = _Complete | _Instant | _ArrowStart | _ArrowStep | _ArrowEnd | _Metadata
_UsualExactEvent = _ExactComplete | _ExactInstant | _ArrowStart | _ArrowStep | _ArrowEnd | _Metadata


def decoders(*, exact: bool) -> tuple[Decode, Decode]:
    """Decode arrays of events: of the phases that torch writes, a sixth faster, and of any others.

    Events of those phases have the fields of an `Event` that tables need.

    Args:
        exact: starts stay text.
    """
    usual, any_other = (_UsualExactEvent, ExactEvent) if exact else (_UsualEvent, Event)
    decoders: list[msgspec.json.Decoder[Any]] = [msgspec.json.Decoder(list[kind]) for kind in (usual, any_other)]  # type: ignore[valid-type]
    return decoders[0].decode, decoders[1].decode
