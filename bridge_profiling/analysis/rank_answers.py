"""What a worker does with one capture: load its tables through the cache, and answer questions about that rank alone.

Only answers leave a worker, never tables. Knows nothing of other ranks, nor of where it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.analysis import host_evidence
from bridge_profiling.analysis.absence_table import absence_table
from bridge_profiling.analysis.absences import absences
from bridge_profiling.analysis.breakdown import DeviceWork, breakdown, device_work
from bridge_profiling.analysis.copies import copies
from bridge_profiling.analysis.intervals import Nanoseconds
from bridge_profiling.analysis.iterations import Windows, iterations, windows
from bridge_profiling.analysis.launches import HOST_COLUMNS, ComputeAbsent, compute_absent, launches, recorded_waits
from bridge_profiling.analysis.operators import operator_columns, operators
from bridge_profiling.analysis.pace import pace
from bridge_profiling.analysis.units import COLUMNS as unit_columns
from bridge_profiling.analysis.units import units
from bridge_profiling.errors import TraceError
from bridge_profiling.traces import cache
from bridge_profiling.traces.load import load
from bridge_profiling.traces.run_dir import Capture
from bridge_profiling.traces.tables import DEVICE_EVENTS
from bridge_profiling.traces.types import RankInfo, RankTables

#: Of device events, what the questions need: names are for kernel statistics, and those are a query's.
_DEVICE_COLUMNS = [name for name in DEVICE_EVENTS.names if name not in ("rank", "backend", "name", "collective", "graph")]

#: A question's name and its options.
Questions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class RankTask:
    """A capture, or what the cache holds of one, and what is asked about it.

    Args:
        source: the capture; or the folder of a cache entry.
        questions: methods of `RankAnswers` to call.
        cache_directory: where its Parquet lies; None for the default places.
        scratch: where its Parquet goes when the cache cannot be written.
    """

    source: Capture | Path
    questions: Questions
    cache_directory: Path | None = None
    scratch: Path | None = None

    @property
    def path(self) -> Path:
        """What is read."""
        return self.source if isinstance(self.source, Path) else self.source.path


@dataclass(frozen=True)
class RankResult:
    """What is known of a rank.

    Args:
        info: about its capture.
        entry: folder of its Parquet; None when it could be written nowhere.
        answers: a table for each question.
    """

    info: RankInfo
    entry: Path | None
    answers: dict[str, pa.Table]


def answer(task: RankTask) -> RankResult | str:
    """What is asked about one rank; or why its capture cannot be read, naming the file.

    Args:
        task: what to do. It is worked on in a process of its own, or on another machine.
    """
    try:
        tables, entry = _load(task)
    except TraceError as error:
        return str(error)
    except OSError as error:
        return f"{task.path} cannot be read: {error.strerror or error}"
    except Exception as error:  # a reader's own mistake must name the file too
        return f"{task.path} cannot be read: {type(error).__name__}: {error}"
    asked = RankAnswers(tables)
    answers = {name: getattr(asked, name)(**options) for name, options in task.questions.items()}
    return RankResult(tables.info, entry, answers)


class RankAnswers:
    """The questions that one rank's tables answer. What several need is computed once.

    Args:
        tables: of one rank.
    """

    def __init__(self, tables: RankTables) -> None:
        self._tables = tables

    def breakdown(self) -> pa.Table:
        """Device time over the whole capture: `analysis.breakdown`."""
        return breakdown(self._work)

    def iterations(self) -> pa.Table:
        """Device time in each iteration: `analysis.iterations`."""
        return iterations(self._windows, self._work, self._absent)

    def idle_gaps(self) -> pa.Table:
        """Why the device did not compute, in each iteration; over the span where none is marked: `analysis.launches`."""
        return launches(self._absent, *self._iterations_or_span)

    def idle_causes(self, **options: Any) -> pa.Table:
        """The same time by what it is owed to, with what shows it: `analysis.absences`.

        Args:
            options: of `host_evidence`.
        """
        host_events = self._tables.columns("host_events", host_evidence.COLUMNS)
        host = host_evidence.host_evidence(host_events, self._device_events, **options)
        found = absences(self._absent, self._device_events, host_events, host)
        return absence_table(found, host, *self._iterations_or_span)

    def launch_statistics(self) -> pa.Table:
        """How many kernels each iteration has, how long they take, and what launching them costs: `analysis.pace`."""
        return pace(self._device_events, *self._iterations_or_span)

    def copies(self) -> pa.Table:
        """Copies by direction and memory: `analysis.copies`."""
        return copies(self._device_events)

    def operators(self, **options: Any) -> pa.Table:
        """Host ranges by name: `analysis.operators`."""
        host_events = self._tables.columns("host_events", operator_columns(**options))
        return operators(host_events, self._device_events, **options)

    def units(self) -> pa.Table:
        """Communication by the unit of a sharded model that it is for: `analysis.units`."""
        return units(self._tables.columns("host_events", unit_columns), self._device_events)

    def limitations(self) -> pa.Table:
        """What this capture cannot tell, the reader's sentences among them: column `limitation`."""
        found = [caveat.text for caveat in self._tables.info.caveats]
        devices = pc.count_distinct(self._device_events["device"]).as_py()
        if devices > 1:
            found.append(f"work on {devices} devices is counted as one device's: when any of them is busy, it is")
        streams = pc.count_distinct(self._device_events["stream"]).as_py()
        if streams > 1 and not recorded_waits(self._tables["synchronizations"]).num_rows:
            found.append(
                "which stream waits for which is not recorded: what a kernel waited for on another stream is told from times "
                "and calls, and counts as dependency-stalled where that is unclear"
            )
        return pa.table({"limitation": pa.array(found, pa.string())})

    @cached_property
    def _device_events(self) -> pa.Table:
        return self._tables.columns("device_events", _DEVICE_COLUMNS)

    @cached_property
    def _work(self) -> DeviceWork:
        return device_work(self._device_events)

    @cached_property
    def _windows(self) -> Windows:
        return windows(self._tables.iterations, self._device_events)

    @property
    def _iterations_or_span(self) -> tuple[NDArray[np.int32] | pa.Array, Nanoseconds, Nanoseconds]:
        """Numbers, begins and ends of the iterations' windows; the span, without a number, where none is marked."""
        windows = self._windows
        if len(windows.iteration):
            return windows.iteration, windows.start_ns, windows.end_ns
        span = self._work.span
        return pa.nulls(len(span), pa.int32()), span.start_ns, span.end_ns

    @cached_property
    def _absent(self) -> ComputeAbsent:
        span, windows = self._work.span, self._windows
        starts = np.concatenate((span.start_ns, windows.start_ns))
        ends = np.concatenate((span.end_ns, windows.end_ns))
        if not len(starts):
            starts = ends = np.zeros(1, np.int64)
        tables = {
            "device_events": self._device_events,
            "host_events": self._tables.columns("host_events", HOST_COLUMNS),
            "synchronizations": self._tables["synchronizations"],
        }
        return compute_absent(RankTables(self._tables.info, tables), self._work, int(starts.min()), int(ends.max()))


def _load(task: RankTask) -> tuple[RankTables, Path | None]:
    if isinstance(task.source, Path):
        kept = cache.open_entry(task.source)
        if kept is None:
            raise TraceError(f"{task.source} holds no tables of a capture")
        return kept, kept.entry
    tables = load(task.source, cache_directory=task.cache_directory)
    return tables, tables.entry or _write_to_scratch(task, tables)


def _write_to_scratch(task: RankTask, tables: RankTables) -> Path | None:
    """Where nothing can be cached, cross-rank questions still need Parquet."""
    if task.scratch is None:
        return None
    entry = task.scratch / f"{tables.info.source}{tables.info.rank}-scratch"
    try:
        cache.write(tables, entry)
    except OSError:
        return None
    return entry
