"""Evaluates questions: workers load each capture once and answer what concerns it alone, a database of all ranks the rest.

This process holds answers, never a rank's tables.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.analysis.kept_answers import KeptAnswers
from bridge_profiling.analysis.one_rank import RankResult, RankTask, answer_rank, answers_of, as_answer
from bridge_profiling.analysis.questions import Asked, Derived, Given, Input, Question, SideTables, needed_of_captures
from bridge_profiling.analysis.registry import WITH_EVERY_PASS
from bridge_profiling.analysis.workers import Engine, ProcessEngine, here
from bridge_profiling.errors import TraceError
from bridge_profiling.facts.numbering import in_sql, offsets, renumbered
from bridge_profiling.facts.types import Answer
from bridge_profiling.layout import name_ranks
from bridge_profiling.manifest import RankCapture, find_captures
from bridge_profiling.regular_files import modified_ns, size_bytes
from bridge_profiling.traces import cache
from bridge_profiling.traces.discover import Capture, differences, find_run
from bridge_profiling.traces.run_files import RunFiles
from bridge_profiling.traces.seal import is_whole
from bridge_profiling.traces.tables import SCHEMAS
from bridge_profiling.traces.types import Caveat, RankInfo, RankTables

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")

#: Called with the number of captures that are done, and their total number.
OnProgress = Callable[[int, int], None]


#: Address space that DuckDB's threads reserve, more or less.
_DATABASE_BYTES = 1 << 28

#: Up to so many captures, or their tables, of so many bytes together are read in this process: starting a worker takes as long
#: as reading 2 MB.
_FEW_TASKS, _SMALL_BYTES = 4, 5_000_000


class Session:
    """A run's captures and the answers so far.

    Args:
        path: a directory of captures, a capture, or a directory of Parquet tables.
        engine: maps `answer_rank` over the captures.
        parquet: where their tables go; None for the default places of `traces.cache`.
        on_progress: called as captures are done.

    Raises:
        TraceError: the path does not exist or holds no capture.
    """

    def __init__(
        self, path: Path, engine: Engine, parquet: Path | None, on_progress: OnProgress | None, cycle: int | None = None
    ) -> None:
        self.sources, self._caveats_of_search, self._manifests, self._errors_of_search = _find(path, cycle)
        self._engine, self._parquet = engine, parquet
        self._on_progress = on_progress or (lambda done, total: None)
        self._scratch = tempfile.TemporaryDirectory(prefix="bridge_profiling-", ignore_cleanup_errors=True)
        #: How often everything was read: a second time, without the cache, if that changed meanwhile.
        self._readings = 0
        self._connections: dict[tuple[str, ...], duckdb.DuckDBPyConnection] = {}
        self._begin()

    def _begin(self) -> None:
        """Forget what was read and answered."""
        self._readings += 1
        self._found_caveats, self._errors = list(self._caveats_of_search), list(self._errors_of_search)
        self._loaded: list[RankResult] | None = None
        #: The folders of the cache that are in use, each with the time of its last change.
        self._in_use: dict[Path, int | None] = {}
        self._answers: dict[Asked, Answer] = {}
        self._kept: KeptAnswers | None = None
        self._side_tables: dict[SideTables, tuple[Caveat, ...]] = {}
        self._derived: dict[Derived, Any] = {}
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        for name in ("_cached", "_offsets", "main_source"):
            vars(self).pop(name, None)

    def close(self) -> None:
        """End the workers, keep the answers, close the database and delete scratch files."""
        if isinstance(self._engine, ProcessEngine):
            self._engine.close()
        cache.remove_unfinished(self._captures, self._parquet, Path(self._scratch.name).name)
        if self._kept is not None:
            self._kept.add(self._answers)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._scratch.cleanup()

    def undisturbed(self, use: Callable[[], T]) -> T:
        """What a function returns that reads tables; a cache that is removed meanwhile does not change it.

        Everything is then read again, without the cache, and the function called again.

        Raises:
            TraceError: there are only the tables that have changed.
        """
        while True:
            reading = self._readings
            try:
                found = use()
            except Exception as error:
                if reading == self._readings:
                    # Without captures, nothing can be read again: what has not changed has another error.
                    can_help = self._has_changed() or (_is_unreadable(error) and self._captures)
                    if self._readings > 1 or not can_help:
                        raise
                    self._read_again()
            else:
                if reading == self._readings:
                    if not self._has_changed():
                        return found
                    self._read_again()

    def _was_seen(self, entry: Path) -> bool:
        return self._in_use.get(entry) is not None or entry.is_dir()

    def _has_changed(self) -> bool:
        return any(_changed_ns(entry) != changed for entry, changed in self._in_use.items())

    def _read_again(self) -> None:
        for source in self.sources:
            if isinstance(source, Path):
                raise TraceError(f"{source} changed while it was read. Type the command again, with tables that are complete")
        self._begin()

    # Captures.

    @property
    def results(self) -> list[RankResult]:
        """Each capture that could be read, by rank."""
        return self._load([])

    @property
    def traces(self) -> list[RankResult]:
        """The results that are traces; the others are memory snapshots."""
        return [result for result in self.results if result.info.source != "memory"]

    @property
    def errors(self) -> list[str]:
        """A sentence for each capture that could not be read completely."""
        self._load([])
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
            text = f"there are Kineto and nsys captures: answers across ranks are from the {self.main_source} ones"
            found.append(Caveat("several_profilers", text))
        # Those in use may have been removed since; answers are then of tables that were read again.
        unseen = sum(1 for result in results if result.entry is None or not self._was_seen(result.entry))
        if unseen:
            text = (
                f"the tables of {unseen} captures are not accessible from this machine: answers across ranks leave them out. "
                "Name a directory that all machines share with --parquet"
            )
            found.append(Caveat("tables_not_accessible", text))
        for result in results:
            found += [replace(caveat, ranks=caveat.ranks or (result.info.rank,)) for caveat in result.info.caveats]
        return found

    # Answers.

    def prefetch(self, asked: Iterable[Asked]) -> None:
        """Compute what some questions need of single captures, in one pass over these."""
        questions = list(asked)
        self.undisturbed(lambda: self._prefetch(questions))

    def _prefetch(self, asked: Iterable[Asked]) -> None:
        wanted = needed_of_captures(asked)
        if not wanted:
            return
        wanted = list(dict.fromkeys([*(question.with_options() for question in WITH_EVERY_PASS), *wanted]))
        self._load(wanted)
        missing = [each for each in wanted if not self._is_answered(each)]
        if missing:
            tasks = [RankTask(result.entry, _names(missing)) for result in self.traces if result.entry is not None]
            self._keep(missing, self._work(tasks))

    def answer(self, asked: Asked) -> Answer:
        """The answer to a question; its caveats include those of the questions and side tables that it depends on."""
        return self._answers[asked] if asked in self._answers else self.undisturbed(lambda: self._answer(asked))

    def _answer(self, asked: Asked) -> Answer:
        if not self._is_answered(asked):
            self._prefetch([asked])
        if asked not in self._answers:
            of_each_source = asked.question.scope == "source"
            self._answers[asked] = self._of_each_source(asked) if of_each_source else self._evaluate(asked)
        return self._answers[asked]

    def answer_of_rank(self, asked: Asked, info: RankInfo) -> Answer:
        """The answer about one capture, by a question of scope `rank`. The other captures are not asked."""
        return self.undisturbed(lambda: self._answer_of_rank(asked, info))

    def _answer_of_rank(self, asked: Asked, info: RankInfo) -> Answer:
        if self._is_answered(asked):
            table, caveats = self._answers[asked].table, self._answers[asked].caveats
            mine = pc.and_(pc.equal(table["rank"], info.rank), pc.equal(table["source"], info.source))
            return Answer(table.filter(mine), tuple(each for each in caveats if info.rank in each.ranks))
        this = (info.rank, info.source)
        entry = next((result.entry for result in self.traces if (result.info.rank, result.info.source) == this), None)
        readable = entry if entry is not None and entry.is_dir() else None
        # A capture's rank can turn out to be another one when it is read; a file of several processes has several captures.
        captures = [each for each in self._captures if str(each.path.absolute()) in info.files]
        source = readable or next((each for each in captures if each.rank == info.rank), next(iter(captures), None))
        tasks = [] if source is None else [RankTask(source, _names([asked]), self._parquet, Path(self._scratch.name))]
        return self._all_of(0, asked, self._work(tasks))

    def _is_answered(self, asked: Asked) -> bool:
        """Whether the answer is known, now or from an earlier run of a command."""
        if asked not in self._answers and self._cached and (kept := self._kept and self._kept.get(asked)):
            self._answers[asked] = kept
        return asked in self._answers

    def _evaluate(self, asked: Asked, sources: tuple[str, ...] | None = None) -> Answer:
        values, caveats = self._inputs(asked.question.inputs, sources)
        own = as_answer(asked.question.function(*values, **dict(asked.options)))
        return replace(own, caveats=(*caveats, *own.caveats))

    def _inputs(self, inputs: Sequence[Input], sources: tuple[str, ...] | None = None) -> tuple[list[Any], list[Caveat]]:
        """Values of the inputs, and their caveats; `sources` are those of the database's tables, by default the main ones."""
        values: list[Any] = []
        caveats: list[Caveat] = []
        for item in inputs:
            if isinstance(item, SideTables):
                caveats += self._made(item)
            elif isinstance(item, Question):
                answer = self._answer(item.with_options())
                values.append(answer.table)
                caveats += answer.caveats
            elif isinstance(item, Derived):
                if item not in self._derived:
                    self._derived[item] = item.function(*self._inputs(item.inputs, sources)[0])
                values.append(self._derived[item])
            elif item is Given.DATABASE:
                # Traces and memory snapshots have no table in common.
                values.append(self._connected(*(sources or (self.main_source, "memory"))))
            elif isinstance(item, Given):
                values.append([result.info for result in self.traces if result.info.source == self.main_source])
            else:
                raise TypeError(f"{item} is an input of questions about one capture")
        return values, caveats

    def _made(self, tables: SideTables) -> tuple[Caveat, ...]:
        if tables not in self._side_tables:
            values, caveats = self._inputs(tables.inputs)
            self._side_tables[tables] = (*caveats, *tables.function(*values))
        return self._side_tables[tables]

    def _of_each_source(self, asked: Asked) -> Answer:
        tables = []
        for source in sorted({result.info.source for result in self.traces}) or ["kineto"]:
            sources = (source, "memory") if source == self.main_source else (source,)
            table = self._evaluate(asked, sources).table
            column = pa.repeat(pa.scalar(source), table.num_rows)
            tables.append(table.add_column(1 if "rank" in table.column_names else 0, "source", column))
        return Answer(pa.concat_tables(tables))

    # The database.

    def _connected(self, *sources: str) -> duckdb.DuckDBPyConnection:
        if sources not in self._connections:
            entries = [result.entry for result in self.results if result.info.source in sources]
            folders = [entry for entry in entries if entry is not None and entry.is_dir()]
            numbers = next((self._offsets[source] for source in sources if self._offsets.get(source)), {})
            self._connections[sources] = connect(folders, numbers)
        return self._connections[sources]

    # Reading captures.

    @cached_property
    def _cached(self) -> bool:
        """Whether the tables of every capture are in the cache; they are then opened here, without any worker."""
        found: list[RankResult] = []
        if self._readings > 1:
            return False
        for capture in self._captures:
            try:
                tables = cache.find(capture, directory=self._parquet)
            except (OSError, TraceError):
                tables = None
            if tables is None:
                return False
            found.append(RankResult(tables.info, tables.entry))
        if found:
            self._open(found)
        return bool(found)

    def _load(self, asked: Sequence[Asked]) -> list[RankResult]:
        """Read each capture, unless that is done, and answer questions about each trace on the way. Tables are only opened."""
        if self._loaded is not None or self._cached:
            return self._loaded or []
        # The largest first, so that no worker is left with it at the end.
        captures = sorted(self._captures, key=lambda capture: size_bytes(capture.path), reverse=True)
        scratch, cached = Path(self._scratch.name), self._readings == 1
        tasks = [RankTask(capture, _names(asked), self._parquet, scratch, cached) for capture in captures]
        loaded = self._open([*self._opened(), *self._work(tasks)])
        if captures:
            self._keep(asked, self.traces)
        return loaded

    @property
    def _captures(self) -> list[Capture]:
        return [source for source in self.sources if isinstance(source, Capture)]

    def _open(self, read: Sequence[RankResult]) -> list[RankResult]:
        self._errors += [result.info.error for result in read if result.info.error is not None]
        unkept = {result.info.rank: result.unkept for result in read if result.unkept is not None}
        if self._parquet is not None and unkept:
            ranks, reason = name_ranks(sorted(unkept)), next(iter(unkept.values()))
            self._errors.append(f"{self._parquet} lacks the tables of {ranks}, which cannot be written: {reason}")
        self._loaded = self._one_of_each(read)
        captures, scratch = self._captures, Path(self._scratch.name)
        entries = [result.entry for result in self._loaded if result.entry is not None and result.entry.parent != scratch]
        self._in_use = {entry: _changed_ns(entry) for entry in entries}
        # On other machines, tables may be out of reach.
        if isinstance(self._engine, ProcessEngine) and not all(map(is_whole, entries)):
            self._read_again()
            return self._load([])
        # Otherwise one has an error, or cannot be cached.
        if captures and len(entries) == len(captures):
            with contextlib.suppress(OSError):
                self._kept = KeptAnswers(captures, entries)
        return self._loaded

    def _one_of_each(self, read: Sequence[RankResult]) -> list[RankResult]:
        """One result of each rank and profiler, whole captures first: a copied file says that it is of another one's rank."""
        kept: dict[tuple[int, str], RankResult] = {}
        for result in sorted(read, key=lambda result: (result.info.rank, result.info.source, result.info.error is not None)):
            first = kept.setdefault((result.info.rank, result.info.source), result)
            if first is not result:
                path, other = result.info.files[0], first.info.files[0]
                same = ", with the same content" if first.info.content and first.info.content == result.info.content else ""
                text = f"{path} is left out: {other} is a capture of the same rank, {result.info.rank}{same}"
                self._found_caveats.append(Caveat("several_captures_of_a_rank", text, file=path))
        return _one_of_each_content(list(kept.values()))

    def _opened(self) -> Iterator[RankResult]:
        for source in self.sources:
            if isinstance(source, Path):
                tables = cache.open_directory(source)
                if tables is None:
                    self._errors.append(f"{source} holds no tables that this version can read")
                else:
                    yield RankResult(tables.info, source)

    def _work(self, tasks: Sequence[RankTask]) -> list[RankResult]:
        """Results by rank. Tasks without a result leave an error."""
        done = []
        self._on_progress(0, len(tasks))
        few = isinstance(self._engine, ProcessEngine) and len(tasks) <= _FEW_TASKS
        small = few and sum(task.packed_bytes for task in tasks) <= _SMALL_BYTES
        outcomes = here(answer_rank, tasks) if small else self._engine.map(answer_rank, tasks)
        for count, outcome in enumerate(outcomes, 1):
            source = tasks[outcome.task].source
            if isinstance(outcome.answer, RankResult):
                done.append(outcome.answer)
            elif isinstance(source, Path) and source in self._in_use and (outcome.answer or not is_whole(source)):
                raise OSError(f"{source} can no longer be read: {outcome.answer or outcome.error}")
            else:
                rank, path, lacking = self._concerning(source)
                self._errors.append(outcome.answer or f"{path} cannot be read: {outcome.error}")
                text = f"{lacking} about them: {path} cannot be read"
                self._found_caveats.append(Caveat("rank_unreadable", text, (rank,), path))
            self._on_progress(count, len(tasks))
        return sorted(done, key=_rank_and_source)

    def _concerning(self, source: Capture | Path) -> tuple[int, str, str]:
        """The rank and the capture of a task without a result, and what is missing: all answers, or some."""
        if isinstance(source, Capture):
            return source.rank, str(source.path), "no answer is"
        info = next(result.info for result in self._loaded or () if result.entry == source)
        return info.rank, info.files[0], "some answers are not"

    def _keep(self, asked: Sequence[Asked], results: Sequence[RankResult]) -> None:
        for place, each in enumerate(asked):
            self._answers[each] = self._all_of(place, each, results)

    @cached_property
    def _offsets(self) -> dict[str, dict[int, int]]:
        """By profiler, what each rank's numbers of inferred iterations lack to be those of the others."""
        readable = [(each.info, each.entry) for each in self._loaded or () if each.entry is not None and each.entry.is_dir()]
        sources = {info.source for info, _ in readable} - {"memory"}
        return {source: offsets([each for each in readable if each[0].source == source]) for source in sorted(sources)}

    def _all_of(self, place: int, asked: Asked, results: Sequence[RankResult]) -> Answer:
        """The answers of the results at a place as one."""
        if not results:  # the columns are those of a capture without events
            (empty,) = answers_of(RankTables(_NO_CAPTURE, {}), _names([asked]))
            return Answer(_together([_NO_CAPTURE], [empty.table]).slice(0, 0))
        answers = [result.answers[place] for result in results]
        if self._loaded is not None:
            numbers = [self._offsets.get(result.info.source, {}).get(result.info.rank, 0) for result in results]
            answers = [
                replace(answer, table=renumbered(answer.table, offset)) for answer, offset in zip(answers, numbers, strict=True)
            ]
        table = _together([result.info for result in results], [answer.table for answer in answers])
        caveats = (
            replace(caveat, ranks=(result.info.rank,))
            for result, answer in zip(results, answers, strict=True)
            for caveat in answer.caveats
        )
        return Answer(table, tuple(caveats))


def connect(
    entries: Sequence[Path], numbers: Mapping[int, int] | None = None, *, memory_limit: str = "1GB"
) -> duckdb.DuckDBPyConnection:
    """A database in memory with one view for each table of `traces.tables.SCHEMAS`, over the rows of all ranks.

    Nothing is copied: a query reads the columns it names, a row group at a time, so memory does not grow with the ranks.

    Args:
        entries: folders of the ranks' Parquet, whose order the rows keep.
        numbers: what to add to each rank's numbers of iterations (`numbering`).
        memory_limit: size at which queries spill to the machine's temporary directory.
    """
    import duckdb  # workers never need it, and it takes 0.09 s to import

    # DuckDB ends in a segmentation fault where its threads find no memory: this raises an error.
    mmap.mmap(-1, _DATABASE_BYTES).close()
    spill = Path(tempfile.gettempdir(), f"bridge_profiling-{uuid.uuid4().hex}")  # created when needed, removed on close
    connection = duckdb.connect(config={"memory_limit": memory_limit, "temp_directory": str(spill)})
    # Its progress bar would be written into a notebook, or over ours. Off is refused where a notebook cannot show it anyway.
    if connection.sql("select current_setting('enable_progress_bar')").fetchall()[0][0]:
        connection.execute("set enable_progress_bar = false")
    # Each folder is listed once: to look for each table of a thousand ranks takes a second.
    listed = [(str(entry), frozenset(os.listdir(entry))) for entry in entries]
    for name, schema in SCHEMAS.items():
        files = [os.path.join(entry, f"{name}.parquet") for entry, names in listed if f"{name}.parquet" in names]
        if files:
            rows = connection.read_parquet(files)
            (rows.project(in_sql(numbers)) if numbers and "iteration" in schema.names else rows).create_view(name)
        else:
            # Parquet has no dictionary type, and to DuckDB it would be another one.
            plain = [(each.name, getattr(each.type, "value_type", each.type)) for each in schema]
            connection.from_arrow(pa.schema(plain).empty_table()).create(name)
    return connection


def _changed_ns(entry: Path) -> int | None:
    """When a file of a folder was last made or removed; None if the folder is gone."""
    try:
        return os.stat(entry).st_mtime_ns
    except OSError:
        return None


def _is_unreadable(error: Exception) -> bool:
    """Whether an error can be that of a file of the cache that is gone, cut off or forbidden."""
    if isinstance(error, (OSError, pa.ArrowException)):
        return True
    import duckdb

    return isinstance(error, duckdb.Error) and not isinstance(error, duckdb.OutOfMemoryException)


#: Stands for the capture of a run without any.
_NO_CAPTURE = RankInfo(0, "order", "kineto", [])


def _names(asked: Iterable[Asked]) -> tuple[tuple[str, dict[str, Any]], ...]:
    return tuple((each.question.name, dict(each.options)) for each in asked)


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
        text = f"{path} holds manifests and no capture: the durations of iterations are all that is known"
        text += next((f"; rank {one.rank}: {one.manifest.reason}" for one in manifests if one.manifest.reason), "")
        return [], [Caveat("manifests_alone", text), *differences(manifests, [])], manifests, listed.errors
    # A trace's after a memory snapshot's: they can be of different windows, and iterations are the trace's.
    ordered = sorted(found.captures, key=lambda each: each.source != "memory")
    manifests = [each.manifest for each in ordered if each.manifest is not None]
    return list(found.captures), found.caveats, manifests, list(found.errors)


def _rank_and_source(result: RankResult) -> tuple[int, str]:
    return result.info.rank, result.info.source


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
            text = f"they have the same content, which can be of one rank only, and counts as rank {first.info.rank}: {names}"
            ranks = tuple(result.info.rank for result in results)
            copies = Caveat("same_content", text, ranks, first.info.files[0])
            first = replace(first, info=replace(first.info, caveats=[*first.info.caveats, copies]))
        kept.append(first)
    return sorted(kept, key=_rank_and_source)
