"""Evaluates questions: workers load each capture once and answer what concerns it alone, a database of all ranks the rest.

This process holds answers, never a rank's tables.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.analysis.kept_answers import KeptAnswers
from bridge_profiling.analysis.questions import (
    Answer,
    Asked,
    Blocks,
    Collected,
    Columns,
    Derived,
    Given,
    Input,
    Question,
    SideTables,
    needed_of_captures,
)
from bridge_profiling.analysis.registry import QUESTIONS, WITH_EVERY_PASS
from bridge_profiling.analysis.workers import Engine, ProcessEngine, here
from bridge_profiling.errors import TraceError
from bridge_profiling.manifest import RankCapture, find_captures
from bridge_profiling.regular_files import modified_ns, size_bytes
from bridge_profiling.traces import cache
from bridge_profiling.traces.discover import Capture, find_run
from bridge_profiling.traces.run_files import RunFiles
from bridge_profiling.traces.tables import SCHEMAS, give_memory_back
from bridge_profiling.traces.types import Caveat, RankInfo, RankTables

if TYPE_CHECKING:
    import duckdb

#: Called with the number of captures that are done, and their total number.
OnProgress = Callable[[int, int], None]


#: Up to so many captures, or their tables, of so many bytes together are read in this process: starting a worker takes as long
#: as reading 2 MB.
_FEW_TASKS, _SMALL_BYTES = 4, 5_000_000

#: Of Parquet of so many bytes, a question takes some 100 MB.
_LARGE_BYTES = 50_000_000


@dataclass(frozen=True)
class RankTask:
    """A capture, or the folder of its Parquet, and the questions to answer about it."""

    source: Capture | Path  # what to read
    questions: tuple[tuple[str, dict[str, Any]], ...]  # names with options
    cache_directory: Path | None = None  # where to keep its Parquet; None for the default places
    scratch: Path | None = None  # where to write its Parquet if the cache cannot be written

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self.source if isinstance(self.source, Path) else self.source.path

    @property
    def packed_bytes(self) -> int:
        """The size of the file, or of the folder's files."""
        return sum(map(size_bytes, self.path.iterdir() if self.path.is_dir() else [self.path]))


@dataclass(frozen=True)
class RankResult:
    """What is known about one capture, the folder of its Parquet (None if it could not be written), and answers in order."""

    info: RankInfo
    entry: Path | None
    answers: tuple[Answer, ...] = ()


def answer_rank(task: RankTask) -> RankResult | str:
    """Answer questions about one capture, in a worker. Returns an error that names the file if it cannot be read."""
    try:
        tables, entry = _load(task)
    except TraceError as error:
        return str(error)
    except OSError as error:
        return f"{task.path} cannot be read: {error.strerror or error}"
    except Exception as error:  # a bug of a reader must name the file too
        return f"{task.path} cannot be read: {type(error).__name__}: {error}"
    return RankResult(tables.info, entry, _answers(tables, task.questions))


class RankQuestions:
    """Evaluates questions about one capture. Derived values and shared columns are computed once."""

    def __init__(self, tables: RankTables) -> None:
        self._tables = tables
        self._kept: dict[_Key, Any] = {}
        self._planned: dict[_Key, None] = {}
        self._is_large = tables.entry is not None and sum(map(size_bytes, tables.entry.iterdir())) >= _LARGE_BYTES

    def answers(self, questions: Sequence[tuple[str, dict[str, Any]]]) -> tuple[Answer, ...]:
        """The answers to questions, names with options, in order. One pass over a table collects for all of them."""
        needed = [
            dict.fromkeys(_keys(QUESTIONS[name].inputs, {**QUESTIONS[name].options, **given})) for name, given in questions
        ]
        self._planned = {key: None for keys in needed for key in keys if isinstance(key.item, Collected)}
        found: dict[int, Answer] = {}
        # Those with the most inputs first: much of what is kept for them is freed before the others are answered.
        order = sorted(range(len(questions)), key=lambda place: len(needed[place]), reverse=True)
        for done, place in enumerate(order, 1):
            name, options = questions[place]
            found[place] = self.answer(name, **options)
            later = {key for each in order[done:] for key in needed[each]}
            self._kept = {key: value for key, value in self._kept.items() if key in later}
            self._give_memory_back()
        return tuple(found[place] for place in range(len(questions)))

    def answer(self, name: str, **options: Any) -> Answer:
        """The answer to a question of scope `rank`."""
        question = QUESTIONS[name]
        chosen = {**question.options, **options}
        return _as_answer(question.function(*(self._value(item, chosen) for item in question.inputs), **options))

    def _value(self, item: Input, options: dict[str, Any]) -> Any:
        if isinstance(item, Blocks) or (isinstance(item, Columns) and not item.shared):
            names = [*item.names, *(name for option, name in item.optional if options[option])]
            return (
                partial(self._tables.blocks, item.table, names)
                if isinstance(item, Blocks)
                else self._columns(item.table, names)
            )
        key = _Key.of(item, options)
        if key not in self._kept:
            if isinstance(item, Columns):
                self._kept[key] = self._tables.columns(item.table, item.names)
            elif isinstance(item, Derived):
                self._kept[key] = item.function(*(self._value(each, options) for each in item.inputs))
            elif isinstance(item, Collected):
                self._collect(key, options)
            else:
                raise TypeError(f"{item} is not an input of a question about one capture")
        return self._kept[key]

    def _columns(self, table: str, names: Sequence[str]) -> pa.Table:
        """Some columns. Those that are kept anyway are not read again."""
        kept = [value for key, value in self._kept.items() if isinstance(key.item, Columns) and key.item.table == table]
        found = {name: value[name] for value in kept for name in value.column_names if name in names}
        fresh = self._tables.columns(table, [name for name in names if name not in found])
        return pa.table({name: found[name] if name in found else fresh[name] for name in names})

    def _collect(self, wanted: _Key, options: dict[str, Any]) -> None:
        """Make a collected value, and all others of its table that are planned."""
        table = wanted.item.table
        keys = [key for key in {wanted: None} | self._planned if key.item.table == table and key not in self._kept]
        collectors = {
            key: key.item.collector(*(self._value(each, options) for each in key.item.inputs), **dict(key.options))
            for key in keys
        }
        names = list(dict.fromkeys(name for key in keys for name in key.item.names))
        for block in self._tables.blocks(table, names):
            for collector in collectors.values():
                collector.add(block)
        for key in keys:
            self._kept[key] = collectors.pop(key).result()
        self._give_memory_back()

    def _give_memory_back(self) -> None:
        if self._is_large:
            give_memory_back()


@dataclass(frozen=True)
class _Key:
    """An input of a question, with the options that its value depends on."""

    item: Any
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, item: Input, options: dict[str, Any]) -> _Key:
        names = item.options if isinstance(item, Collected) else ()
        return cls(item, tuple((name, options[name]) for name in names))


def _keys(inputs: Sequence[Input], options: dict[str, Any]) -> Iterator[_Key]:
    """Inputs of a question, and theirs."""
    for item in inputs:
        yield _Key.of(item, options)
        if isinstance(item, (Collected, Derived)):
            yield from _keys(item.inputs, options)


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

    def __init__(self, path: Path, engine: Engine, parquet: Path | None, on_progress: OnProgress | None) -> None:
        self.sources, self._found_caveats, self._manifests, self._errors = _find(path)
        self._engine, self._parquet = engine, parquet
        self._on_progress = on_progress or (lambda done, total: None)
        self._scratch = tempfile.TemporaryDirectory(prefix="bridge_profiling-", ignore_cleanup_errors=True)
        self._loaded: list[RankResult] | None = None
        self._answers: dict[Asked, Answer] = {}
        self._kept: KeptAnswers | None = None
        self._side_tables: dict[SideTables, tuple[Caveat, ...]] = {}
        self._derived: dict[Derived, Any] = {}
        self._connections: dict[tuple[str, ...], duckdb.DuckDBPyConnection] = {}

    def close(self) -> None:
        """End the workers, keep the answers, close the database and delete scratch files."""
        if isinstance(self._engine, ProcessEngine):
            self._engine.close()
        if self._kept is not None:
            self._kept.add(self._answers)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._scratch.cleanup()

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
        found = [*self._found_caveats]
        results = self.results
        if len({result.info.source for result in self.traces}) > 1:
            text = f"there are Kineto and nsys captures: answers across ranks are from the {self.main_source} ones"
            found.append(Caveat("several_profilers", text))
        unseen = sum(1 for result in results if result.entry is None or not result.entry.is_dir())
        if unseen:
            text = (
                f"the tables of {unseen} captures are not accessible from this machine: answers across ranks leave them out. "
                "Name a directory that all machines share with --parquet"
            )
            found.append(Caveat("tables_not_accessible", text))
        for result in results:
            found += [replace(caveat, ranks=(result.info.rank,)) for caveat in result.info.caveats]
        return found

    # Answers.

    def prefetch(self, asked: Iterable[Asked]) -> None:
        """Compute what some questions need of single captures, in one pass over these."""
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
        if not self._is_answered(asked):
            self.prefetch([asked])
        if asked not in self._answers:
            of_each_source = asked.question.scope == "source"
            self._answers[asked] = self._of_each_source(asked) if of_each_source else self._evaluate(asked)
        return self._answers[asked]

    def answer_of_rank(self, asked: Asked, info: RankInfo) -> Answer:
        """The answer about one capture, by a question of scope `rank`. The other captures are not asked."""
        if self._is_answered(asked):
            table, caveats = self._answers[asked].table, self._answers[asked].caveats
            mine = pc.and_(pc.equal(table["rank"], info.rank), pc.equal(table["source"], info.source))
            return Answer(table.filter(mine), tuple(each for each in caveats if info.rank in each.ranks))
        entry = next((result.entry for result in self.traces if result.info is info), None)
        readable = entry if entry is not None and entry.is_dir() else None
        captures = (each for each in self._captures if (each.rank, each.source) == (info.rank, info.source))
        source = readable or next(captures, None)
        tasks = [] if source is None else [RankTask(source, _names([asked]), self._parquet, Path(self._scratch.name))]
        return self._all_of(0, asked, self._work(tasks))

    def _is_answered(self, asked: Asked) -> bool:
        """Whether the answer is known, now or from an earlier run of a command."""
        if asked not in self._answers and self._cached and (kept := self._kept and self._kept.get(asked)):
            self._answers[asked] = kept
        return asked in self._answers

    def _evaluate(self, asked: Asked, sources: tuple[str, ...] | None = None) -> Answer:
        values, caveats = self._inputs(asked.question.inputs, sources)
        own = _as_answer(asked.question.function(*values, **dict(asked.options)))
        return replace(own, caveats=(*caveats, *own.caveats))

    def _inputs(self, inputs: Sequence[Input], sources: tuple[str, ...] | None = None) -> tuple[list[Any], list[Caveat]]:
        """Values of the inputs, and their caveats; `sources` are those of the database's tables, by default the main ones."""
        values: list[Any] = []
        caveats: list[Caveat] = []
        for item in inputs:
            if isinstance(item, SideTables):
                caveats += self._made(item)
            elif isinstance(item, Question):
                answer = self.answer(item.with_options())
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
            self._connections[sources] = connect([entry for entry in entries if entry is not None and entry.is_dir()])
        return self._connections[sources]

    # Reading captures.

    @cached_property
    def _cached(self) -> bool:
        """Whether the tables of every capture are in the cache; they are then opened here, without any worker."""
        found = []
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
        tasks = [RankTask(capture, _names(asked), self._parquet, Path(self._scratch.name)) for capture in captures]
        loaded = self._open([*self._opened(), *self._work(tasks)])
        if captures:
            self._keep(asked, self.traces)
        return loaded

    @property
    def _captures(self) -> list[Capture]:
        return [source for source in self.sources if isinstance(source, Capture)]

    def _open(self, read: Sequence[RankResult]) -> list[RankResult]:
        self._errors += [result.info.error for result in read if result.info.error is not None]
        self._loaded = self._one_of_each(read)
        captures, scratch = self._captures, Path(self._scratch.name)
        entries = [result.entry for result in self._loaded if result.entry is not None and result.entry.parent != scratch]
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
                text = f"{path} is left out: {other} is a capture of the same rank, {result.info.rank}"
                self._found_caveats.append(Caveat("several_captures_of_a_rank", text, file=path))
        return list(kept.values())

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
            if isinstance(outcome.answer, RankResult):
                done.append(outcome.answer)
            else:
                self._errors.append(outcome.answer or f"{tasks[outcome.task].path} cannot be read: {outcome.error}")
            self._on_progress(count, len(tasks))
        return sorted(done, key=lambda result: (result.info.rank, result.info.source))

    def _keep(self, asked: Sequence[Asked], results: Sequence[RankResult]) -> None:
        for place, each in enumerate(asked):
            self._answers[each] = self._all_of(place, each, results)

    @staticmethod
    def _all_of(place: int, asked: Asked, results: Sequence[RankResult]) -> Answer:
        """The answers of the results at a place as one."""
        if not results:  # the columns are those of a capture without events
            (empty,) = _answers(RankTables(_NO_CAPTURE, {}), _names([asked]))
            return Answer(_together([_NO_CAPTURE], [empty.table]).slice(0, 0))
        answers = [result.answers[place] for result in results]
        table = _together([result.info for result in results], [answer.table for answer in answers])
        caveats = (
            replace(caveat, ranks=(result.info.rank,))
            for result, answer in zip(results, answers, strict=True)
            for caveat in answer.caveats
        )
        return Answer(table, tuple(caveats))


def connect(entries: Sequence[Path], *, memory_limit: str = "1GB") -> duckdb.DuckDBPyConnection:
    """A database in memory with one view for each table of `traces.tables.SCHEMAS`, over the rows of all ranks.

    Nothing is copied: a query reads the columns it names, a row group at a time, so memory does not grow with the ranks.

    Args:
        entries: folders of the ranks' Parquet, whose order the rows keep.
        memory_limit: size at which queries spill to the machine's temporary directory.
    """
    import duckdb  # workers never need it, and it takes 0.09 s to import

    spill = Path(tempfile.gettempdir(), f"bridge_profiling-{uuid.uuid4().hex}")  # created when needed, removed on close
    connection = duckdb.connect(config={"memory_limit": memory_limit, "temp_directory": str(spill)})
    # Its progress bar would be written into a notebook, or over ours.
    connection.execute("set enable_progress_bar = false")
    # Each folder is listed once: to look for each table of a thousand ranks takes a second.
    listed = [(str(entry), frozenset(os.listdir(entry))) for entry in entries]
    for name, schema in SCHEMAS.items():
        files = [os.path.join(entry, f"{name}.parquet") for entry, names in listed if f"{name}.parquet" in names]
        if files:
            connection.read_parquet(files).create_view(name)
        else:
            # Parquet has no dictionary type, and to DuckDB it would be another one.
            plain = [(each.name, getattr(each.type, "value_type", each.type)) for each in schema]
            connection.from_arrow(pa.schema(plain).empty_table()).create(name)
    return connection


#: Stands for the capture of a run without any.
_NO_CAPTURE = RankInfo(0, "order", "kineto", [])


def _as_answer(found: Answer | pa.Table) -> Answer:
    return found if isinstance(found, Answer) else Answer(found)


def _answers(tables: RankTables, questions: Sequence[tuple[str, dict[str, Any]]]) -> tuple[Answer, ...]:
    return RankQuestions(tables).answers(questions)


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


def _load(task: RankTask) -> tuple[RankTables, Path | None]:
    if isinstance(task.source, Path):
        kept = cache.open_entry(task.source)
        if kept is None:
            raise TraceError(f"{task.source} holds no tables of a capture")
        return kept, kept.entry
    tables = cache.load(task.source, directory=task.cache_directory)
    if tables.entry is not None or task.scratch is None:
        return tables, tables.entry
    # Questions across ranks need Parquet even if nothing can be cached.
    entry = task.scratch / f"{tables.info.source}{tables.info.rank}-scratch"
    try:
        cache.write(tables, entry)
    except OSError:
        return tables, None
    return cache.reopened(tables, entry), entry


def _find(path: Path) -> tuple[list[Capture | Path], list[Caveat], list[RankCapture], list[str]]:
    """Captures, else folders of Parquet; caveats; manifests, of the captures or alone; and errors."""
    try:
        found = find_run(path)
    except TraceError:
        entries = sorted({table.parent for table in path.glob("*/*.parquet") if (table.parent / cache.INFO).is_file()})
        if entries:
            return list(entries), [], [], []
        manifests = _manifests_alone(path)
        if not manifests:
            raise
        text = f"{path} holds manifests and no capture: the durations of iterations are all that is known"
        text += next((f"; rank {one.rank}: {one.manifest.reason}" for one in manifests if one.manifest.reason), "")
        return [], [Caveat("manifests_alone", text)], manifests, []
    # A trace's after a memory snapshot's: they can be of different windows, and iterations are the trace's.
    ordered = sorted(found.captures, key=lambda each: each.source != "memory")
    manifests = [each.manifest for each in ordered if each.manifest is not None]
    return list(found.captures), found.caveats, manifests, list(found.errors)


def _manifests_alone(path: Path) -> list[RankCapture]:
    """The manifests of the last attempt under a directory."""
    written = max(RunFiles(path).manifests, key=modified_ns, default=None) if path.is_dir() else None
    return [] if written is None else find_captures(written.parents[2])
