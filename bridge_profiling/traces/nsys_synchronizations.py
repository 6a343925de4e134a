"""Who waits for whom in an nsys report: synchronizations, joined with the event records that they wait for."""

from __future__ import annotations

import numpy as np

from bridge_profiling.traces.joins import rows_by_key, taken
from bridge_profiling.traces.nsys_database import Database
from bridge_profiling.traces.nsys_processes import Process
from bridge_profiling.traces.tables import NULL, Integers
from bridge_profiling.traces.types import Caveat

TABLE, _RECORDS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"

#: CUPTI's word for no stream and no event, in 32 bits and in 64.
_NONE = ((1 << 32) - 1, -1, NULL)

KINDS = ("stream_wait_event", "event", "stream", "context")


def read_synchronizations(
    database: Database, process: Process, querying: Integers, caveats: list[Caveat]
) -> dict[str, Integers]:
    """Columns of `synchronizations` on the report's clock; `kind` is a number in KINDS.

    Args:
        database: the report.
        process: whose.
        querying: correlations of calls that wait for nothing.
        caveats: filled.
    """
    names = ("start", "end", "deviceId", "streamId", "correlationId", "eventId", "eventSyncId")
    columns = database.columns(TABLE, names, process.where(database, TABLE))
    # cudaEventQuery has such records too.
    asked = np.isin(columns["correlationId"], querying)
    rows = np.flatnonzero((columns["start"] != NULL) & (columns["end"] >= columns["start"]) & ~asked)
    rows = rows[np.argsort(columns["start"][rows], kind="stable")]
    columns = {name: values[rows] for name, values in columns.items()}
    stream = np.where(np.isin(columns["streamId"], _NONE), NULL, columns["streamId"])
    event = np.where(np.isin(columns["eventId"], _NONE), NULL, columns["eventId"])
    # CUPTI documents which ids each kind has. `syncType` is not looked at: nsys 2024.2 numbers a wait for an event 3, which
    # its own list of numbers calls a wait for a stream.
    kind = np.select([(stream != NULL) & (event != NULL), event != NULL, stream != NULL], [0, 1, 2], 3)
    producer = _records(database, process, columns, event, caveats)
    return {
        "kind": kind,
        "device": columns["deviceId"],
        "stream": stream,
        "start_ns": columns["start"],
        "end_ns": columns["end"],
        "correlation": columns["correlationId"],
        "producer_stream": producer["streamId"],
        "producer_correlation": producer["correlationId"],
    }


def _records(
    database: Database, process: Process, waits: dict[str, Integers], event: Integers, caveats: list[Caveat]
) -> dict[str, Integers]:
    """The record of the event that each synchronization waits for.

    An event is recorded again and again under one `eventId`; `eventSyncId` numbers each record. Exports without it have the
    order of calls: a wait is for the latest record before it. Times of records may be 0, so that order is of correlations.
    """
    columns = database.columns(
        _RECORDS, ("streamId", "correlationId", "eventId", "eventSyncId"), process.where(database, _RECORDS)
    )
    row = rows_by_key(columns["eventSyncId"], np.where(event != NULL, waits["eventSyncId"], NULL))
    unnumbered = (row < 0) & (event != NULL) & (waits["eventSyncId"] == NULL)
    if unnumbered.any() and len(columns["eventId"]):
        row[unnumbered] = _latest_before(columns, event[unnumbered], waits["correlationId"][unnumbered])
    unresolved = int(((event != NULL) & (row < 0)).sum())
    if unresolved:
        caveats.append(
            Caveat(
                "event_records_missing",
                f"{unresolved} of {int((event != NULL).sum())} waits for a CUDA event are for a record that was not captured",
            )
        )
    return {name: taken(columns[name], row) for name in ("streamId", "correlationId")}


def _latest_before(records: dict[str, Integers], event: Integers, correlation: Integers) -> Integers:
    order = np.lexsort((records["correlationId"], records["eventId"]))
    ids, when = records["eventId"][order], records["correlationId"][order]
    # Both keys in one: the place of each event among the distinct ones, then the correlation's place within it.
    begins, ends = np.searchsorted(ids, event), np.searchsorted(ids, event, side="right")
    rank = np.searchsorted(np.unique(np.concatenate((when, correlation))), when)
    wanted = np.searchsorted(np.unique(np.concatenate((when, correlation))), correlation)
    size = np.int64(len(when) + len(correlation) + 1)
    group = np.concatenate(([0], np.cumsum(np.diff(ids) != 0))) if len(ids) else np.empty(0, np.int64)
    keys = group * size + rank
    has = ends > begins
    of_event = group[np.minimum(begins, len(group) - 1)]
    place = np.searchsorted(keys, of_event * size + wanted) - 1
    return np.where(has & (place >= begins), order[np.maximum(place, 0)], -1)
