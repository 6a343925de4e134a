"""Events of a Kineto file: decoded, and repaired where they are not quite JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bridge_profiling.traces.kineto.events import AnyEvent, Args, Event, Number, decoders
from bridge_profiling.traces.kineto.stream import Stream

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
            try:
                found.extend(self._decode(b"[%b]" % text))
            except _FAILURES:
                pass
            else:
                return True
            try:
                texts = [bytes(raw) for raw in _ELEMENTS.decode(b"[%b]" % _repaired(text))]
            except _FAILURES:
                return False
            for each in texts:
                event = self._alone(each)
                if event is None:
                    lose(each)
                else:
                    found.append(event)
            return True

        def lose(text: bytes) -> None:
            self.left_out += max(len(_PHASE.findall(text)), 1)
            of_device = _LOST_DEVICE.findall(text)
            # Device work names a stream, should its category be what is damaged.
            self.lost_device += len(of_device) or int(b'"stream"' in text and _CATEGORY.search(text) is None)

        def lose_damaged(text: bytes) -> None:
            lose(text)
            self.damaged = True
            if b"\0" in text:  # as in a file system's hole
                self.hole_bytes += len(text)

        self._stream.recut(take, lose_damaged, last=last)
        return found

    def _alone(self, text: bytes) -> AnyEvent | None:
        """One repaired event; None when it is not an event at all."""
        try:
            return self._decode(b"[%b]" % text)[0]
        except _FAILURES:
            return _coerced(text)

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
