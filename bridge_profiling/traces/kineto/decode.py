"""Decodes a Kineto file: its events, repaired where they are not quite JSON, and what its other keys say of the rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

import msgspec

from bridge_profiling.traces.bounds import MAX_BASE_NS
from bridge_profiling.traces.joins import MAX_RANKS
from bridge_profiling.traces.kineto.columns import integer
from bridge_profiling.traces.kineto.stream import Stream
from bridge_profiling.traces.tables import MAX_SIZE
from bridge_profiling.traces.types import ProcessGroup, RankInfo, RankSource, texts

CATEGORIES: Mapping[str, str] = texts("bridge_profiling.traces", "names.toml")["categories"]

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


_FAILURES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: So many pieces may hold unusual events before all are expected to. Kineto names threads at the start, or at the end.
_MANY_UNUSUAL = 2

#: A string that is cut off counts to its end: looking for it again at each of its quotes would take quadratic time.
_QUOTED_OR_NUMBER = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|-?\b(?:Infinity|inf|NaN|nan)\b(?:\(ind\))?', re.DOTALL)
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])

#: Traces of events that cannot be decoded.
_PHASE = re.compile(rb'"ph"\s*:')
_CATEGORY = re.compile(rb'"cat"\s*:\s*"[^"]*"')
_LOST_DEVICE = re.compile(rb'"cat"\s*:\s*"(?:kernel|(?:gpu_)?mem(?:cpy|set))"', re.IGNORECASE)

_BAD_ESCAPE = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})(.?)', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")


class EventReader:
    """Decodes one file; `exact` decodes starts as text. Raises TraceError when it is not a trace or exceeds its bounds."""

    def __init__(self, path: Path, *, exact: bool) -> None:
        self.keys: dict[str, Any] = {}  # the document's other keys; complete when reading has ended
        self.left_out = 0  # events that could not be decoded, as far as they can be counted
        self.lost_device = 0  # device events among them
        self.damaged = False  # whether text between whole events is not JSON
        self.hole_bytes = 0  # of damaged text that does not show how many events it held
        self._error: str | None = None
        self._path, self._stream = path, Stream(path)
        self._decode_usual, self._decode = decoders(exact=exact)
        self._unusual_pieces = 0

    def pieces(self) -> Iterator[list[AnyEvent]]:
        """The file's events, a piece at a time. A file that ends early yields what it holds."""
        stream = self._stream
        if not stream.bare:
            self._add_keys(stream.head + b"]}", "before the events")
        for text in stream.pieces():
            try:
                yield self._decode_usual(text)
            except _FAILURES:
                yield self._unusual(text)
        if stream.tail is None:
            end = self._of_end() if not stream.bare and stream.error is None else None
            if end is not None:
                yield end
                return
            yield self._one_by_one(last=True)
        if stream.tail is None:
            if not stream.bare or stream.rest.strip(b" \t\r\n,"):
                self._error = self.error or f"{self._path} is cut off: the JSON ends inside the events"
        elif not stream.bare and stream.error is None:
            self._add_keys(b'{"traceEvents":[]' + stream.tail, "after the events")

    @property
    def bytes_read(self) -> int:
        """Size of the file's text so far."""
        return self._stream.bytes_read

    @property
    def error(self) -> str | None:
        """Why the file could not be read to its end, naming it."""
        return self._stream.error or self._error

    def _of_end(self) -> list[AnyEvent] | None:
        """The last events, and the keys after them; None when they are not quite JSON, or an event is unlike the others."""
        try:
            keys = msgspec.json.decode(b'{"traceEvents":[' + self._stream.rest, type=dict[str, msgspec.Raw])
            events = self._decode(bytes(keys.pop("traceEvents")))
            self.keys |= {name: msgspec.json.decode(raw) for name, raw in keys.items()}
        except _FAILURES:
            return None
        return events

    def _unusual(self, text: bytearray) -> list[AnyEvent]:
        """Events of a piece that does not hold only usual ones: names of threads have no category."""
        try:
            events = self._decode(text)
        except _FAILURES:
            return self._one_by_one()
        self._unusual_pieces += 1
        if self._unusual_pieces > _MANY_UNUSUAL:
            self._decode_usual = self._decode
        return events

    def _one_by_one(self, *, last: bool = False) -> list[AnyEvent]:
        """Events of a piece that holds one which is damaged, or unlike the others."""
        found: list[AnyEvent] = []

        def take(text: bytes) -> bool:
            with suppress(*_FAILURES):
                found.extend(self._decode(b"[%b]" % text))
                return True
            try:
                texts = [bytes(raw) for raw in _ELEMENTS.decode(b"[%b]" % _repaired(text))]
            except _FAILURES:
                return False
            for each in texts:
                try:
                    event = self._decode(b"[%b]" % each)[0]
                except _FAILURES:
                    event = _coerced(each)
                if event is None:
                    lose(each, damaged=False)
                else:
                    found.append(event)
            return True

        def lose(text: bytes, *, damaged: bool = True) -> None:
            self.left_out += max(len(_PHASE.findall(text)), 1)
            of_device = _LOST_DEVICE.findall(text)
            # Device work names a stream, should its category be what is damaged.
            self.lost_device += len(of_device) or int(b'"stream"' in text and _CATEGORY.search(text) is None)
            self.damaged |= damaged
            if damaged and b"\0" in text:  # as in a file system's hole
                self.hole_bytes += len(text)

        self._stream.recut(take, lose, last=last)
        return found

    def _add_keys(self, text: bytes | bytearray, where: str) -> None:
        """All keys of a document but its events."""
        for repair in (bytes, _repaired):
            try:
                keys = msgspec.json.decode(repair(bytes(text)), type=dict[str, Any])
            except _FAILURES as error:
                failure = error
            else:
                keys.pop("traceEvents", None)
                self.keys |= keys
                return
        self._error = self.error or f"{self._path}: the text {where} cannot be read: {failure}"


def _repaired(text: bytes) -> bytes:
    """JSON of what writers take for JSON: NaN and infinity become null; bad UTF-8 and escapes in strings become printable."""
    return _QUOTED_OR_NUMBER.sub(_repaired_token, text.decode("utf-8", "replace").encode())


def _repaired_token(token: re.Match[bytes]) -> bytes:
    text = token[0]
    if not text.startswith(b'"'):
        return b"null"
    if b"\\" in text:
        text = _BAD_ESCAPE.sub(rb"\\\\\1", text)
    return _CONTROL.sub(b" ", text)


def _coerced(text: bytes) -> AnyEvent | None:
    """An event whose fields have types that no other writer gives them; None when it is not an event at all."""
    try:
        found = json.loads(text, strict=False)
        args = found.get("args")
        fields: dict[str, Any] = {
            key: value for key in ("cat", "pid", "tid", "ts", "dur") if _is_number_or_text(value := found.get(key))
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
        elif _is_number_or_text(value):
            kept[field.name] = value if field.type == Number else str(value)
    return Args(**kept)


def _is_number_or_text(value: object) -> bool:
    """Python takes `True` for 1."""
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def rank_info(path: Path, keys: Mapping[str, Any], rank: int, rank_source: RankSource) -> RankInfo:
    """What the header says of the rank.

    Args:
        path: the file.
        keys: of the document, without its events.
        rank: used when the header names none.
        rank_source: where that rank comes from.
    """
    distributed, ours = (_dictionary(keys.get(name)) for name in ("distributedInfo", "bridge_profiling"))
    named = (integer(section.get("rank")) for section in (distributed, ours))
    known = next((number for number in named if 0 <= number < MAX_RANKS), None)
    devices = {number: each for each in _sections(keys, "deviceProperties") if (number := integer(each.get("id"))) >= 0}
    memory = {number: integer(device.get("totalGlobalMem")) for number, device in devices.items()}
    world_size = integer(distributed.get("world_size"))
    info = RankInfo(
        rank=rank if known is None else known,
        rank_source=rank_source if known is None else "trace",
        source="kineto",
        files=[str(path.absolute())],
        world_size=world_size if 0 < world_size <= MAX_RANKS else None,
        coordinates=_coordinates(ours.get("coordinates")),
        versions=_versions(keys, distributed),
        devices={number: str(device.get("name", "")) for number, device in devices.items()},
        device_bytes={number: size for number, size in memory.items() if 0 < size <= MAX_SIZE},
        groups=[_group(group) for group in _sections(distributed, "pg_config") if "pg_name" in group],
    )
    base_ns = integer(keys.get("baseTimeNanoseconds", 0))
    if 0 <= base_ns <= MAX_BASE_NS:
        info.clock_base_ns = base_ns
    else:
        info.add_caveat("clock_base_invalid")
    return info


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _sections(keys: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = keys.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _coordinates(written: Any) -> dict[str, tuple[int, int]] | None:
    """Parallel coordinates, which our own hook writes into a trace."""
    found = {}
    for name, place in _dictionary(written).items():
        if isinstance(place, list) and len(place) == 2 and all(0 <= integer(each) <= MAX_RANKS for each in place):
            found[name] = (integer(place[0]), integer(place[1]))
    return found or None


def _versions(keys: Mapping[str, Any], distributed: Mapping[str, Any]) -> dict[str, str]:
    versions = {}
    for key, value in keys.items():
        if key.endswith("_version") and isinstance(value, int | str):
            number = integer(value)
            cuda = key in ("cuda_driver_version", "cuda_runtime_version") and number >= 1000
            versions[key.removesuffix("_version")] = f"{number // 1000}.{number % 1000 // 10}" if cuda else str(value)
    if "schemaVersion" in keys:
        versions["kineto_schema"] = str(keys["schemaVersion"])
    if nccl := distributed.get("nccl_version"):
        versions["nccl"] = str(nccl)
    return versions


def _group(group: Mapping[str, Any]) -> ProcessGroup:
    ranks = group.get("ranks")
    known = isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks)
    return ProcessGroup(
        name=str(group["pg_name"]),
        description=str(group.get("pg_desc") or ""),
        backend=str(group.get("backend_config") or ""),
        ranks=tuple(ranks) if known and ranks else (),
    )
