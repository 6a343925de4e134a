"""Reads integers and texts of a plain SQLite table from the file's pages, many rows at a time.

SQLite itself takes five times as long for a million rows, since it decodes and writes out each value on its own. The format is
stable and documented (https://www.sqlite.org/fileformat2.html). Whatever is unusual or damaged is left to SQLite.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.traces.bounds import MAX_NAME
from bridge_profiling.traces.tables import NULL, Integers

Bytes = NDArray[np.uint8]

#: Larger pieces leave more freed memory that is not given back.
_PIECE_BYTES = 1 << 20
_INTERIOR, _LEAF = 5, 13
_PAGE_HEADER_BYTES = {_INTERIOR: 12, _LEAF: 8}

#: Records up to the page's size less this are in their page as a whole.
_LEAST_LEFT_BYTES = 35

#: Bytes of the values of each serial type of one byte; 10 and 11 are never written. From 12 on, blobs are even and texts odd.
_SIZES = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0, *((kind - 12) >> 1 for kind in range(12, 128))], np.int64)
_NULL, _REAL, _ZERO, _ONE, _TEXT = 0, 7, 8, 9, 13

#: Serial types that are decoded at a time.
_KINDS = 8

#: How far the eight bytes from a value's start on are shifted to leave the value.
_SHIFTS = np.array([0, 56, 48, 40, 32, 16, 0, 0, 0, 0, 0, 0], np.int64)

#: After what was read: bytes that a damaged record at its end refers to.
_PADDING = 64

_MOST_LEVELS = 20


class UnusualError(Exception):
    """The table is left to SQLite."""


@dataclass(frozen=True)
class Piece:
    """Some rows of a table, in its order."""

    last: int  # number of the last row
    integers: Mapping[str, Integers]
    texts: pa.Array | None = None  # of the column of texts, if one was asked for, as bytes: empty for null
    pages: Bytes | None = None  # all that this part of the table holds; None where SQLite read it
    share: float = 1  # of the table that is read so far
    without: int = 0  # rows of this part of the table, chosen or not, that lack an integer which they need

    def __len__(self) -> int:
        return len(next(iter(self.integers.values())) if self.texts is None else self.texts)


class TableFile:
    """An SQLite file.

    Raises:
        UnusualError: its pages are not the usual ones. Every method raises it for what is not plain.
    """

    def __init__(self, file: BinaryIO) -> None:
        file.seek(0)
        header = file.read(100)
        if len(header) < 100:
            raise UnusualError
        self._file = file
        self._page = int.from_bytes(header[16:18], "big")
        self._page = 1 << 16 if self._page == 1 else self._page
        self._usable = self._page - header[20]
        utf_8 = int.from_bytes(header[56:60], "big") == 1
        if self._page < 512 or self._page & (self._page - 1) or self._usable < 480 or not utf_8:
            raise UnusualError
        self._pages = os.fstat(file.fileno()).st_size // self._page
        self._at_a_time = max(_PIECE_BYTES // self._page, 1)

    def rows(self, root: int, columns: Mapping[str, int], text: int | None = None) -> Iterator[Piece]:
        """Pieces of a table: columns of integers, and one of texts, each by its place in the table.

        Args:
            root: page at which the table begins.
        """
        leaves = self._leaves(root)
        last = NULL
        for begin in range(0, len(leaves), self._at_a_time):
            data = self._read(leaves[begin : begin + self._at_a_time])
            row, places, ends = self._records(data)
            if len(row):
                if row[0] <= last or (row[1:] <= row[:-1]).any():
                    raise UnusualError
                last = int(row[-1])
                share = min((begin + self._at_a_time) / len(leaves), 1)
                yield replace(_decoded(last, data, places, ends, columns, text), share=share)

    def _read(self, numbers: Integers) -> Bytes:
        """Pages one after another, with padding."""
        if len(numbers) and (numbers.min() < 2 or numbers.max() > self._pages):
            raise UnusualError
        data = np.empty(len(numbers) * self._page + _PADDING, np.uint8)
        data[-_PADDING:] = 0
        firsts = np.flatnonzero(np.append(True, np.diff(numbers) != 1)[: len(numbers)])
        for first, last in zip(firsts.tolist(), [*firsts[1:].tolist(), len(numbers)], strict=True):
            self._file.seek((int(numbers[first]) - 1) * self._page)
            part = self._file.read((last - first) * self._page)
            if len(part) != (last - first) * self._page:
                raise UnusualError
            data[first * self._page : last * self._page] = np.frombuffer(part, np.uint8)
        return data

    def _leaves(self, root: int) -> Integers:
        """The pages with a table's rows, in order."""
        level, passed = np.array([root], np.int64), 0
        for _ in range(_MOST_LEVELS):
            passed += len(level)
            if passed > self._pages:  # they list each other in circles
                raise UnusualError
            if self._read(level[:1])[0] == _LEAF:
                return level
            children = []
            for begin in range(0, len(level), self._at_a_time):
                data = self._read(level[begin : begin + self._at_a_time])
                cells, first_of_page = self._cells(data, _INTERIOR)
                below = _big_endian(data, 4)
                # The last child of a page is in its header.
                last = below[np.arange(0, len(data) - _PADDING, self._page) + 8]
                children.append(np.insert(below[cells], first_of_page[1:], last))
            level = np.concatenate(children).astype(np.int64)
        raise UnusualError

    def _cells(self, data: Bytes, kind: int) -> tuple[Integers, Integers]:
        """The places of all cells, and the number of the first cell of each page, with their sum at the end."""
        starts = np.arange(0, len(data) - _PADDING, self._page)
        header = _PAGE_HEADER_BYTES[kind]
        counts = _big_endian(data, 2)[starts + 3].astype(np.int64)
        if (data[starts] != kind).any() or (header + 2 * counts > self._usable).any():
            raise UnusualError
        first = np.concatenate(([0], np.cumsum(counts)))
        page = np.repeat(starts, counts)
        within = np.arange(first[-1]) - np.repeat(first[:-1], counts)
        place = _big_endian(data, 2)[page + header + 2 * within].astype(np.int64)
        if (place >= self._usable).any():
            raise UnusualError
        return page + place, first

    def _records(self, data: Bytes) -> tuple[Integers, Integers, Integers]:
        """Row number, place and end of each record."""
        cells, _ = self._cells(data, _LEAF)
        size, place = _varint(data, cells)
        row, place = _varint(data, place)
        end = place + size
        whole = (size <= self._usable - _LEAST_LEFT_BYTES) & (end - cells // self._page * self._page <= self._usable)
        # Records that overlap could together be far larger than the file.
        if not whole.all() or (end - cells).sum() > len(data):
            raise UnusualError
        return row, place, end


def _decoded(last: int, data: Bytes, place: Integers, end: Integers, columns: Mapping[str, int], text: int | None) -> Piece:
    """Columns of records: a header of serial types, whose size is before them, then the values."""
    size, kinds = _varint(data, place)
    value = header_end = place + size
    if ((size < 1) | (value > end)).any():
        raise UnusualError
    words = _big_endian(data, 8)
    by_place = {number: name for name, number in columns.items()}
    wanted = [*columns.values(), *([] if text is None else [text])]
    integers: dict[str, Integers] = {}
    text_start = text_bytes = np.empty(0, np.int64)
    for number, kind in enumerate(_serial_types(data, kinds, header_end, max(wanted, default=-1) + 1)):
        length = _SIZES[kind] if kind.dtype == np.uint8 else _sizes(kind)
        if number in wanted and (value > end).any():
            raise UnusualError
        if number in by_place:
            if len(kind) and (kind.max() > _ONE or (kind == _REAL).any()):
                raise UnusualError
            integers[by_place[number]] = _integers(words[value], kind)
        if number == text:
            if ((kind != _NULL) & ((kind < _TEXT) | (kind & 1 == 0))).any():
                raise UnusualError
            text_start, text_bytes = value, length
        value = value + length
    if (value > end).any():
        raise UnusualError
    if text is None:
        return Piece(last, integers, pages=data)
    texts = _slices(data, text_start, text_bytes)
    # Functions of SQLite end a text at a zero, and count characters.
    if (text_bytes > MAX_NAME).any() or not np.frombuffer(texts.buffers()[2] or b"", np.uint8).all():
        raise UnusualError
    return Piece(last, integers, texts, data)


def _serial_types(data: Bytes, place: Integers, end: Integers, count: int) -> Iterator[NDArray[Any]]:
    """The types of some columns, one after another: as bytes where all are below 128, as 64-bit integers otherwise."""
    words = np.ndarray((len(data) - _KINDS,), "<u8", data, strides=(1,))
    done = 0
    while done < count:
        # Eight headers' bytes are read at once: nearly all types are one byte.
        found = np.ascontiguousarray(words[place].view(np.uint8).reshape(-1, _KINDS).T)
        for kind in found[: count - done]:
            if kind.max(initial=0) > 127:
                break
            place, done = place + 1, done + 1
            if (place > end).any():  # the row is from before the column was added
                raise UnusualError
            yield kind
        else:
            continue
        if (place >= end).any():
            raise UnusualError
        wide, place = _varint(data, place)
        if wide.min(initial=0) < 0:
            raise UnusualError
        done += 1
        yield wide


def _sizes(kind: Integers) -> Integers:
    """Bytes of values of serial types that can be larger than a byte. Longer ones than any record must not add up to few."""
    return np.where(kind < len(_SIZES), _SIZES[np.minimum(kind, len(_SIZES) - 1)], np.minimum((kind - 12) >> 1, 1 << 32))


def _integers(words: NDArray[Any], kind: NDArray[Any]) -> Integers:
    """The integers that begin at eight bytes each, by their serial types."""
    found = words.astype(np.int64)
    found >>= _SHIFTS[kind]
    for constant, meaning in ((_NULL, NULL), (_ZERO, 0), (_ONE, 1)):
        if (rows := kind == constant).any():
            found[rows] = meaning
    return found


def _varint(data: Bytes, place: Integers) -> tuple[Integers, Integers]:
    """Numbers of 1 to 9 bytes, whose high bits say that another one follows, and the places after them."""
    byte = data[place]
    value, place = (byte & 0x7F).astype(np.int64), place + 1
    count = 1
    # Neighboring rows mostly have numbers of the same size.
    while count < 8 and len(byte) and byte.min() > 127:
        byte = data[place]
        value = value << 7 | byte & 0x7F
        place += 1
        count += 1
    rows = np.flatnonzero(byte & 0x80)
    for more in range(count, 9):
        if not len(rows):
            break
        byte = data[place[rows]]
        place[rows] += 1
        value[rows] = value[rows] << 8 | byte if more == 8 else value[rows] << 7 | byte & 0x7F
        rows = rows[byte >= 0x80]
    return value, place


def _slices(data: Bytes, start: Integers, length: Integers) -> pa.Array:
    """Parts of `data` as binary values, which Arrow copies in a third of NumPy's time.

    Raises:
        UnusualError: some of them overlap.
    """
    # Neighboring pages ascend, and in each of them the rows descend.
    order = np.argsort(start, kind="stable")
    # Every second value is the bytes between two parts.
    bounds = np.stack((start[order], start[order] + length[order]), axis=1).reshape(-1).astype(np.int32)
    if (bounds[1:] < bounds[:-1]).any():
        raise UnusualError
    parts = pa.Array.from_buffers(pa.binary(), max(len(bounds) - 1, 0), [None, pa.py_buffer(bounds), pa.py_buffer(data)])
    place = np.empty(len(start), np.int64)
    place[order] = np.arange(0, len(bounds), 2)
    return parts.take(pa.array(place))


def _big_endian(data: Bytes, size: int) -> NDArray[Any]:
    """The number at each place."""
    kind = {2: ">u2", 4: ">u4", 8: ">i8"}[size]
    return np.ndarray((len(data) - size,), kind, data, strides=(1,))
