"""A run's captures: finds them, has workers read each and compute its facts, and connects a database of all ranks.

This process holds facts, never a rank's tables.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from bridge_profiling.bench import results as benchmarks
from bridge_profiling.common.errors import ProfilingConfigError, TraceError
from bridge_profiling.common.regular_files import modified_ns, size_bytes
from bridge_profiling.facts.clocks import offsets, renumbered
from bridge_profiling.facts.engines import Engine, ProcessEngine, here
from bridge_profiling.facts.rank import Compute, RankResult, RankTask, kept_facts, rank_facts, read_rank
from bridge_profiling.facts.store import DEFAULT_OPTIONS, FactOptions, KeptFacts, Packed
from bridge_profiling.facts.types import Answer, Connection, caveat, connect
from bridge_profiling.layout import name_ranks
from bridge_profiling.manifest import RankCapture, find_captures
from bridge_profiling.traces import cache
from bridge_profiling.traces.cache import is_whole
from bridge_profiling.traces.discover import Capture, differences, find_run
from bridge_profiling.traces.files import RunFiles
from bridge_profiling.traces.types import Caveat, RankInfo, RankTables

T = TypeVar("T")

#: Called with the number of captures that are done, and their total number.
OnProgress = Callable[[int, int], None]

#: Up to so many captures, or their tables, of so many bytes together are read in this process: starting a worker takes as long
#: as reading 2 MB.
_FEW_TASKS, _SMALL_BYTES = 4, 5_000_000


class Captures:
    """A run's captures, and the facts about them so far.

    Args:
        path: a directory of captures, a capture, or a directory of Parquet tables.
        engine: maps `read_rank` over the captures.
        parquet: where their tables go; None for the default places of `traces.cache`.
        on_progress: called as captures are done.
        cycle: of a profiler's schedule that repeats, from 1 for the oldest; None for the newest.
        bench: results of benchmarks to compare with; None takes those next to the captures.
        options: what changes the facts besides the captures.

    Raises:
        TraceError: the path does not exist or holds no capture.
        ProfilingConfigError: `bench` cannot be read.
    """

    def __init__(
        self,
        path: Path,
        engine: Engine,
        parquet: Path | None = None,
        on_progress: OnProgress | None = None,
        cycle: int | None = None,
        bench: Path | None = None,
        options: FactOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.path, self.options = path, options
        #: Results of benchmarks, and whether they were found instead of named.
        self.bench, unreadable = _results(path, bench)
        self.bench_found = bench is None
        self.sources, found, self._manifests, self._errors = _find(path, cycle)
        self._found_caveats = [*unreadable, *found]
        self._engine, self._parquet = engine, parquet
        self._on_progress = on_progress or (lambda done, total: None)
        self._scratch = tempfile.TemporaryDirectory(prefix="bridge_profiling-", ignore_cleanup_errors=True)
        self._loaded: list[RankResult] | None = None
        #: The folders of tables that are in use, each with the time of its last change.
        self._in_use: dict[Path, int | None] = {}
        #: Facts about the run by name; and what else is computed once, by name.
        self._facts: dict[str, Answer] | None = None
        self._once: dict[str, Any] = {}
        self._kept: KeptFacts | None = None
        self._connection: Connection | None = None

    def close(self) -> None:
        """End the workers, keep the facts, close the database and delete scratch files."""
        if isinstance(self._engine, ProcessEngine):
            self._engine.close()
        captures = [source for source in self.sources if isinstance(source, Capture)]
        cache.remove_unfinished(captures, self._parquet, Path(self._scratch.name).name)
        if self._kept is not None:
            self._kept.keep(self._facts or {})
        if self._connection is not None:
            self._connection.close()
        self._scratch.cleanup()

    # Captures.

    @property
    def results(self) -> list[RankResult]:
        """Each capture that could be read, by rank."""
        if self._loaded is None and not self._is_cached:
            self.facts()
        return self._loaded or []

    @property
    def traces(self) -> list[RankResult]:
        """The results that are traces; the others are memory snapshots."""
        return [result for result in self.results if result.info.source != "memory"]

    @property
    def errors(self) -> list[str]:
        """A sentence for each capture that could not be read completely."""
        _ = self.results
        return list(self._errors)

    @property
    def manifests(self) -> list[RankCapture]:
        """One manifest of each rank, by rank, without those that contradict their captures."""
        caveats = [caveat for result in self.results for caveat in result.info.caveats]
        unused = {caveat.file for caveat in caveats if caveat.code == "manifest_contradicts"}
        found = {manifest.rank: manifest for manifest in self._manifests if str(manifest.path) not in unused}
        return [found[rank] for rank in sorted(found)]

    @cached_property
    def main_source(self) -> str:
        """The profiler that captured the most ranks: two captures of one rank are not two ranks."""
        sources = [result.info.source for result in self.traces]
        return "nsys" if sources.count("nsys") > sources.count("kineto") else "kineto"

    @property
    def caveats(self) -> list[Caveat]:
        """What was found out while captures were found and read."""
        results = self.results  # before what is found when they are read
        found = [*self._found_caveats]
        if len({result.info.source for result in self.traces}) > 1:
            found.append(caveat("several_profilers", source=self.main_source))
        # Those in use may have been removed since.
        entries = [result.entry for result in results if result.entry is not None]
        unseen = sum(1 for entry in entries if self._in_use.get(entry) is None and not entry.is_dir())
        if unseen:
            found.append(caveat("tables_not_accessible", unseen=unseen))
        for result in results:
            found += [replace(caveat, ranks=caveat.ranks or (result.info.rank,)) for caveat in result.info.caveats]
        return found

    # Facts.

    def known(self) -> dict[str, Answer]:
        """The facts about the run so far, those kept by an earlier command included; others can be added."""
        if self._facts is None:
            self._facts = dict(self._kept.found) if self._is_cached and self._kept is not None else {}
        return self._facts

    def facts(self) -> Mapping[str, Answer]:
        """The same, with the facts about each rank."""
        if "breakdown" not in self.known():
            found = self.of_ranks(partial(rank_facts, options=self.options), keep=self.options == DEFAULT_OPTIONS)
            self.known().update(found)
        return self.known()

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What a function returns, which is called once."""
        if name not in self._once:
            self._once[name] = make()
        return self._once[name]

    def of_source(self, source: str, compute: Compute, rank: int | None = None) -> dict[str, Answer]:
        """What is computed from each capture of a profiler, or from that of one rank alone. Other captures are not read."""
        mine = [each for each in self.results if each.info.source == source and rank in (None, each.info.rank)]
        return self._computed(mine, compute)

    def of_ranks(self, compute: Compute, *, keep: bool = False) -> dict[str, Answer]:
        """What is computed from each trace, while it is read if it was not yet; `keep`: as of `RankTask`."""
        if self._loaded is not None or self._is_cached:
            return self._computed(self.traces, compute, keep=keep)
        self._open(self._work(self.sources, partial(_of_trace, compute=compute), keep=keep))
        found = _stacked(self.traces, compute)
        self._loaded = [replace(result, facts=b"") for result in self.results]
        return found

    @property
    def database(self) -> Connection:
        """An empty database for facts across ranks."""
        if self._connection is None:
            self._connection = connect()
        return self._connection

    # Tables.

    def undisturbed(self, use: Callable[[], T]) -> T:
        """What a function returns that reads `entries`; a cache that is removed meanwhile does not change it.

        The captures whose tables have changed are then read again, without the cache, and the function is called again.

        Raises:
            TraceError: there are only the tables that have changed.
        """
        try:
            found = use()
        except Exception:
            if not self._read_again():
                raise
        else:
            if not self._read_again():
                return found
        return use()

    def entries(self) -> list[tuple[RankInfo, Path]]:
        """Each trace of the main source, and the folder of its tables."""
        # Of some captures the facts alone were read.
        self.once("tables", lambda: self._renew([each for each in self.traces if each.entry is None], cached=True))
        mine = [result for result in self.traces if result.info.source == self.main_source]
        return [(result.info, result.entry) for result in mine if result.entry is not None]

    def _read_again(self) -> bool:
        """Read the captures again whose tables have changed; False if none have."""
        changed = [
            result
            for result in self.results
            if result.entry in self._in_use
            and (_changed_ns(result.entry) != self._in_use[result.entry] or not is_whole(result.entry))
        ]
        for result in changed:
            if isinstance(result.source, Path):
                raise _changed(result.source)
        self._renew(changed, cached=False)
        return bool(changed)

    def _renew(self, results: Sequence[RankResult], *, cached: bool) -> None:
        found = self._work([result.source for result in results], _nothing, cached=cached) if results else []
        entries = {_rank_and_source(result): result.entry for result in found}
        self._loaded = [
            replace(result, entry=entries.get(_rank_and_source(result), result.entry)) for result in self._loaded or ()
        ]
        self._use_entries()

    def _use_entries(self) -> list[Path]:
        entries = [result.entry for result in self._loaded or () if result.entry is not None]
        kept = [entry for entry in entries if entry.parent != Path(self._scratch.name)]
        self._in_use = {entry: _changed_ns(entry) for entry in kept}
        return kept

    # Reading captures.

    @cached_property
    def _is_cached(self) -> bool:
        """Whether the tables of every capture are in the cache; they are then opened here, without any worker."""
        found: list[RankResult] = []
        for source in self.sources:
            try:
                if isinstance(source, Path):
                    tables = cache.open_directory(source)
                else:
                    tables = cache.find(source, directory=self._parquet)
            except (OSError, TraceError):
                tables = None
            if tables is None:
                return False
            found.append(RankResult(tables.info, tables.entry, source=source))
        if found:
            self._open(found)
        return bool(found)

    def _open(self, read: Sequence[RankResult]) -> None:
        self._errors += [result.info.error for result in read if result.info.error is not None]
        unkept = {result.info.rank: result.unkept for result in read if result.unkept is not None}
        if self._parquet is not None and unkept:
            ranks, reason = name_ranks(sorted(unkept)), next(iter(unkept.values()))
            self._errors.append(f"{self._parquet} lacks the tables of {ranks}, which cannot be written: {reason}")
        self._loaded = self._one_of_each(read)
        entries = self._use_entries()
        captures = [source for source in self.sources if isinstance(source, Capture)]
        # Otherwise one has an error, or cannot be cached.
        if captures and len(entries) == len(captures):
            with contextlib.suppress(OSError):
                self._kept = KeptFacts(captures, entries, self.options)

    def _one_of_each(self, read: Sequence[RankResult]) -> list[RankResult]:
        """One result of each rank and profiler, whole captures first: a copied file says that it is of another one's rank."""
        kept: dict[tuple[int, str], RankResult] = {}
        for result in sorted(read, key=lambda result: (result.info.rank, result.info.source, result.info.error is not None)):
            first = kept.setdefault(_rank_and_source(result), result)
            if first is not result:
                path, other = result.info.files[0], first.info.files[0]
                same = ", with the same content" if first.info.content and first.info.content == result.info.content else ""
                code, rank = "several_captures_of_a_rank", result.info.rank
                self._found_caveats.append(caveat(code, file=path, path=path, other=other, rank=rank, same=same))
        return _one_of_each_content(list(kept.values()))

    def _computed(self, results: Sequence[RankResult], compute: Compute, *, keep: bool = False) -> dict[str, Answer]:
        """What is computed from some of the captures."""
        return _stacked(self._work([result.source for result in results], compute, keep=keep) if results else [], compute)

    def _work(
        self, sources: Sequence[Capture | Path | None], compute: Compute, *, keep: bool = False, cached: bool = True
    ) -> list[RankResult]:
        """Results by rank. Captures without a result leave an error."""
        scratch = Path(self._scratch.name)
        tasks = [RankTask(each, compute, keep, self._parquet, scratch, cached) for each in sources if each is not None]
        # The largest first, so that no worker is left with it at the end.
        tasks.sort(key=lambda task: size_bytes(task.path), reverse=True)
        known_facts = [kept_facts(task) for task in tasks]
        done = [kept for kept in known_facts if kept is not None]
        tasks = [task for task, kept in zip(tasks, known_facts, strict=True) if kept is None]
        self._on_progress(0, len(tasks))
        few = isinstance(self._engine, ProcessEngine) and len(tasks) <= _FEW_TASKS
        small = few and sum(task.packed_bytes for task in tasks) <= _SMALL_BYTES
        outcomes = here(read_rank, tasks) if small else self._engine.map(read_rank, tasks)
        for count, outcome in enumerate(outcomes, 1):
            source = tasks[outcome.task].source
            if isinstance(outcome.answer, RankResult):
                done.append(replace(outcome.answer, source=source))
            elif isinstance(source, Path) and source in self._in_use and (outcome.answer or not is_whole(source)):
                raise _changed(source)
            else:
                known = next((result.info for result in self._loaded or () if result.source == source), None)
                path = str(tasks[outcome.task].path) if known is None else known.files[0]
                self._errors.append(outcome.answer or f"{path} cannot be read: {outcome.error}")
                rank = source.rank if isinstance(source, Capture) else None if known is None else known.rank
                if rank is not None:
                    lacking = "no answer is" if known is None else "some answers are not"
                    self._found_caveats.append(caveat("rank_unreadable", (rank,), path, lacking=lacking, path=path))
            self._on_progress(count, len(tasks))
        return sorted(done, key=_rank_and_source)


def _stacked(results: Sequence[RankResult], compute: Compute) -> dict[str, Answer]:
    """What was computed from each capture as one table each; what would be, if there is none."""
    if not results:  # the columns are those of a capture without events
        empty = compute(RankTables(_NO_CAPTURE, {}))
        return {name: Answer(_together([_NO_CAPTURE], [each.table]).slice(0, 0)) for name, each in empty.items()}
    infos, facts = [result.info for result in results], [Packed(result.facts) for result in results]
    numbers = _numbers(infos, facts)
    found = {}
    for name in facts[0].header.facts:
        answers = [each[name] for each in facts]
        tables = [renumbered(answer.table, offset) for answer, offset in zip(answers, numbers, strict=True)]
        caveats = (
            replace(caveat, ranks=(info.rank,))
            for info, answer in zip(infos, answers, strict=True)
            for caveat in answer.caveats
        )
        found[name] = Answer(_together(infos, tables), tuple(caveats))
    return found


def _numbers(infos: Sequence[RankInfo], facts: Sequence[Packed]) -> list[int]:
    """What each capture's numbers of inferred iterations lack to be those of the others of its profiler."""
    if "kernel_times" not in facts[0].header.facts:
        return [0] * len(infos)
    known = {
        source: offsets(
            [(info, each["kernel_times"].table) for info, each in zip(infos, facts, strict=True) if info.source == source]
        )
        for source in {info.source for info in infos}
    }
    return [known[info.source].get(info.rank, 0) for info in infos]


def _nothing(tables: RankTables) -> Mapping[str, Answer]:
    """For captures of which only the tables are needed."""
    return {}


def _changed(tables: Path) -> TraceError:
    return TraceError(f"{tables} changed while it was read. Type the command again, with tables that are complete")


_rank_and_source = attrgetter("info.rank", "info.source")


def _of_trace(tables: RankTables, compute: Compute) -> Mapping[str, Answer]:
    """What is computed from a trace; of a memory snapshot, nothing."""
    return {} if tables.info.source == "memory" else compute(tables)


def _changed_ns(entry: Path) -> int | None:
    """When a file of a folder was last made or removed; None if the folder is gone."""
    try:
        return os.stat(entry).st_mtime_ns
    except OSError:
        return None


#: Stands for the capture of a run without any.
_NO_CAPTURE = RankInfo(0, "order", "kineto", [])


def _together(infos: Sequence[RankInfo], tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of all captures, with the capture's rank and source as the first columns."""
    # One chunk: each filter of a table with a chunk for every rank took milliseconds.
    table = pa.concat_tables(tables).combine_chunks()
    place = np.repeat(np.arange(len(tables)), [each.num_rows for each in tables])
    labels = {"source": pa.array([info.source for info in infos]), "rank": pa.array([info.rank for info in infos], pa.int32())}
    for name, values in labels.items():
        table = table.add_column(0, name, values.take(pa.array(place)))
    return table


def _find(path: Path, cycle: int | None) -> tuple[list[Capture | Path], list[Caveat], list[RankCapture], list[str]]:
    """Captures, else folders of Parquet; caveats; manifests, of the captures or alone; and errors."""
    try:
        found = find_run(path, cycle)
    except TraceError:
        entries = sorted({table.parent for table in path.glob("*/*.parquet") if (table.parent / cache.INFO).is_file()})
        if entries:
            return list(entries), [], [], []
        listed = RunFiles(path) if path.is_dir() else None
        written = max(listed.manifests, key=modified_ns, default=None) if listed else None
        manifests = [] if written is None else find_captures(written.parents[2])  # of the last attempt
        if listed is None or not manifests:
            raise
        reason = next((f"; rank {one.rank}: {one.manifest.reason}" for one in manifests if one.manifest.reason), "")
        return [], [caveat("manifests_alone", path=path, reason=reason), *differences(manifests, [])], manifests, listed.errors
    # A trace's after a memory snapshot's: they can be of different windows, and iterations are the trace's.
    ordered = sorted(found.captures, key=lambda each: each.source != "memory")
    manifests = [each.manifest for each in ordered if each.manifest is not None]
    return list(found.captures), found.caveats, manifests, list(found.errors)


def _results(path: Path, bench: Path | None) -> tuple[benchmarks.BenchDocument | None, list[Caveat]]:
    """Results to compare with, and a caveat if those next to the captures cannot be read."""
    found = bench or path / benchmarks.NAME
    try:
        return benchmarks.read(found) if bench or found.is_file() else None, []
    except ProfilingConfigError as error:
        if bench:
            raise
        return None, [caveat("bench_unreadable", file=str(found), error=error)]


def _one_of_each_content(read: Sequence[RankResult]) -> list[RankResult]:
    """One result of each content: a copy under another rank's name is not another rank. Traces that say their rank stay."""
    same: dict[tuple[str, str], list[RankResult]] = {}
    for place, result in enumerate(read):
        same.setdefault((result.info.source, result.info.content or str(place)), []).append(result)
    kept = []
    for results in same.values():
        saying = [result for result in results if result.info.rank_source == "trace"]
        first, *others = saying or results[:1]
        kept += others
        if len(results) > max(len(saying), 1):
            names = ", ".join(result.info.files[0] for result in results)
            ranks = [result.info.rank for result in results]
            copies = caveat("same_content", ranks, first.info.files[0], rank=first.info.rank, names=names)
            first = replace(first, info=replace(first.info, caveats=[*first.info.caveats, copies]))
        kept.append(first)
    return sorted(kept, key=_rank_and_source)
