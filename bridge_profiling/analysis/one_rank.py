"""One capture's questions: a worker loads its tables once, and makes in one pass over each what several questions need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge_profiling.analysis.questions import Blocks, Collected, Columns, Derived, Given, Input
from bridge_profiling.analysis.registry import QUESTIONS
from bridge_profiling.errors import TraceError, shortage
from bridge_profiling.facts.types import Answer
from bridge_profiling.regular_files import size_bytes
from bridge_profiling.traces import cache
from bridge_profiling.traces.discover import Capture
from bridge_profiling.traces.seal import is_whole
from bridge_profiling.traces.tables import give_memory_back
from bridge_profiling.traces.types import RankInfo, RankTables

#: Of Parquet of so many bytes, a question takes some 100 MB.
_LARGE_BYTES = 50_000_000


@dataclass(frozen=True)
class RankTask:
    """A capture, or the folder of its Parquet, and the questions to answer about it."""

    source: Capture | Path  # what to read
    questions: tuple[tuple[str, dict[str, Any]], ...]  # names with options
    cache_directory: Path | None = None  # where to keep its Parquet; None for the default places
    scratch: Path | None = None  # where to write its Parquet if the cache cannot be written
    cached: bool = True  # False reads the capture itself, and writes to `scratch` alone

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
    unkept: str | None = None  # why its Parquet could not be written where it was to be kept


def answer_rank(task: RankTask) -> RankResult | str:
    """Answer questions about one capture, in a worker. Returns an error that names the file if it cannot be read.

    If its tables in the cache disappear meanwhile, the capture is read again.
    """
    try:
        tables, entry = _load(task)
    except TraceError as error:
        return str(error)
    except OSError as error:
        return f"{task.path} cannot be read: {shortage(error) or error.strerror or error}"
    except Exception as error:  # a bug of a reader must name the file too
        return f"{task.path} cannot be read: {shortage(error) or f'{type(error).__name__}: {error}'}"
    try:
        answers = answers_of(tables, task.questions)
    except Exception:
        if not _has_gone(task, entry):
            raise
    else:
        if not _has_gone(task, entry):
            return RankResult(tables.info, entry, answers, tables.unkept)
    return answer_rank(replace(task, cached=False))


def _has_gone(task: RankTask, entry: Path | None) -> bool:
    """Whether another process has removed files of an entry of the cache."""
    return task.cached and isinstance(task.source, Capture) and entry is not None and not is_whole(entry)


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
        return as_answer(question.function(*(self._value(item, chosen) for item in question.inputs), **options))

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
            elif item is Given.SOURCE:
                self._kept[key] = self._tables.info.source
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


def as_answer(found: Answer | pa.Table) -> Answer:
    """An answer of a function that gives its table alone."""
    return found if isinstance(found, Answer) else Answer(found)


def answers_of(tables: RankTables, questions: Sequence[tuple[str, dict[str, Any]]]) -> tuple[Answer, ...]:
    """Answers to questions about one capture, names with options, in order."""
    return RankQuestions(tables).answers(questions)


def _load(task: RankTask) -> tuple[RankTables, Path | None]:
    if isinstance(task.source, Path):
        kept = cache.open_entry(task.source)
        if kept is None:
            raise TraceError(f"{task.source} holds no tables of a capture")
        return kept, kept.entry
    writer = "" if task.scratch is None else task.scratch.name
    tables = cache.load(task.source, directory=task.cache_directory, cached=task.cached, writer=writer)
    if tables.entry is not None or task.scratch is None:
        return tables, tables.entry
    # Questions across ranks need Parquet even if nothing can be cached.
    entry = task.scratch / f"{tables.info.source}{tables.info.rank}-scratch"
    try:
        cache.write(tables, entry)
    except OSError:
        return tables, None
    return replace(cache.reopened(tables, entry), unkept=tables.unkept), entry
