"""Names of NVTX ranges without what torch appends to operators: a million texts at a time, most of which occur once."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.traces.nsys.database import SEPARATOR
from bridge_profiling.traces.nsys.pages import Bytes
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


@dataclass(frozen=True)
class OperatorNames:
    """Texts without their numbers."""

    names: list[str]  # distinct ones, with MARK after an operator's name
    code: NDArray[np.int32]  # index of `names`
    sequence: Integers  # autograd's number, NULL where there is none


def operator_names(texts: Bytes, rows: int) -> OperatorNames:
    """The names in texts that each end with a SEPARATOR."""
    ends = np.flatnonzero(texts == ord(SEPARATOR))
    starts = np.concatenate(([0], ends[:-1] + 1))[:rows]
    commas = np.flatnonzero(texts[:-1] == ord(","))
    commas = commas[texts[commas + 1] == ord(" ")]
    padded = np.concatenate((texts, np.zeros(16, np.uint8)))
    sequences, operators = _at(padded, commas, _SEQUENCE), _at(padded, commas, _OPERATOR)

    number, after = _numbers(padded, sequences + len(_SEQUENCE))
    row = np.searchsorted(ends, sequences)
    sequence = np.full(rows, NULL)
    # The first one of a text.
    sequence[row[::-1]] = number[::-1]
    _, end_of_operator = _numbers(padded, operators + len(_OPERATOR), signed=False)
    row_of_operator = np.searchsorted(ends, operators)
    cut = ends.copy()
    complete = end_of_operator == ends[row_of_operator]
    cut[row_of_operator[complete]] = operators[complete]
    # Complete with its own number too, or alone.
    complete = (after == cut[row]) & (after > sequences + len(_SEQUENCE))
    cut[row[complete]] = sequences[complete]
    written = texts.tobytes()
    if any(each in written for each in _OF_SHAPES):
        names, code = _with_shapes(written)
    else:
        names, code = _distinct(texts, starts, cut, cut < ends)
    return OperatorNames(names, code, sequence)


def _at(texts: Bytes, places: Integers, wanted: bytes) -> Integers:
    """The places at which a text of eight to ten bytes begins."""
    words = np.ndarray((len(texts) - 8,), "<u8", texts, strides=(1,))
    for begin in {0, len(wanted) - 8}:
        places = places[words[places + begin] == int.from_bytes(wanted[begin : begin + 8], "little")]
    return places


def _numbers(texts: Bytes, places: Integers, *, signed: bool = True) -> tuple[Integers, Integers]:
    """The number at each place, of its first digits, and the place after it; the same place where there is none."""
    negative = (texts[places] == ord("-")) & signed
    after = places + negative
    value = np.zeros(len(places), np.int64)
    rows, count = np.arange(len(places)), 0
    while len(rows):
        digit = texts[after[rows]] - np.uint8(ord("0"))
        rows, digit = rows[digit < 10], digit[digit < 10]
        if count < _DIGITS:
            value[rows] = value[rows] * 10 + digit
        after[rows] += 1
        count += 1
    return np.where(negative, -value, value), np.where(after > places + negative, after, places)


def _distinct(texts: Bytes, starts: Integers, ends: Integers, marked: NDArray[np.bool_]) -> tuple[list[str], NDArray[np.int32]]:
    length = ends - starts + marked
    after = np.cumsum(length)
    offsets = np.concatenate(([0], after)).astype(np.int32)
    names = texts[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], length)]
    names[after[marked] - 1] = ord(MARK)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(names)]
    encoded = pa.Array.from_buffers(pa.binary(), len(starts), buffers).dictionary_encode()
    # Not UTF-8 in a damaged report.
    return [name.decode("utf-8", "replace") for name in encoded.dictionary.to_pylist()], encoded.indices.to_numpy()


def _with_shapes(written: bytes) -> tuple[list[str], NDArray[np.int32]]:
    texts = _WITH_SHAPES.sub(MARK + r"\1", written.decode("utf-8", "replace")).split(SEPARATOR)[:-1]
    encoded = pa.array(texts).dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
