"""Texts that are numbered, as a table's column. Reads no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def coded_column(codes: NDArray[Any], values: Sequence[str | None]) -> pa.Array:
    """`values[codes]` as a dictionary-encoded column, with those values only that it has, each once.

    Args:
        codes: the number of each row's value; null where it is negative.
        values: texts; null where one is None.
    """
    counts = np.bincount(codes[codes >= 0], minlength=len(values)) if len(codes) else np.zeros(len(values), np.int64)
    known: dict[str, int] = {}
    place = np.full(len(values) + 1, -1, np.int32)  # the last one is what a negative code means
    for code in np.flatnonzero(counts).tolist():
        value = values[code]
        if value is not None:
            place[code] = known.setdefault(value, len(known))
    numbers = place[np.where(codes >= 0, codes, len(values))]
    return pa.DictionaryArray.from_arrays(pa.array(numbers, mask=numbers < 0), pa.array(list(known), pa.string()))
