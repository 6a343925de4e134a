"""A Kineto file as pieces of JSON that each hold whole events, in bounded memory. Knows nothing of what an event means.

Kineto's files are one document whose `traceEvents` can be gigabytes. They are cut between two events, at a raw `},{"ph"`:
these bytes cannot be inside a JSON string, which would have to escape the quote. They can be inside an event's arguments,
though. Such a piece does not parse, nor does a damaged one: `Stream.recut` then takes its events one by one.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces.bounds import KINETO, DamagedError, unpack

#: Bytes of JSON decoded at a time. Smaller pieces cost calls; 4 MB exceed the processor's cache: a fifth slower, 15 MB more.
PIECE_BYTES = 1 << 20

#: Largest size of the text before or after the events, and of one event.
MAX_PART_BYTES = 64 << 20

_SEARCH_BYTES = 1 << 16

#: Nearly every event is smaller.
_EVENT_BYTES = 1 << 12

#: The beginning of an event.
_EVENT = rb'\{\s*"(?:ph|name|cat|ts|pid|tid|dur|args|id|bp|s)"\s*:'

#: Between two events. A quote inside a JSON string would be escaped, so only an event's arguments can hold this too.
_SEPARATOR = re.compile(rb",\s*(?=%b)" % _EVENT)
_SEPARATOR_OF_ANY_KEY = re.compile(rb',\s*(?=\{\s*")')

#: An event with separators in its arguments ends within this. No known profiler writes one.
_NESTED_BYTES = 1 << 16

#: The end of the array of events, before another key of the document or at the end of the text, and that of its last event.
_END = re.compile(rb'\](?=\s*,\s*"[^"]*"\s*:|\s*\}?\s*\Z)')
_LAST_END = re.compile(rb'\}(?=[\s,]*\]\s*,\s*"[^"]*"\s*:)|(?=\]\s*\}?\s*\Z)')

_GAP = b" \t\r\n,"

#: What can be before an event, brackets that are too many among it, and what follows one.
_BETWEEN = re.compile(rb"(?:[\s,]|\[(?=[\s\[]*%b))*" % _EVENT)
_AFTER = re.compile(rf"\s*(?:,\s*(?:{_EVENT.decode()}|\Z)|\]|\Z)")

#: Takes `NaN`, and control characters in strings.
_DECODER = json.JSONDecoder(strict=False)

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")


class Stream:
    """One file, read from start to end. Raises TraceError when it is not a trace or exceeds its bounds."""

    def __init__(self, path: Path) -> None:
        self.bytes_read = 0  # of text
        self._path, self._chunks = path, self._unpacked()
        self.error: str | None = None  # why the file could not be read to its end, naming it
        self.tail: bytearray | None = None  # text after the events; None while their end was not found
        # Text up to the first event, and text that `pieces` has not yielded. A bare document is the array of events itself.
        self.head, self.rest, self.bare = self._head()

    def pieces(self) -> Iterator[bytearray]:
        """Texts `[event, …]`, an empty one where no cut was found. When one does not parse, call `recut` before the next.

        Ends early, with `error` set, where an event is larger than any profiler writes.
        """
        wanted = PIECE_BYTES
        for chunk in self._chunks:
            self.rest += chunk
            if len(self.rest) < wanted:
                continue
            before, cut, piece = self.rest, _last_separator(self.rest), bytearray()
            if cut is not None:
                piece += b"["
                piece += memoryview(before)[: cut.start()]
                piece += b"]"
            yield piece
            if self.tail is not None:
                return
            if cut is not None and self.rest is before:
                self.rest = before[cut.end() :]
            elif len(self.rest) > MAX_PART_BYTES:
                self.error = f"{self._path} is not a trace: one event is larger than {MAX_PART_BYTES >> 20} MB"
                return
            # Text that was searched in vain doubles before it is searched again, so that all searches are linear in the file.
            wanted = max(PIECE_BYTES, 0 if self.rest is before else 2 * len(self.rest))

    def recut(self, take: Callable[[bytes], bool], lose: Callable[[bytes], None], *, last: bool = False) -> None:
        """Take the events of `rest`, whose last one can stay in it. Reads the file to its end if the events end there.

        A damaged character costs the event that it is in, or the two that it stands between. Linear in the text.

        Args:
            take: reads elements of the array, given without brackets; false when they are not JSON.
            lose: called with text of events that cannot be read.
            last: all pieces were yielded.
        """
        text, begin = bytes(self.rest), 0
        characters = text.decode("latin-1")  # a character for each byte
        separator = _SEPARATOR if len(text) <= PIECE_BYTES or _SEPARATOR.search(text) else _SEPARATOR_OF_ANY_KEY
        while begin < len(text):
            begin = _BETWEEN.match(text, begin).end()  # type: ignore[union-attr]  # matches the empty text too
            if end := _END.match(text, begin):
                self._end(text[end.end() :])
                return
            following = separator.search(text, begin)
            stop = following.start() if following else len(text)
            if following and take(text[begin:stop].strip(_GAP)):
                begin = stop
            elif (after := _after(characters, begin, stop)) and take(text[begin:after]):
                begin = after
            elif not last and (following is None or _is_cut(text, begin)):
                break
            elif text.startswith(b"]", begin):
                begin += 1
            elif following:
                lose(text[begin:stop])
                begin = stop
            else:
                end = _LAST_END.search(text, begin)
                stop = end.end() if end else stop
                if not take(text[begin:stop].strip(_GAP)):
                    if end is None:
                        break
                    lose(text[begin:stop])
                begin = stop
        self.rest = bytearray(text[begin:].lstrip(_GAP))

    def _end(self, tail: bytes) -> None:
        """The events end before this text: read the rest of the file."""
        self.rest, self.tail = bytearray(), bytearray(tail)
        for chunk in self._chunks:
            self.tail += chunk
            if len(self.tail) > MAX_PART_BYTES:
                raise TraceError(f"{self._path} is not a trace: more than {MAX_PART_BYTES >> 20} MB follow its events")

    def _head(self) -> tuple[bytes, bytearray, bool]:
        head = bytearray()
        for chunk in self._chunks:
            searched = max(len(head) - _SEARCH_BYTES, 0)
            head += chunk
            if bare := _BARE_ARRAY.match(head):
                return b"", head[bare.end() :], True
            if found := _START.search(head, searched):
                return bytes(head[: found.end()]).removeprefix(BOM_UTF8), head[found.end() :], False
            if len(head) > MAX_PART_BYTES:
                break
        if self.error is not None:
            raise TraceError(self.error)
        if not head.strip(b"\0 \t\r\n"):
            raise TraceError(f"{self._path} is empty: it holds no trace")
        if b"\0" in head[:4] and head[:16].replace(b"\0", b"").lstrip(b"\xff\xfe \t\r\n")[:1] in (b"{", b"["):
            raise TraceError(f"{self._path} is not a Kineto trace: it is UTF-16 or UTF-32. Convert it with iconv -t utf-8")
        raise TraceError(f"{self._path} is not a Kineto trace: it has no traceEvents")

    def _unpacked(self) -> Iterator[bytes]:
        """The file's bytes. Ends early, with `error` set, where it is damaged."""
        try:
            for piece in unpack(self._path, KINETO, PIECE_BYTES):
                self.bytes_read += len(piece)
                yield piece
        except DamagedError as error:
            self.error = str(error)
        except OSError as error:
            raise TraceError(f"{self._path} cannot be read: {error.strerror or error}") from error


def _last_separator(text: bytearray) -> re.Match[bytes] | None:
    """The last place between two events, searched from the end."""
    reach = _EVENT_BYTES
    while True:
        low = max(len(text) - reach, 0)
        found = deque(_SEPARATOR.finditer(text, low), maxlen=1)
        if found or low == 0:
            return found[0] if found else None
        reach *= 16


def _is_cut(text: bytes, begin: int) -> bool:
    """Whether an event with separators in its arguments can begin here and end after the text."""
    return len(text) - begin <= _NESTED_BYTES and text.count(b"{", begin) > text.count(b"}", begin)


def _after(text: str, begin: int, stop: int) -> int:
    """The place after the JSON value that begins at one, and that is not much longer than up to `stop`; 0 without one."""
    try:
        after = begin + _DECODER.raw_decode(text[begin : max(stop, begin + _NESTED_BYTES)])[1]
    except (ValueError, RecursionError):
        return 0
    return after if _AFTER.match(text, after) else 0
