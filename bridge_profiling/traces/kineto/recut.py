"""Cuts text that does not parse into single events, and goes on at the next event where it is damaged. Linear in the text.

A damaged character costs the event that it is in, or the two that it stands between.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

#: Between two events. A quote inside a JSON string would be escaped, so only an event's arguments can hold this too.
SEPARATOR = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|pid|tid|dur|args|id|bp|s)"\s*:)')

#: Where an event can begin: after a separator, and at any object that begins with a phase, as Kineto's events do.
_BEGINS = re.compile(SEPARATOR.pattern + rb'|(?=\{\s*"ph"\s*:)')
_BEGINS_WITH_ANY_KEY = re.compile(rb'\}\s*,\s*(?=\{\s*")')

#: An event that has others in its arguments is looked for this far. No known profiler writes one.
_NESTED_BYTES = 1 << 16

#: A token, and what JSON allows after it, so that a scan ends soon after a damaged character.
_TOKEN = re.compile(
    rb"""\s*
    (?: ([\]}])
      | (?:[,:]\s*)?
        (?: (\[|\{(?=\s*["}])) | (?:"[^"\\]*+(?:\\.[^"\\]*+)*+" | [^\s"{}\[\],:]++) (?=\s*[:,}\]]) )
    )""",
    re.DOTALL | re.VERBOSE,
)
#: The end of text that goes on in the next piece.
_UNFINISHED = re.compile(rb'\s*(?:[,:]\s*)?(?:\{\s*|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:\\|"\s*)?|[^\s"{}\[\],:]++\s*)?\Z', re.DOTALL)
_CLOSING = {b"[": b"]", b"{": b"}"}

_GAP = re.compile(rb"[\s,]*")
_STRAY = re.compile(rb"[\s,{}\[\]]*")
_END_OF_EVENTS = re.compile(rb'\s*\](?=\s*(?:\}|,\s*"|\Z))')
_END_AFTER_DAMAGE = re.compile(rb'\}\s*\](?=\s*(?:,\s*"[^"]*"\s*:|\}\s*\Z))')


@dataclass(frozen=True)
class Value:
    """The JSON value that begins at some place."""

    end: int | None  # None if it is damaged, or not all of it is there
    reached: int  # where the scan ended
    unfinished: bool = False  # nothing is wrong with it up to the end of the text


def recut(
    text: bytes, take: Callable[[bytes], bool], lose: Callable[[bytes], None], *, last: bool, loose: bool
) -> tuple[int, int | None]:
    """Take the events of an array one by one.

    Args:
        text: elements of the array, from the beginning of one.
        take: reads elements; false when they are not JSON.
        lose: called with text of events that cannot be read.
        last: nothing follows the text.
        loose: any key can be an event's first one.

    Returns:
        From where on the text can be the beginning of an event, and the end of the array; None if it is not in the text.
    """
    begins = [found.end() for found in _BEGINS.finditer(text)]
    if not begins and loose:
        begins = [found.end() for found in _BEGINS_WITH_ANY_KEY.finditer(text)]
    scannable, done = 2 * len(text), 0
    for begin, end in itertools.pairwise(sorted({0, *begins})):
        if begin < done or take(text[begin:end].rstrip(b" \t\r\n,")):
            done = max(done, end)
            continue
        found = scan(text, begin, min(max(end, begin + min(_NESTED_BYTES, scannable)), len(text)))
        scannable = max(scannable - (found.reached - begin), 0)
        if found.unfinished and found.reached == len(text) and not last:
            return begin, None
        stop = found.end or begin
        # What else is between this event and the next one, if there is an event, decides whether it is a part of one.
        ended = _END_OF_EVENTS.match(text, stop)
        whole = found.end is not None and (ended is not None or _STRAY.match(text, stop, max(end, stop)).end() >= end)  # type: ignore[union-attr]
        if not (whole and take(text[begin:stop])):
            lose(text[begin:end])
            done = end
        elif ended is not None:
            return ended.end(), ended.end()
        else:
            done = max(end, stop)
    return _recut_end(text, done, take, lose, last=last)


def _recut_end(
    text: bytes, begin: int, take: Callable[[bytes], bool], lose: Callable[[bytes], None], *, last: bool
) -> tuple[int, int | None]:
    """`recut` of text without any known place to go on at."""
    while True:
        begin = _GAP.match(text, begin).end()  # type: ignore[union-attr]  # matches the empty text too
        ended = _END_OF_EVENTS.match(text, begin)
        if ended is not None:
            return (begin, None) if ended.end() == len(text) and not last else (ended.end(), ended.end())
        found = scan(text, begin, len(text))
        if found.end is None or not take(text[begin : found.end]):
            break
        begin = found.end
    if begin == len(text) or not last or found.unfinished:
        return begin, None
    ended = _END_AFTER_DAMAGE.search(text, max(found.reached - 1, begin))
    lose(text[begin : None if ended is None else ended.start()])
    return (len(text), None) if ended is None else (ended.end(), ended.end())


def scan(text: bytes, begin: int, limit: int) -> Value:
    """Where the value ends that begins at a place. Looks no further than `limit`."""
    expected: list[bytes] = []
    place = begin
    while (token := _TOKEN.match(text, place, limit)) is not None:
        place = token.end()
        if token[2]:
            expected.append(_CLOSING[token[2]])
        elif token[1] and (not expected or expected.pop() != token[1]):
            return Value(None, place)
        if not expected:
            return Value(place, place)
    unfinished = _UNFINISHED.match(text, place, limit) is not None
    return Value(None, limit if unfinished else place, unfinished)
