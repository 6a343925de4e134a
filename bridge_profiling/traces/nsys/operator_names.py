"""Names of NVTX ranges without what torch appends to operators: a million texts at a time, most of which occur once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.traces.nsys.database import SEPARATOR
from bridge_profiling.traces.nsys.pages import Bytes, slices_of
from bridge_profiling.traces.tables import NULL, Integers

#: Between an operator's name and its inputs' dimensions.
MARK = "\x1e"

#: Appended by torch's emit_nvtx to an operator's name: autograd's sequence number, its own, its inputs' dimensions.
_SEQUENCE, _OPERATOR = b", seq = ", b", op_id = "
_WITH_SHAPES = re.compile(
    rf", (?:seq = -?\d+(?:, op_id = \d+)?|op_id = \d+)(?:, sizes = (\[[^{SEPARATOR}]*?\]))?"
    rf"(?:, input_op_ids = [^{SEPARATOR}]*)?(?={SEPARATOR})"
)
_OF_SHAPES = (b", sizes = ", b", input_op_ids = ")

#: Digits of a sequence number that count; so many fit an integer.
_DIGITS = 18

#: Characters that a word of 64 bits holds, and bytes after all texts that words extend over.
_WORD, _PADDING = 8, 32


class OperatorNames:
    """Distinct names of texts that are added piece by piece."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._known: dict[bytes, int] = {}  # the same by their bytes, which need not be UTF-8 in a damaged report

    @property
    def names(self) -> list[str]:
        """The names, with MARK after an operator's."""
        return list(self._codes)

    def add(self, texts: Bytes, rows: int) -> tuple[Integers, Integers]:
        """The place of each text among the names, and autograd's number in it; NULL where there is none.

        Args:
            texts: a SEPARATOR ends each.
        """
        padded = np.concatenate((texts, np.zeros(_PADDING, np.uint8)))
        words = _words(padded)
        ends = np.flatnonzero(texts == ord(SEPARATOR))
        starts = np.append(0, ends[:-1] + 1)[:rows]
        commas = np.flatnonzero(texts == ord(","))
        found = words[commas]
        sequences, operators = _at(_SEQUENCE, words, commas, found), _at(_OPERATOR, words, commas, found)
        row = np.searchsorted(ends, sequences)
        number, after = _numbers(padded, sequences + len(_SEQUENCE))
        sequence = np.full(rows, NULL)
        # The first one of a text.
        sequence[row[::-1]] = number[::-1]
        if any(len(_at(mark, words, commas, found)) for mark in _OF_SHAPES):
            return self._with_shapes(texts), sequence
        cut = ends.copy()
        row_of_operator = np.searchsorted(ends, operators)
        complete = _after_digits(padded, operators + len(_OPERATOR)) == ends[row_of_operator]
        cut[row_of_operator[complete]] = operators[complete]
        # Complete with its own number too, or alone.
        complete = (after == cut[row]) & (after > sequences + len(_SEQUENCE))
        cut[row[complete]] = sequences[complete]
        marked = cut < ends
        padded[cut[marked]] = ord(MARK)
        return self._coded(slices_of(padded, starts, cut + marked - starts), self._of_bytes), sequence

    def _coded(self, names: pa.Array, code: Callable[[Any], int]) -> Integers:
        encoded = names.dictionary_encode()
        codes = np.array([code(name) for name in encoded.dictionary.to_pylist()], np.int64)
        return codes[encoded.indices.to_numpy()]

    def _of_text(self, name: str) -> int:
        return self._codes.setdefault(name, len(self._codes))

    def _of_bytes(self, name: bytes) -> int:
        if name not in self._known:
            self._known[name] = self._of_text(name.decode("utf-8", "replace"))
        return self._known[name]

    def _with_shapes(self, texts: Bytes) -> Integers:
        written = texts.tobytes().decode("utf-8", "replace")
        return self._coded(pa.array(_WITH_SHAPES.sub(MARK + r"\1", written).split(SEPARATOR)[:-1]), self._of_text)


def _words(texts: Bytes) -> NDArray[np.uint64]:
    """The eight bytes from each place on; the first is the lowest of the number."""
    return np.ndarray((len(texts) - _WORD + 1,), "<u8", texts, strides=(1,))


def _at(wanted: bytes, words: NDArray[np.uint64], places: Integers, found: NDArray[np.uint64]) -> Integers:
    """The places at which a text of eight bytes or more begins; `found` are the words there."""
    places = places[found == int.from_bytes(wanted[:_WORD], "little")]
    for begin in range(_WORD, len(wanted), _WORD):
        last = min(begin, len(wanted) - _WORD)
        places = places[words[places + last] == int.from_bytes(wanted[last : last + _WORD], "little")]
    return places


def _bytes(value: int) -> np.uint64:
    """A word whose eight bytes are the same."""
    return np.uint64(int.from_bytes(bytes([value] * _WORD), "little"))


def _leading_digits(word: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Integers]:
    """Words of digits as numbers from 0 to 9, in place of characters, and how many of these there are before any other."""
    digits = word ^ _bytes(ord("0"))
    # The highest bit of each byte that is more than 9: a carry only reaches bytes after such a one.
    other = ((digits + _bytes(0x7F - 9)) | digits) & _bytes(0x80)
    # All bits below the first of these, one of each byte, are counted.
    below = (other - np.uint64(1)) & ~other & _bytes(0x01)
    count = (below * _bytes(0x01)) >> np.uint64(56)
    return digits, np.where(other == 0, _WORD, count.astype(np.int64) - 1)


def _numbers(texts: Bytes, places: Integers) -> tuple[Integers, Integers]:
    """The number at each place, of its first digits, and the place after it; the same place where there is none."""
    negative = texts[places] == ord("-")
    begin = places + negative
    digits, count = _leading_digits(_words(texts)[begin])
    # The last digit becomes the highest byte, with zeros below the first. Then ten times each digit and the next one are added
    # to numbers of two digits, these to numbers of four, and these to one.
    word = np.where(count > 0, digits << (8 * (_WORD - np.maximum(count, 1))).astype(np.uint64), np.uint64(0))
    for bits, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
        word = (word * np.uint64(10 ** (bits // 8)) + (word >> np.uint64(bits))) & np.uint64(mask)
    value, after = word.astype(np.int64), begin + count
    rows = np.flatnonzero(count == _WORD)
    while len(rows):
        digit = texts[after[rows]] - np.uint8(ord("0"))
        rows, digit = rows[digit < 10], digit[digit < 10]
        counted = after[rows] - begin[rows] < _DIGITS
        value[rows[counted]] = value[rows[counted]] * 10 + digit[counted]
        after[rows] += 1
    return np.where(negative, -value, value), np.where(after > begin, after, places)


def _after_digits(texts: Bytes, places: Integers) -> Integers:
    """The place after the digits at each place."""
    after = places.copy()
    rows = np.arange(len(places))
    while len(rows):
        count = _leading_digits(_words(texts)[after[rows]])[1]
        after[rows] += count
        rows = rows[count == _WORD]
    return after
