"""Reads a pickle that holds plain data, and refuses every other one. Runs nothing that a pickle asks for.

`pickle.load` calls whatever a file names. This reader has no opcode that names anything: it knows those by which Python
writes dictionaries, lists, tuples, sets, texts, bytes, numbers, booleans and None in protocols 2 to 5, and no more. (Before
protocol 4 a set, and in protocol 2 bytes, are written as a call by name; those are refused like any other call.) What it
builds takes memory in proportion to the file: lengths are checked against what is left of the file before anything is
allocated, the memo is a dictionary, and what can be a key is limited to what hashes in constant time. Objects that a pickle
refers to repeatedly are shared, so whoever walks the result must count its steps.
"""

from __future__ import annotations

import pickletools
import re
import struct
from typing import Any

#: Longer integers are refused: sizes and addresses have 9 bytes, and a hash of a long one is no constant time.
_MAX_INTEGER_BYTES = 16

#: Larger numbers are refused as keys: unlike those of texts, hashes of integers can be made to collide.
_MAX_KEY = 1 << 60

_PROTOCOLS = range(2, 6)

#: Stack depth of containers that are still being filled.
_MAX_DEPTH = 1000

_INT4, _UINT2, _UINT4, _UINT8 = struct.Struct("<i"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_FLOAT = struct.Struct(">d")

#: BINGET and LONG_BINGET, references to what was there before: nine tenths of a snapshot's opcodes, in runs that are a call
#: stack each. The same runs return (39,452 stacks of one real snapshot are 409), so each is read once: 2.2 s become 1.0.
_REFERENCES = re.compile(rb"(?:h.|j....)++", re.DOTALL)
_REFERENCE = re.compile(rb"h(.)|j(....)", re.DOTALL)

#: Width of the length before a text's or bytes' content.
_TEXTS = {0x8C: 1, 0x58: 4, 0x8D: 8}  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
_BYTES = {0x43: 1, 0x42: 4, 0x8E: 8}  # SHORT_BINBYTES, BINBYTES, BINBYTES8
_LENGTHS = {1: struct.Struct("<B"), 4: _UINT4, 8: _UINT8}

_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_RUNS_CODE = {
    "GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD",
    "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID",
}  # fmt: skip


class PickleError(ValueError):
    """A pickle that is damaged, or that is more than plain data."""


def loads(data: bytes) -> Any:
    """The plain data that a pickle holds.

    Args:
        data: the pickle.

    Raises:
        PickleError: it is damaged, or asks for anything but plain data.
    """
    try:
        return _Reader(data).read()
    except (IndexError, struct.error) as error:
        raise PickleError("it is cut off or damaged") from error
    except (KeyError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise PickleError(f"it is damaged: {type(error).__name__} {error}"[:200]) from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0
        self.memo: dict[int, Any] = {}
        self.runs: dict[bytes, tuple[Any, ...]] = {}
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # stacks below the marks

    def read(self) -> Any:
        data, memo = self.data, self.memo
        if data[:1] != b"\x80" or data[1] not in _PROTOCOLS:
            raise PickleError("it does not begin as a pickle of protocol 2 to 5")
        self.place = 2
        constants = {0x4E: None, 0x88: True, 0x89: False}
        while True:
            code = data[self.place]
            if code in (0x68, 0x6A):  # BINGET, LONG_BINGET
                self.stack.extend(self._referred())
            elif code == 0x94:  # MEMOIZE
                self._remember(len(memo))
                self.place += 1
            elif code == 0x28:  # MARK
                if len(self.marks) >= _MAX_DEPTH:
                    raise PickleError(f"it nests deeper than {_MAX_DEPTH} containers")
                self.marks.append(self.stack)
                self.stack = []
                self.place += 1
            elif code == 0x75:  # SETITEMS
                items = self._to_mark()
                _set_items(self.stack[-1], items)
                self.place += 1
            elif code == 0x65:  # APPENDS
                items = self._to_mark()
                _list(self.stack[-1]).extend(items)
                self.place += 1
            elif code in constants:
                self.stack.append(constants[code])
                self.place += 1
            elif code == 0x2E:  # STOP
                return self._end()
            else:
                self._rarer(code)

    def _rarer(self, code: int) -> None:
        data, begin, stack = self.data, self.place + 1, self.stack
        if code == 0x8A:  # LONG1
            self.place = begin + 1 + data[begin]
            stack.append(self._integer(begin + 1))
        elif code in _TEXTS:
            content = self._content(begin, _TEXTS[code])
            stack.append(content.decode("utf-8", "surrogatepass"))
        elif code == 0x4B:  # BININT1
            stack.append(data[begin])
            self.place = begin + 1
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
            self.place = begin
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
            self.place = begin
        elif code == 0x4A:  # BININT
            stack.append(_INT4.unpack_from(data, begin)[0])
            self.place = begin + 4
        elif code == 0x4D:  # BININT2
            stack.append(_UINT2.unpack_from(data, begin)[0])
            self.place = begin + 2
        elif code == 0x95:  # FRAME: only says how the rest is cut into pieces
            if _UINT8.unpack_from(data, begin)[0] > len(data) - begin - 8:
                raise PickleError("it is cut off: a frame is longer than the file")
            self.place = begin + 8
        else:
            self._rarest(code)

    def _rarest(self, code: int) -> None:
        data, begin, stack = self.data, self.place + 1, self.stack
        if code in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            count = code - 0x84
            if len(stack) < count:
                raise PickleError("it is damaged: a tuple lacks its items")
            stack[-count:] = [tuple(stack[-count:])]
            self.place = begin
        elif code == 0x74:  # TUPLE
            items = self._to_mark()
            self.stack.append(tuple(items))
            self.place = begin
        elif code in (0x29, 0x8F):  # EMPTY_TUPLE, EMPTY_SET
            stack.append(() if code == 0x29 else set())
            self.place = begin
        elif code == 0x61:  # APPEND
            item = stack.pop()
            _list(stack[-1]).append(item)
            self.place = begin
        elif code == 0x73:  # SETITEM
            items = stack[-2:]
            del stack[-2:]
            _set_items(stack[-1], items)
            self.place = begin
        elif code == 0x90:  # ADDITEMS
            items = self._to_mark()
            _add_items(self.stack[-1], items)
            self.place = begin
        elif code == 0x47:  # BINFLOAT
            stack.append(_FLOAT.unpack_from(data, begin)[0])
            self.place = begin + 8
        elif code == 0x71:  # BINPUT
            self._remember(data[begin])
            self.place = begin + 1
        elif code == 0x72:  # LONG_BINPUT
            self._remember(_UINT4.unpack_from(data, begin)[0])
            self.place = begin + 4
        elif code in _BYTES:
            stack.append(self._content(begin, _BYTES[code]))
        elif code == 0x8B:  # LONG4
            self.place = begin + 4 + _UINT4.unpack_from(data, begin)[0]
            stack.append(self._integer(begin + 4))
        else:
            raise PickleError(self._refusal(code))

    def _referred(self) -> tuple[Any, ...]:
        """What a run of references refers to."""
        run = _REFERENCES.match(self.data, self.place)
        if run is None:
            raise PickleError("it is cut off")
        self.place = run.end()
        known = self.runs.get(run[0])
        if known is None:
            numbers = [short[0] if short else _UINT4.unpack(long)[0] for short, long in _REFERENCE.findall(run[0])]
            known = self.runs[run[0]] = tuple(self.memo[number] for number in numbers)
        return known

    def _remember(self, number: int) -> None:
        if number in self.memo:
            raise PickleError("it is damaged: it remembers two things under one number")
        self.memo[number] = self.stack[-1]

    def _content(self, begin: int, width: int) -> bytes:
        """What follows its own length, of which the file must have as much."""
        start = begin + width
        end = start + _LENGTHS[width].unpack_from(self.data, begin)[0]
        if end > len(self.data):
            raise PickleError("it is cut off: a text is longer than the file")
        self.place = end
        return self.data[start:end]

    def _integer(self, begin: int) -> int:
        """The integer between a place and the one after it."""
        if self.place - begin > _MAX_INTEGER_BYTES:
            raise PickleError(f"it holds an integer of {self.place - begin} bytes; no snapshot does")
        if self.place > len(self.data):
            raise PickleError("it is cut off")
        return int.from_bytes(self.data[begin : self.place], "little", signed=True)

    def _to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def _end(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise PickleError("it is damaged: it ends in the middle of something")
        return self.stack[0]

    def _refusal(self, code: int) -> str:
        name = _NAMES.get(code, f"{code:#04x}")
        if name in _RUNS_CODE:
            return f"it asks for more than plain data ({name} at byte {self.place}): to read it would run code that it names"
        return f"it has an opcode that no plain data needs ({name} at byte {self.place})"


def _list(found: Any) -> list[Any]:
    if type(found) is not list:
        raise PickleError(f"it is damaged: it appends to a {type(found).__name__}")
    return found


def _set_items(found: Any, items: list[Any]) -> None:
    if type(found) is not dict or len(items) % 2:
        raise PickleError(f"it is damaged: it sets items of a {type(found).__name__}")
    keys = items[::2]
    for key in keys:
        if type(key) is not str:
            _check_key(key)
    found.update(zip(keys, items[1::2], strict=True))


def _add_items(found: Any, items: list[Any]) -> None:
    if type(found) is not set:
        raise PickleError(f"it is damaged: it adds items to a {type(found).__name__}")
    for item in items:
        _check_key(item)
    found.update(items)


def _check_key(key: Any) -> None:
    known = type(key) in (str, bytes, bool, type(None), float) or (type(key) is int and abs(key) < _MAX_KEY)
    if not known:
        raise PickleError(f"it has a key or a member of a set that no snapshot has: a {type(key).__name__}")
