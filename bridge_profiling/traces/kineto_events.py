"""What an event in a Kineto file looks like: typed decoding, and mending of what is not quite JSON.

Field types are permissive: ROCm writes numbers as strings, torch 1.8 wrote process and thread ids as text. What even so
does not fit is decoded event by event, and left out when nothing helps.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, DecimalException
from typing import Any

import msgspec

from bridge_profiling.traces.kineto_stream import Decoders, PieceError

Number = int | float | str | None

#: An argument that is not there: an integer, so that a column of them stays a column of integers.
ABSENT = -(1 << 63)

NO_TEXT = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    """The arguments that some table needs. Names are Kineto's; alternatives are those of torch 1.8 and of ROCm."""

    external_id: Number = msgspec.field(default=ABSENT, name="External id")
    old_external_id: Number = msgspec.field(default=ABSENT, name="external id")
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


class Event(msgspec.Struct, gc=False):
    """One event. Times are in microseconds, as the file has them."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: Number = None
    tid: Number = None
    ts: Number = None
    dur: Number = None
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """The same, times as the text they are: for files whose times have more digits than a float holds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: Number = None
    tid: Number = None
    ts: msgspec.Raw = NO_TEXT
    dur: Number = None
    args: Args | None = None


AnyEvent = Event | ExactEvent


_FAILURES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_QUOTED_OR_NUMBER = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?\b(?:Infinity|inf|NaN|nan)\b(?:\(ind\))?', re.DOTALL)
_BAD_ESCAPE = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})(.?)', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")


class EventReader:
    """Decodes pieces of one file, and counts what it had to leave out.

    Args:
        exact: decode times as the text they are.

    Attributes:
        left_out: events that could not be decoded.
    """

    def __init__(self, *, exact: bool) -> None:
        self.left_out = 0
        self._decode = msgspec.json.Decoder(list[ExactEvent] if exact else list[Event]).decode

    @property
    def decoders(self) -> Decoders[list[AnyEvent]]:
        """For `kineto_stream.read_pieces`."""
        return Decoders(self.events, self.mended, self.document, self.each_event, decode_keys)

    def events(self, text: bytes | bytearray) -> list[AnyEvent]:
        """Decode `[event, …]`.

        Raises:
            PieceError: it is not quite JSON, or an event is not like the others.
        """
        try:
            return self._decode(text)  # type: ignore[return-value]
        except _FAILURES as error:
            raise PieceError(str(error)) from error

    def mended(self, text: bytes | bytearray) -> list[AnyEvent]:
        """Decode `[event, …]` after mending it.

        Raises:
            PieceError: that did not help.
        """
        return self.events(mend(bytes(text)))

    def document(self, text: bytes | bytearray) -> tuple[list[AnyEvent], dict[str, Any]]:
        """Decode the end of a document: the last events, and the keys after them.

        Raises:
            PieceError: it is not quite JSON, or an event is not like the others.
        """
        try:
            keys = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            events = self.events(bytes(keys.pop("traceEvents")))
            return events, {name: msgspec.json.decode(raw) for name, raw in keys.items()}
        except _FAILURES as error:
            raise PieceError(str(error)) from error

    def each_event(self, texts: list[bytes]) -> list[AnyEvent]:
        """Decode events that are known to be whole, together if possible, else one by one."""
        if not texts:
            return []
        try:
            return self.mended(b"[" + b",".join(texts) + b"]")
        except PieceError:
            pass
        events: list[AnyEvent] = []
        for text in texts:
            try:
                events += self.mended(b"[" + text + b"]")
            except PieceError:
                event = _coerced(text)
                if event is None:
                    self.left_out += 1
                else:
                    events.append(event)
        return events


def decode_keys(text: bytes) -> dict[str, Any]:
    """All keys of a document but its events.

    Raises:
        PieceError: it cannot be mended.
    """
    for candidate in (text, mend(text)):
        try:
            keys = msgspec.json.decode(candidate, type=dict[str, Any])
        except _FAILURES as error:
            failure = error
        else:
            keys.pop("traceEvents", None)
            return keys
    raise PieceError(str(failure))


def mend(text: bytes) -> bytes:
    """Make JSON of what writers take for JSON: numbers that are none become null; bad UTF-8, escapes and control
    characters inside strings become what can be shown."""
    return _QUOTED_OR_NUMBER.sub(_mended_token, text.decode("utf-8", "replace").encode())


def _mended_token(token: re.Match[bytes]) -> bytes:
    text = token[0]
    if not text.startswith(b'"'):
        return b"null"
    if b"\\" in text:
        text = _BAD_ESCAPE.sub(rb"\\\\\1", text)
    return _CONTROL.sub(b" ", text)


def exact_ns(microseconds: object) -> int:
    """Nanoseconds of a decimal number of microseconds, without going through a float's rounding.

    Args:
        microseconds: a number, or its text as bytes or str; JSON quotes around it are ignored.

    Raises:
        ValueError: it is no number.
    """
    if type(microseconds) is int:
        return microseconds * 1000
    text = bytes(microseconds).decode() if isinstance(microseconds, (msgspec.Raw, bytes)) else str(microseconds)
    whole, _, fraction = text.partition(".")
    if len(fraction) <= 3 and (not fraction or fraction.isdecimal()) and whole.isdecimal():
        return int(whole + fraction.ljust(3, "0"))
    try:
        return int((Decimal(text.strip('"')) * 1000).to_integral_value())
    except (DecimalException, ValueError, OverflowError) as error:
        raise ValueError(f"{text} is no time") from error


def _coerced(text: bytes) -> AnyEvent | None:
    """An event whose fields have types that no other writer gives them; None when it is none at all."""
    try:
        found = json.loads(mend(text), strict=False)
        args = found.get("args")
        fields: dict[str, Any] = {
            key: value for key in ("cat", "pid", "tid", "ts", "dur") if isinstance(value := found.get(key), int | float | str)
        }
        fields |= {key: str(found.get(key, "")) for key in ("ph", "name")}
        return Event(**fields, args=_coerced_args(args) if isinstance(args, dict) else None)
    except (ValueError, AttributeError, RecursionError):
        return None


def _coerced_args(args: dict[str, Any]) -> Args:
    kept: dict[str, Any] = {}
    for field in msgspec.structs.fields(Args):
        value = args.get(field.encode_name)
        if value is not None and field.type is msgspec.Raw:
            kept[field.name] = msgspec.Raw(json.dumps(value).encode())
        elif isinstance(value, int | float | str):
            kept[field.name] = value if field.type == Number else str(value)
    return Args(**kept)
