"""Loads a pickle of plain data without running code, in memory far below the usual for a memory snapshot.

Unpickling runs the code that a file names. Every opcode is checked first, and pickles of anything but plain data are refused.
On the way, call stacks are kept once: an entry of a snapshot repeats its stack as a list of 60 references to frames.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from collections import deque
from typing import Any

#: Lists and dictionaries per byte. Real snapshots have 1/60; the shortest pickle has one in each byte, and each takes 64.
_CONTAINERS_PER_BYTE, _FREE_CONTAINERS = 1 / 6, 1 << 20

_SMALL_INTEGER = rb"(?:K.|M..|J....)"

#: Integers of up to 64 bits: hashes of longer ones can be made to collide without limit, 280 kB of such keys take seconds.
_LONG = b"|".join([rb"\x%02x.{%d}" % (size, size) for size in range(9)] + [rb"\x09.{8}\x00"])

#: References to objects in the memo.
_REFERENCE = rb"h.|j...."

#: Opcodes of fixed length in plain data besides references and MEMOIZE: memo, integers, floats, constants, empty dictionaries,
#: items. The only tuples are pairs of small integers (`segment_pool_id`): the hash of a nested one takes exponential time.
_OTHERS = rb"[(ue]|%b(?:%b\x86)?|\x8a(?:%b)|[}Nas\x88\x89]|G.{8}" % (_SMALL_INTEGER, _SMALL_INTEGER, _LONG)

#: A run of opcodes of fixed length, with an empty list only as the first; the group is the last reference. A possessive `*+`
#: would need no bound, but up to Python 3.11.4 it can stop in the middle of an opcode.
_FIXED = re.compile(rb"\]?(?:(%b)|\x94|%b){0,1000}" % (_REFERENCE, _OTHERS), re.DOTALL)

#: The same of protocols 2 and 3, which number the objects in the memo (BINPUT).
_FIXED_AND_NUMBERED = re.compile(rb"\]?(?:(%b)|q.|%b){0,1000}" % (_REFERENCE, _OTHERS), re.DOTALL)

#: Up to the next MEMOIZE in such a run.
_MEMOIZED = re.compile(rb"(?:\]|%b|%b){0,1000}(?:\x94|\Z)" % (_REFERENCE, _OTHERS), re.DOTALL)

#: Width of the number after the other opcodes: the length of a text (SHORT_BINUNICODE, BINUNICODE), of a frame, a memo index.
_WIDTHS = {b"\x8c": 1, b"X": 4, b"\x95": 8, b"q": 1, b"r": 4}
_NUMBERING = (b"q", b"r")
_NAMES = {opcode.code.encode("latin1"): opcode.name for opcode in pickletools.opcodes}

#: The key of a call stack in an entry, where it is first written: SHORT_BINUNICODE, MEMOIZE.
_FRAMES_KEY = b"\x8c\x06frames\x94"

#: A list in the memo that gets items, and its items where all are references.
_LIST = b"]\x94("
_REFERENCES = re.compile(rb"(?:%b){1,1000}e" % _REFERENCE, re.DOTALL)

#: The longest of them, and what ends its entry.
_STACK_BYTES = 5 * 1000 + len(b"eu")

_PIECE_BYTES = 1 << 16


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class CheckedPickle:
    """A pickle of protocol 2 to 5 of dictionaries, lists, texts, numbers, booleans and None.

    It keeps no reference to `data`, and less than half as many bytes if these are a memory snapshot.

    Raises:
        ValueError: the pickle is damaged, or more than plain data.
    """

    def __init__(self, data: bytes) -> None:
        self._stacks: dict[bytes, bytes] = {}  # opcodes that stand for a list of references, by its own
        self._pieces = deque[bytes]()
        self._piece: list[bytes] = [data[:2]]
        self._piece_bytes = 2
        self._check(data)

    def load(self) -> tuple[Any, list[list[Any]]]:
        """The data, and call stacks. Where it has bytes, these are the number of a call stack.

        References give shared objects, so callers must count their steps.

        Raises:
            ValueError: the pickle is damaged.
        """
        try:
            data, stacks = _PlainUnpickler(_Pieces(self._pieces)).load()
        except (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"it is damaged: {type(error).__name__} {error}"[:200]) from error
        return data, stacks

    def _check(self, data: bytes) -> None:
        """Refuse opcodes beyond plain data, and numbers beyond the file; keep the rest.

        Without it, a restricted unpickler takes 4.1 GB for a 9-byte file: LONG_BINPUT with a high memo index.
        """
        if data[:1] != b"\x80" or data[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"):
            raise ValueError("it does not begin as a pickle of protocol 2 to 5")
        # Brackets and braces in texts count too.
        if data.count(b"]") + data.count(b"}") > _FREE_CONTAINERS + _CONTAINERS_PER_BYTE * len(data):
            raise ValueError("it needs memory far beyond its size: it holds little but empty lists and dictionaries")
        keys: set[bytes] = set()  # references to the text "frames"
        last_key, memoized = data.rfind(_FRAMES_KEY), 0
        # Where the file numbers objects in the memo, counting does not tell which are keys.
        numbered, place = data[1] < 4, 2
        fixed = _FIXED_AND_NUMBERED if numbered else _FIXED
        while True:
            run = fixed.match(data, place)
            passed = run.end()  # type: ignore[union-attr]  # matches the empty text too
            if passed > place:
                if place < last_key:
                    memoized += _count_memoized(data[place:passed])
                self._keep(data[place:passed])
                place = passed
                if run.end(1) == passed and run[1] in keys and data.startswith(_LIST, place):  # type: ignore[union-attr,index]
                    place = self._pass_stack(data, place)
                continue
            code = data[place : place + 1]
            if code == b".":
                # With the distinct stacks, whose frames are all in the memo by now.
                self._keep(b"](" + b"".join([b"](" + stack for stack in self._stacks]) + b"e\x86.")
                self._end_piece()
                return
            if code not in _WIDTHS:
                name = _NAMES.get(code, f"byte {code.hex()}")
                problem = f"{name} at byte {place} could run code or exhaust memory" if code else "it is cut off"
                raise ValueError(f"it is damaged or more than plain data: {problem}")
            begin = place + 1 + _WIDTHS[code]
            number = int.from_bytes(data[place + 1 : begin], "little")
            numbered |= code in _NUMBERING
            if number > len(data) - (0 if code in _NUMBERING else begin):
                raise ValueError(f"it is cut off or damaged: {_NAMES[code]} at byte {place} exceeds the file")
            end = begin + number if code in (b"\x8c", b"X") else begin
            if data.startswith(_FRAMES_KEY, place) and not numbered:
                keys.add(b"j" + memoized.to_bytes(4, "little") if memoized >> 8 else b"h" + bytes([memoized]))
            if code != b"\x95":  # frames get other lengths
                self._keep(data[place:end])
            place = end

    def _pass_stack(self, data: bytes, place: int) -> int:
        """Keep the number of a call stack in place of its references, if it has nothing else; returns the place after it."""
        begin = place + len(_LIST)
        # Most stacks are known, and the last of their entry. A known one is whole opcodes.
        end = data.find(b"eu", begin, begin + _STACK_BYTES) + 1
        known = self._stacks.get(data[begin:end])
        if known is None:
            found = _REFERENCES.match(data, begin)
            if found is None:
                return place
            end = found.end()
            number = b"C\x04" + len(self._stacks).to_bytes(4, "little") + b"\x94"
            known = self._stacks.setdefault(found[0], number)
        self._keep(known)
        return end

    def _keep(self, opcodes: bytes) -> None:
        self._piece.append(opcodes)
        self._piece_bytes += len(opcodes)
        if self._piece_bytes > _PIECE_BYTES:
            self._end_piece()

    def _end_piece(self) -> None:
        # A frame each: without, the unpickler asks for every opcode.
        piece = b"".join(self._piece)
        self._pieces.append(b"\x95" + len(piece).to_bytes(8, "little") + piece)
        self._piece, self._piece_bytes = [], 0


def _count_memoized(run: bytes) -> int:
    """How many opcodes of a run of fixed length are MEMOIZE."""
    return run.count(b"\x94") and sum(found.endswith(b"\x94") for found in _MEMOIZED.findall(run))


class _Pieces:
    """Pieces as the file that an unpickler reads; each is freed when it was read."""

    def __init__(self, pieces: deque[bytes]) -> None:
        self._pieces = pieces
        self._ahead = b""

    def read(self, size: int) -> bytes:
        while len(self._ahead) < size and self._pieces:
            self._ahead += self._pieces.popleft()
        found, self._ahead = self._ahead[:size], self._ahead[size:]
        return found

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("it has an opcode of protocol 0")
