"""NVTX ranges of an nsys report: names, torch's operators among them, iterations, and which range a time lies in."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.errors import TraceError
from bridge_profiling.traces.joins import Iterations
from bridge_profiling.traces.nsys_database import SEPARATOR, Database
from bridge_profiling.traces.tables import NULL, Integers
from bridge_profiling.traces.types import Caveat

TABLE = "NVTX_EVENTS"

#: NvtxPushPopRange and NvtxtPushPopRange nest on their thread; NvtxStartEndRange and NvtxtStartEndRange need not.
NESTED_TYPES, FREE_TYPES = (59, 70), (60, 71)

#: What torch's emit_nvtx appends to an operator's name: autograd's sequence number, its own, its inputs' dimensions.
_NUMBERS, _ENDS = r", (?:seq = -?\d+(?:, op_id = \d+)?|op_id = \d+)", rf"(?={SEPARATOR}|\Z)"
_OPERATOR = re.compile(_NUMBERS + _ENDS)
_OPERATOR_WITH_SHAPES = re.compile(
    rf"{_NUMBERS}(?:, sizes = (\[[^{SEPARATOR}]*?\]))?(?:, input_op_ids = [^{SEPARATOR}]*)?{_ENDS}"
)
_MARK = "\x1e"

#: Iterations as profilers and Megatron name them; where none is, as other loops do.
_ITERATIONS = (
    re.compile(r"(?:ProfilerStep\s*#|iteration[_ #-]?)\s?(\d{1,9})$", re.IGNORECASE),
    re.compile(r"(?:train(?:ing)?[_ -])?(?:iter|step)[_ #:-]?\s?(\d{1,9})$", re.IGNORECASE),
)


@dataclass
class Ranges:
    """Ranges by start, the longer first.

    Args:
        start_ns: on the report's clock.
        end_ns: likewise; the report's end where the range was still open, which `open` says.
        thread: `globalTid`.
        name: number in `names`.
        nested: it was pushed and popped on its thread.
        open: it had not ended when the report did.
        names: without what torch appends.
        operator: by number of name: torch called it an operator.
        shapes: by number of name: its inputs' dimensions as JSON text; None when not recorded.
    """

    start_ns: Integers
    end_ns: Integers
    thread: Integers
    name: NDArray[np.int32]
    nested: NDArray[np.bool_]
    open: NDArray[np.bool_]
    names: list[str]
    operator: list[bool]
    shapes: list[str | None]

    def __len__(self) -> int:
        return len(self.start_ns)

    def innermost(self, thread: Integers, time_ns: Integers, among: NDArray[np.bool_] | None = None) -> Integers:
        """The innermost range of a thread that a time lies in; -1 where there is none.

        Args:
            thread: `globalTid` of each time.
            time_ns: when.
            among: ranges to look at; None for all. They must nest on their thread, as pushed ones do.
        """
        found = np.full(len(time_ns), -1)
        usable = self.nested & (self.end_ns > self.start_ns)
        usable = usable if among is None else usable & among
        for one in np.unique(thread[thread != NULL]).tolist():
            rows = np.flatnonzero(usable & (self.thread == one))
            times = np.flatnonzero(thread == one)
            if len(rows):
                found[times] = self._innermost(rows, time_ns[times])
        return found

    def _innermost(self, rows: Integers, time_ns: Integers) -> Integers:
        """Of what nests, the range is the one that began last among those as deep as the ranges open at the time."""
        start, end = self.start_ns[rows], np.sort(self.end_ns[rows])
        depth = np.arange(len(rows)) - np.searchsorted(end, start, side="right")
        opened = np.searchsorted(start, time_ns, side="right") - np.searchsorted(end, time_ns, side="right")
        found = np.full(len(time_ns), -1)
        for level in np.unique(opened[opened > 0]).tolist():
            times = np.flatnonzero(opened == level)
            candidates = rows[depth == level - 1]
            before = np.searchsorted(self.start_ns[candidates], time_ns[times], side="right") - 1
            place = candidates[np.maximum(before, 0)] if len(candidates) else np.full(len(times), -1)
            found[times] = np.where((before >= 0) & (self.end_ns[place] > time_ns[times]), place, -1)
        return found


def read_ranges(database: Database, where: str, end_ns: int | None) -> Ranges:
    """The ranges of one process.

    Args:
        database: the report.
        where: SQL condition for the process' rows.
        end_ns: the last time in the report; None leaves out ranges that are still open.

    Raises:
        TraceError: SQLite cannot read them.
    """
    types = ", ".join(map(str, NESTED_TYPES + FREE_TYPES))
    where = f"({where}) AND eventType IN ({types})" if database.has(TABLE, "eventType") else where
    columns = database.columns(TABLE, ("start", "end", "globalTid", "eventType", "textId"), where)
    texts, codes = _names(database, where, len(columns["start"]))
    start, end = columns["start"], columns["end"]
    still_open = end == NULL
    if end_ns is not None:
        end = np.where(still_open, np.maximum(start, end_ns), end)
    registered = database.strings(columns["textId"])
    known = {text: code for code, text in enumerate(texts)}
    by_id = {number: known.setdefault(text, len(known)) for number, text in registered.items()}
    if by_id:
        ids = np.array(sorted(by_id), np.int64)
        place = np.minimum(np.searchsorted(ids, columns["textId"]), len(ids) - 1)
        has_id = ids[place] == columns["textId"]
        codes = np.where(has_id, np.array([by_id[number] for number in ids.tolist()], np.int32)[place], codes).astype(np.int32)
    good = (start != NULL) & (end != NULL) & (end >= start)
    order = np.flatnonzero(good)
    order = order[np.lexsort((-end[order], start[order]))]
    plain = [text.partition(_MARK) for text in known]
    return Ranges(
        start_ns=start[order],
        end_ns=end[order],
        thread=columns["globalTid"][order],
        name=codes[order],
        nested=np.isin(columns["eventType"][order], NESTED_TYPES),
        open=still_open[order],
        names=[name for name, _, _ in plain],
        operator=[bool(mark) for _, mark, _ in plain],
        shapes=["".join(shapes.split()) or None for _, _, shapes in plain],
    )


def _names(database: Database, where: str, rows: int) -> tuple[list[str], NDArray[np.int32]]:
    """The texts of ranges, what torch appends told apart, and each row's number among them."""
    known: dict[str, int] = {}
    pieces = []
    for piece in database.texts(TABLE, '"text"', where) if database.has(TABLE, "text") else ():
        joined = _OPERATOR.sub(_MARK, SEPARATOR.join(piece))
        if ", sizes = " in joined or ", input_op_ids = " in joined:
            joined = _OPERATOR_WITH_SHAPES.sub(_MARK + r"\1", joined)
        texts = joined.split(SEPARATOR)
        for text in texts:
            known.setdefault(text, len(known))
        pieces.append(np.fromiter(map(known.__getitem__, texts), np.int32, len(texts)))
    if not pieces:
        return [""], np.zeros(rows, np.int32)
    return list(known), np.concatenate(pieces)


def iterations(ranges: Ranges, caveats: list[Caveat], path: object) -> tuple[Iterations, NDArray[np.int64]]:
    """The iterations that ranges name, ascending in time, and the row of each.

    Args:
        ranges: of one process.
        caveats: filled.
        path: the file that errors name.

    Raises:
        TraceError: a later iteration has a smaller number.
    """
    number, rows = np.empty(0, np.int64), np.empty(0, np.int64)
    for pattern in _ITERATIONS:
        said = [pattern.match(name) for name in ranges.names]
        numbers = np.array([NULL if match is None else int(match[1]) for match in said], np.int64)
        number = numbers[ranges.name] if len(ranges) else number
        rows = np.flatnonzero(number != NULL)
        if len(rows):
            break
    # The same range can stand on several threads; the first is the loop's.
    rows = np.sort(rows[np.unique(number[rows], return_index=True)[1]])
    number, start, end = number[rows], ranges.start_ns[rows], ranges.end_ns[rows]
    if (np.diff(number) < 0).any():
        raise TraceError(f"{path} cannot be read: its iterations do not follow one another in time: the clock went backwards")
    if (start[1:] < end[:-1]).any():
        caveats.append(
            Caveat("iterations_overlap", "iterations overlap: an event inside two of them counts toward the later one")
        )
    return Iterations(number, start, end, rows), rows
