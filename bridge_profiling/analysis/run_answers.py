"""How a run's answers come about: workers load each capture once and answer what concerns it; a database goes across ranks.

Holds answers, never a rank's tables. Which questions there are is not its business: `rank_answers` and the question modules
know.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge_profiling.analysis.engines import Engine
from bridge_profiling.analysis.parquet_views import connect
from bridge_profiling.analysis.rank_answers import Questions, RankResult, RankTask, answer
from bridge_profiling.errors import TraceError
from bridge_profiling.traces import cache
from bridge_profiling.traces.run_dir import Capture, RankCapture, find_captures, find_run
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

#: Called with how many captures are done, and how many there are.
OnProgress = Callable[[int, int], None]

#: Small answers, given together while a capture's tables are in a worker: asking for one soon means asking for another.
_TOGETHER: Questions = {name: {} for name in ("breakdown", "iterations", "idle_gaps", "copies", "limitations")}

#: What findings need besides. Who asks for these first gets all of them in one pass.
_FOR_FINDINGS = ("idle_causes", "launch_statistics")

_ALL_TOGETHER: Questions = {**_TOGETHER, **{name: {} for name in _FOR_FINDINGS}}


#: A question that a database of all ranks answers: called with a DuckDB connection and the `RankInfo`s.
AcrossRanks = Callable[..., Any]


class RunAnswers:
    """What a run's captures answer.

    Args:
        path: a directory of captures, a capture, or a directory of Parquet tables.
        engine: does the work on each.
        parquet: where their tables go; None for the default places of `traces.cache`.
        on_progress: called as captures are done.

    Raises:
        TraceError: the path does not exist or holds no capture.
    """

    def __init__(self, path: Path, engine: Engine, parquet: Path | None, on_progress: OnProgress | None) -> None:
        self._sources, self._found_limitations, self._manifests = _find(path)
        self._engine, self._parquet, self._on_progress = engine, parquet, on_progress
        self._scratch = tempfile.TemporaryDirectory(prefix="bridge_profiling-", ignore_cleanup_errors=True)
        self._loaded: list[RankResult] | None = None
        self._kept: dict[tuple[str, frozenset[tuple[str, Any]]], pa.Table] = {}
        self._across: dict[tuple[AcrossRanks, bool], pa.Table] = {}
        self._connections: dict[tuple[str, ...], duckdb.DuckDBPyConnection] = {}
        self._errors: list[str] = []
        self._limitations: list[str] = []

    def close(self) -> None:
        """Let go of the database and of scratch files."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._scratch.cleanup()

    def ask(self, question: str, **options: Any) -> pa.Table:
        """A question's answer from every trace as one table; its first columns are `rank` and `source`."""
        questions: Questions = {question: options}
        if question in _TOGETHER:
            questions = _TOGETHER
        elif question in _FOR_FINDINGS and not options:
            questions = _ALL_TOGETHER
        self._answer(questions)
        return self._kept[_key(question, options)]

    def ask_together(self, questions: Questions) -> None:
        """Answer some questions in one pass over the captures, with those that findings need: `ask` has them then."""
        self._answer({**_ALL_TOGETHER, **questions})

    def _answer(self, questions: Questions) -> None:
        """Answer those that are not answered yet, in one pass."""
        self._load(questions)
        left = {name: options for name, options in questions.items() if _key(name, options) not in self._kept}
        if left:
            tasks = [RankTask(result.entry, left) for result in self.traces if result.entry is not None]
            self._keep(left, self._work(tasks))

    def across(self, question: AcrossRanks, *, with_memory: bool = False) -> pa.Table:
        """The answer of a question across ranks, worked out once."""
        if (question, with_memory) in self._across:
            return self._across[question, with_memory]
        chosen = [result.info for result in self.results if with_memory or result.info.source != "memory"]
        infos = [info for info in chosen if info.source in (self.main_source, "memory")]
        if "limitations" in inspect.signature(question).parameters:  # until every question returns an Answer
            found = question(self.connection, infos, limitations=self._limitations)
        else:
            answer = question(self.connection, infos)
            self._limitations += [caveat.text for caveat in answer.caveats]
            found = answer.table
        self._across[question, with_memory] = found
        return found

    @property
    def results(self) -> list[RankResult]:
        """What is known of each capture that could be read, by rank."""
        self._load({})
        assert self._loaded is not None
        return self._loaded

    @property
    def traces(self) -> list[RankResult]:
        """Of the results those of traces; the others are of memory snapshots."""
        return [result for result in self.results if result.info.source != "memory"]

    @property
    def errors(self) -> list[str]:
        """A sentence for each capture that could not be read, or not to its end."""
        self._load({})
        return list(self._errors)

    @property
    def limitations(self) -> list[str]:
        """What was said when captures were found, and by questions across ranks; not what single captures cannot tell."""
        self._load({})
        return [*self._found_limitations, *self._mixed_sources(), *self._limitations]

    @property
    def manifests(self) -> list[RankCapture]:
        """The manifests of the captures, one of each rank, by rank; those that are there where no capture is."""
        found = {manifest.rank: manifest for manifest in self._manifests}
        return [found[rank] for rank in sorted(found)]

    @property
    def main_source(self) -> str:
        """The profiler that captured the most ranks: two captures of one rank are not two ranks."""
        sources = [result.info.source for result in self.traces]
        return "nsys" if sources.count("nsys") > sources.count("kineto") else "kineto"

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """One database of the main source's traces and the memory snapshots, which have no table in common."""
        return self._connected(self.main_source, "memory")

    def of_each_source(self, question: Callable[..., pa.Table], **options: Any) -> pa.Table:
        """What a database of each profiler's traces answers, one after the other, with the column `source`."""
        found = []
        for source in sorted({result.info.source for result in self.traces}) or ["kineto"]:
            connection = self.connection if source == self.main_source else self._connected(source)
            table = question(connection, **options)
            column = pa.repeat(pa.scalar(source), table.num_rows)
            found.append(table.add_column(1 if "rank" in table.column_names else 0, "source", column))
        return pa.concat_tables(found)

    def _connected(self, *sources: str) -> duckdb.DuckDBPyConnection:
        if sources not in self._connections:
            chosen = [result for result in self.results if result.info.source in sources]
            seen = [result.entry for result in chosen if result.entry is not None and result.entry.is_dir()]
            if len(seen) < len(chosen):
                self._limitations.append(
                    f"the tables of {len(chosen) - len(seen)} captures cannot be seen from here: answers across ranks leave "
                    f"them out; name a directory that all machines share with --parquet"
                )
            self._connections[sources] = connect(seen)
        return self._connections[sources]

    def _mixed_sources(self) -> Iterator[str]:
        if len({result.info.source for result in self.traces}) > 1:
            yield f"there are Kineto and nsys captures: answers across ranks are from the {self.main_source} ones"

    def _load(self, questions: Questions) -> None:
        """Load each capture, unless that is done, and answer questions about each on the way. Parquet is only looked at."""
        if self._loaded is not None:
            return
        captures = [source for source in self._sources if isinstance(source, Capture)]
        # The largest first, so that no worker is left with it at the end.
        captures.sort(key=lambda capture: capture.path.stat().st_size, reverse=True)
        tasks = [RankTask(capture, questions, self._parquet, Path(self._scratch.name)) for capture in captures]
        read = [*self._opened(), *self._work(tasks)]
        self._errors += [result.info.error for result in read if result.info.error is not None]
        self._loaded = self._one_of_each(read)
        if captures:
            self._keep(questions, self.traces)

    def _one_of_each(self, read: Sequence[RankResult]) -> list[RankResult]:
        """Results by rank, one of each rank and profiler: files can claim a rank that is another's, copies of its file do."""
        kept: dict[tuple[int, str], RankResult] = {}
        # Whole captures before damaged ones.
        for result in sorted(read, key=lambda result: (result.info.rank, result.info.source, result.info.error is not None)):
            first = kept.setdefault((result.info.rank, result.info.source), result)
            if first is not result:
                path, other = result.info.files[0], first.info.files[0]
                self._found_limitations.append(f"{path} is left out: it claims rank {result.info.rank}, as {other} does")
        return list(kept.values())

    def _opened(self) -> Iterator[RankResult]:
        """What is known of those that are Parquet already."""
        for source in self._sources:
            if isinstance(source, Path):
                tables = cache.open_entry(source)
                if tables is None:
                    self._errors.append(f"{source} holds no tables that this version can read")
                else:
                    yield RankResult(tables.info, source, {})

    def _work(self, tasks: Sequence[RankTask]) -> list[RankResult]:
        """The results of the tasks that have one, by rank; why others have none goes to the errors."""
        done = []
        self._say_progress(0, len(tasks))
        for count, outcome in enumerate(self._engine.map(answer, tasks), 1):
            if isinstance(outcome.answer, RankResult):
                done.append(outcome.answer)
            else:
                self._errors.append(outcome.answer or f"{tasks[outcome.task].path} cannot be read: {outcome.error}")
            self._say_progress(count, len(tasks))
        return sorted(done, key=lambda result: (result.info.rank, result.info.source))

    def _say_progress(self, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done, total)

    def _keep(self, questions: Questions, results: Sequence[RankResult]) -> None:
        for question, options in questions.items():
            tables = [labelled(result.answers[question], result.info) for result in results]
            self._kept[_key(question, options)] = pa.concat_tables(tables) if tables else _NOTHING


def labelled(table: pa.Table, info: RankInfo) -> pa.Table:
    """A table with the rank and the source of a capture as its first columns."""
    rank, source = (pa.repeat(value, table.num_rows) for value in (pa.scalar(info.rank, pa.int32()), info.source))
    return table.add_column(0, "source", source).add_column(0, "rank", rank)


#: What a question about each rank gives when no capture can be read.
_NOTHING = pa.table({"rank": pa.array([], pa.int32()), "source": pa.array([], pa.string())})


def _find(path: Path) -> tuple[list[Capture | Path], list[str], list[RankCapture]]:
    """Captures, else folders of Parquet tables, what is to be said about them, and their manifests or, without any, others."""
    try:
        found = find_run(path)
    except TraceError:
        entries = sorted({table.parent for table in path.glob("*/*.parquet") if (table.parent / cache.INFO).is_file()})
        if entries:
            return list(entries), [], []
        manifests = _manifests_alone(path)
        if not manifests:
            raise
        said = f"{path} holds manifests and no capture: how long iterations took is all that can be told"
        why = next((f"; rank {one.rank}: {one.manifest.reason}" for one in manifests if one.manifest.reason), "")
        return [], [said + why], manifests
    # A trace's after a memory snapshot's: they may be of different windows, and iterations are the trace's.
    ordered = sorted(found.captures, key=lambda each: each.source != "memory")
    return list(found.captures), found.limitations, [each.manifest for each in ordered if each.manifest is not None]


def _manifests_alone(path: Path) -> list[RankCapture]:
    """The manifests of the attempt written last anywhere under a directory."""
    written = max(path.rglob("manifest/*/rank-*.json"), key=lambda manifest: manifest.stat().st_mtime_ns, default=None)
    return [] if written is None else find_captures(written.parents[2])


def _key(question: str, options: Mapping[str, Any]) -> tuple[str, frozenset[tuple[str, Any]]]:
    return question, frozenset(options.items())
