"""A Kineto file as pieces of JSON that each hold whole events, in bounded memory.

Knows gzip and where one event ends and the next begins; knows nothing of what an event means.

Kineto's files are one document whose `traceEvents` can be gigabytes. They are unpacked a few megabytes at a time and cut
between two events, at a raw `},{"ph"`: these bytes cannot lie inside a JSON string, which would have to escape the quote.
They can lie deeper than between two events, though, in an event's arguments. Such a piece does not parse, and is then cut
again by counting braces, which is exact and twenty times slower.
"""

from __future__ import annotations

import lzma
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from isal import isal_zlib

from bridge_profiling.errors import TraceError

#: Bytes of JSON decoded at a time. Smaller pieces cost calls; 4 MB leave the processor's cache: a fifth slower, 15 MB more.
PIECE_BYTES = 1 << 20

#: Refused beyond: no profiler writes so much for one rank.
MAX_JSON_BYTES = 64 << 30

#: Refused beyond, once _RATIO_CHECKED_BYTES are unpacked. Kineto's JSON shrinks 11- to 25-fold; a bomb 1,000-fold.
MAX_RATIO = 200
_RATIO_CHECKED_BYTES = 32 << 20

#: What stands before and after the events, and one event, may not be larger than this.
MAX_PART_BYTES = 64 << 20

_READ_BYTES = 1 << 20
_TRAILER_BYTES = 8
_SEARCH_BYTES = 1 << 16
_GZIP_MAGIC, _XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ"

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")
_SEPARATOR = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|pid|tid|dur|args|id|bp|s)"\s*:)')
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}\[\]]', re.DOTALL)

Events = TypeVar("Events")


class PieceError(ValueError):
    """A piece that cannot be decoded as it stands."""


@dataclass(frozen=True)
class Decoders(Generic[Events]):
    """How pieces become events.

    Args:
        events: decodes `[event, …]`, fast; raises PieceError.
        mended: the same, after making JSON of what writers take for JSON; raises PieceError.
        document: decodes a whole document to its events and its other keys; raises PieceError.
        each_event: decodes texts of one event each, mending what can be mended; never raises.
        keys: decodes a document to all its keys, mending what can be mended; raises PieceError.
    """

    events: Callable[[bytes | bytearray], Events]
    mended: Callable[[bytes | bytearray], Events]
    document: Callable[[bytes | bytearray], tuple[Events, dict[str, Any]]]
    each_event: Callable[[list[bytes]], Events]
    keys: Callable[[bytes], dict[str, Any]]


@dataclass
class Document:
    """What a file holds besides its events; complete when reading has ended.

    Args:
        keys: the document's other keys.
        json_bytes: bytes of JSON read.
        error: why the file could not be read to its end, naming it; None when it could.
    """

    keys: dict[str, Any]
    json_bytes: int = 0
    error: str | None = None


def read_pieces(path: Path, decoders: Decoders[Events], document: Document) -> Iterator[Events]:
    """The events of a file, a piece at a time.

    A file that ends too early gives what it holds; `document.error` then says what is wrong with it.

    Args:
        path: gzipped, xz or plain; several gzip members are read as one.
        decoders: what makes events of bytes.
        document: filled on the way.

    Raises:
        TraceError: this is no trace, or it is larger than the limits. The message names the file.
    """
    chunks = _unpacked(path, document)
    head, rest, bare = _head(path, chunks, document)
    if not bare:
        _merge_keys(document, decoders, head + b"]}", path, "before the events")
    pending = rest
    for chunk in chunks:
        pending += chunk
        if len(pending) < PIECE_BYTES:
            continue
        found = _fast_piece(pending, decoders)
        if found is not None:
            events, pending = found
            yield events
            continue
        spans, ended = _scan(pending)
        yield decoders.each_event([bytes(pending[start:end]) for start, end in spans])
        if ended is not None:
            _read_after_events(path, pending[ended + 1 :], chunks, decoders, document)
            return
        pending = _without_comma(pending[spans[-1][1] :] if spans else pending)
        if len(pending) > MAX_PART_BYTES:
            raise TraceError(f"{path} is no trace: one event is larger than {MAX_PART_BYTES >> 20} MB")
    yield from _last_piece(path, pending, bare, decoders, document)


def _fast_piece(pending: bytearray, decoders: Decoders[Events]) -> tuple[Events, bytearray] | None:
    """The events up to the last cut, and what is left; None when there is no cut between two events, or no JSON."""
    cut = _last_separator(pending)
    if cut is None:
        return None
    piece = bytearray(b"[")
    piece += memoryview(pending)[: cut.start() + 1]
    piece += b"]"
    for decode in (decoders.events, decoders.mended):
        try:
            return decode(piece), pending[cut.end() :]
        except PieceError:
            pass
    return None


def _last_piece(path: Path, pending: bytearray, bare: bool, decoders: Decoders[Events], document: Document) -> Iterator[Events]:
    if not bare and document.error is None:
        try:
            events, keys = decoders.document(b'{"traceEvents":[' + pending)
        except PieceError:
            pass
        else:
            document.keys |= keys
            yield events
            return
    spans, ended = _scan(pending)
    yield decoders.each_event([bytes(pending[start:end]) for start, end in spans])
    if ended is not None:
        if not bare:
            _read_after_events(path, pending[ended + 1 :], iter(()), decoders, document)
    elif document.error is None and (not bare or pending[spans[-1][1] if spans else 0 :].strip(b" \t\r\n,")):
        document.error = f"{path} is cut off: the JSON ends inside the events"


def _read_after_events(
    path: Path, rest: bytearray, chunks: Iterator[bytes], decoders: Decoders[Events], document: Document
) -> None:
    for chunk in chunks:
        rest += chunk
        if len(rest) > MAX_PART_BYTES:
            raise TraceError(f"{path} is no trace: more than {MAX_PART_BYTES >> 20} MB follow its events")
    if document.error is None:
        _merge_keys(document, decoders, b'{"traceEvents":[]' + bytes(rest), path, "after the events")


def _merge_keys(document: Document, decoders: Decoders[Events], text: bytes, path: Path, where: str) -> None:
    try:
        document.keys |= decoders.keys(text)
    except PieceError as error:
        document.error = document.error or f"{path}: what stands {where} cannot be read: {error}"


def _head(path: Path, chunks: Iterator[bytes], document: Document) -> tuple[bytes, bytearray, bool]:
    """Text up to the events, what of the first event is already read, and whether the document is an array of events."""
    head = bytearray()
    for chunk in chunks:
        searched = max(len(head) - _SEARCH_BYTES, 0)
        head += chunk
        if bare := _BARE_ARRAY.match(head):
            return b"", head[bare.end() :], True
        if found := _START.search(head, searched):
            return bytes(head[: found.end()]), head[found.end() :], False
        if len(head) > MAX_PART_BYTES:
            break
    if document.error is not None:
        raise TraceError(document.error)
    if not head.strip(b"\0 \t\r\n"):
        raise TraceError(f"{path} is empty: it holds no trace")
    raise TraceError(f"{path} is no Kineto trace: it has no traceEvents")


def _last_separator(text: bytearray) -> re.Match[bytes] | None:
    """The last place between two events, looked for from the end."""
    low = max(len(text) - _SEARCH_BYTES, 0)
    while True:
        found = deque(_SEPARATOR.finditer(text, low), maxlen=1)
        if found or low == 0:
            return found[0] if found else None
        low = max(low - 16 * _SEARCH_BYTES, 0)


def _scan(text: bytearray) -> tuple[list[tuple[int, int]], int | None]:
    """Count braces: the spans of the whole events in `text`, and where the array of events ends, if it does."""
    spans: list[tuple[int, int]] = []
    depth = start = 0
    for token in _TOKEN.finditer(text):
        first = text[token.start()]
        if first in b"{[":
            if depth == 0:
                start = token.start()
            depth += 1
        elif first in b"}]":
            if depth == 0:
                return spans, token.start()
            depth -= 1
            if depth == 0:
                spans.append((start, token.end()))
        elif token.end() == token.start() + 1:
            break  # a string that does not end here
    return spans, None


def _without_comma(text: bytearray) -> bytearray:
    stripped = text.lstrip()
    return stripped[1:] if stripped.startswith(b",") else stripped


def _unpacked(path: Path, document: Document) -> Iterator[bytes]:
    """The file's bytes, unpacked. Ends early, with `document.error` set, where the file is damaged."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_XZ_MAGIC))
            file.seek(0)
            if magic.startswith(_GZIP_MAGIC):
                chunks = _gunzip(path, file, document)
            elif magic == _XZ_MAGIC:
                chunks = _unxz(path, file, document)
            else:
                chunks = iter(lambda: file.read(PIECE_BYTES), b"")
            for chunk in chunks:
                document.json_bytes += len(chunk)
                if document.json_bytes > MAX_JSON_BYTES:
                    raise TraceError(f"{path} is refused: it holds more than {MAX_JSON_BYTES >> 30} GB of JSON")
                yield chunk
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def _unxz(path: Path, file: Any, document: Document) -> Iterator[bytes]:
    with lzma.open(file) as unpacked:
        try:
            while chunk := unpacked.read(PIECE_BYTES):
                yield chunk
        except EOFError:
            document.error = f"{path} is cut off: the xz data end early"
        except lzma.LZMAError as error:
            document.error = f"{path} is damaged: {error}"


def _gunzip(path: Path, file: Any, document: Document) -> Iterator[bytes]:
    unpacker = isal_zlib.decompressobj(31)
    read = unpacked = 0
    packed = held = b""
    more = False  # whether what was given to the unpacker has not all come out
    try:
        while True:
            if not packed and not more:
                fresh = file.read(_READ_BYTES)
                read += len(fresh)
                packed = held + fresh
                if not packed:
                    break
                # The checksum is held back, so that what it finds wrong has come out by then.
                held = packed[-_TRAILER_BYTES:] if fresh else b""
                packed = packed[: len(packed) - len(held)]
                if not packed:
                    continue
            if unpacker.eof:
                # Another member, or the padding that some tools leave behind the last one.
                packed = packed.lstrip(b"\0")
                if not packed:
                    more = False
                    continue
                unpacker = isal_zlib.decompressobj(31)
            chunk = unpacker.decompress(packed, PIECE_BYTES)
            packed = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
            more = len(chunk) == PIECE_BYTES and not unpacker.eof
            unpacked += len(chunk)
            if unpacked > _RATIO_CHECKED_BYTES and unpacked > MAX_RATIO * read:
                raise TraceError(f"{path} is refused: it unpacks to more than {MAX_RATIO} times its size, as no trace does")
            if chunk:
                yield chunk
    except isal_zlib.error as error:  # type: ignore[misc]
        document.error = f"{path} is damaged: {error}"
        return
    if not unpacker.eof:
        document.error = f"{path} is cut off: the gzip data end early"
