"""Types that declare questions about a run. `registry` declares each question once; `session` evaluates them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa

from bridge_profiling.facts.types import Answer, Collector
from bridge_profiling.traces.types import Caveat


class Given(Enum):
    """Inputs that a run has before any question is asked."""

    DATABASE = "DuckDB connection with a view of each table in `traces.tables.SCHEMAS`"
    INFOS = "`RankInfo` of each trace in the database"
    SOURCE = "the profiler of one capture, `kineto` or `nsys`"


@dataclass(frozen=True)
class Columns:
    """Columns of one of a capture's tables."""

    table: str  # key of `traces.tables.SCHEMAS`
    names: tuple[str, ...]  # columns
    optional: tuple[tuple[str, str], ...] = ()  # column to read only if the option of that name is set
    # Keep the columns until all questions about the capture are answered; otherwise until the next question.
    shared: bool = False


@dataclass(frozen=True)
class Blocks:
    """A function that returns the rows of some columns of a table, in tables that each fit into memory."""

    table: str  # key of `traces.tables.SCHEMAS`
    names: tuple[str, ...]
    optional: tuple[tuple[str, str], ...] = ()  # column to read only if the option of that name is set


@dataclass(frozen=True, eq=False)
class Collected:
    """The result of a collector. All that the questions about a capture need of one table are made in one pass over it."""

    table: str  # key of `traces.tables.SCHEMAS`
    names: tuple[str, ...]  # columns
    collector: Callable[..., Collector]  # called with its inputs, and with the options of these names
    inputs: tuple[Columns | Derived, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Derived:
    """A value computed once for several questions: from one capture, or from the database."""

    function: Callable[..., Any]  # called with its inputs
    inputs: tuple[Given | Columns | Blocks | Collected | Derived, ...]  # passed in order


@dataclass(frozen=True, eq=False)
class SideTables:
    """Tables created in the database once, for the SQL of several questions. Nothing is passed on to those."""

    function: Callable[..., Iterable[Caveat]]  # called with its inputs; creates the tables and returns caveats
    inputs: tuple[Input, ...]  # passed in order, except side tables, which only have to exist


@dataclass(frozen=True, eq=False)
class Question:
    """A question that `Run` answers with a table.

    Args:
        name: how `Run.ask` and `Run.prefetch` name it.
        scope: `rank`: asked of each capture, in a worker; the answers become one table with the columns `rank` and `source`.
            `run`: asked once. `source`: asked once per profiler; the answers get a column `source`.
        function: called with its inputs and options. Returns an `Answer`, or just a table without caveats.
        inputs: passed in order, except side tables. An input question is asked with its default options and passed as a table;
            its caveats are also those of this answer.
    """

    name: str
    scope: Literal["rank", "run", "source"]
    function: Callable[..., Answer | pa.Table]
    inputs: tuple[Input, ...]

    @cached_property
    def options(self) -> dict[str, Any]:
        """The question's options and their defaults: the function's keyword-only parameters, whose values are hashable."""
        parameters = inspect.signature(self.function).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}

    def with_options(self, **options: Any) -> Asked:
        """The question with some options, the others at their defaults.

        Raises:
            TypeError: the question has no such option.
        """
        unknown = options.keys() - self.options.keys()
        if unknown:
            raise TypeError(f"{self.name} has no option {', '.join(sorted(unknown))}")
        return Asked(self, frozenset({**self.options, **options}.items()))


Input = Given | Columns | Blocks | Collected | Derived | SideTables | Question


@dataclass(frozen=True)
class Asked:
    """A question with a value for each of its options."""

    question: Question
    options: frozenset[tuple[str, Any]]


def needed_of_captures(asked: Iterable[Asked]) -> list[Asked]:
    """The questions of scope `rank` that some questions need, themselves included, each once: one pass answers all of them."""
    found: dict[Asked, None] = {}

    def visit(item: Input | Asked) -> None:
        if isinstance(item, Question):
            item = item.with_options()
        if isinstance(item, Asked):
            if item.question.scope == "rank":
                found[item] = None
                return
            item = item.question
        if isinstance(item, (Question, SideTables)):
            for each in item.inputs:
                visit(each)

    for each in asked:
        visit(each)
    return list(found)
