"""Profiling of a training loop that the user has written: what its frameworks share.

An adapter is a subclass of `Profiling` that says three things of its framework: `_describe`, `_watch` and `_stepped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

from bridge_profiling.capture.work import IterationWork
from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.common.plain import shown, whole_number
from bridge_profiling.frameworks.phases import PhaseWatch
from bridge_profiling.frameworks.session import Closing, Job, OutputDir, Session, loader_facts, world_size
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import ProfilingConfig

Batch = TypeVar("Batch")

#: Fetched after the last batch.
_END: Any = object()


class Profiling(Closing):
    """A context manager around a hand-written training loop. Leaving the `with` block in any way writes the capture.

    Args:
        config: the settings.
        output_dir: root of captures; overrides the config's and BRIDGE_PROFILING_DIR.
        layout: where each rank is; overrides the layout found.
        work: the computation of one iteration of the whole job.
        first_iteration: number of complete iterations, after a resume.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        output_dir: OutputDir,
        *,
        layout: ParallelLayout | None = None,
        work: IterationWork | None = None,
        first_iteration: int = 0,
    ) -> None:
        self._session, self._layout, self._work = Session(config, output_dir), layout, work
        self._next = _number(first_iteration, "first_iteration")

    def _describe(self) -> Job:
        """The training, as far as the framework says."""
        raise NotImplementedError

    def _watch(self, phases: PhaseWatch) -> None:
        """Watch the framework's phases."""

    def _stepped(self) -> bool:
        """Whether the last batch ended an iteration; by default each one does."""
        return True

    def __enter__(self) -> Self:
        job = self._session.guard(self._describe) or Job()
        job.facts |= {"iteration": "optimizer step", "world_size": world_size()}
        self._session.open(replace(job, layout=self._layout or job.layout), watch=self._watch, work=self._work)
        return self

    def _close(self, error: BaseException | None) -> None:
        if error is None:
            # A `break` leaves an iteration open.
            self._end_stepped()
        super()._close(error)

    def steps(self, batches: Iterable[Batch], start: int | None = None, micro_batches: int | None = None) -> Iterator[Batch]:
        """Yield the batches, and make iterations of the loop's bodies.

        The next batch is fetched after the body, so an iteration contains the wait for the batch that follows it, and none
        begins after the last batch. After a `break`, the iteration ends when the `with` block is left.

        Args:
            batches: the loader, or any iterable.
            start: number of complete iterations, after a resume; by default the count continues from the previous loop (an
                epoch).
            micro_batches: batches per iteration, for gradient accumulation; by default as many as the framework makes a step
                of, and one where it does not accumulate.
        """
        require(
            micro_batches is None or (isinstance(micro_batches, int) and micro_batches >= 1),
            f"steps() got micro_batches={micro_batches!r}",
            why="an iteration has at least one batch",
            instead="Leave it out, or pass the number of batches of each optimizer step",
        )
        source = iter(batches)
        self._session.describe(loader_facts(batches) | ({"gradient_accumulation": micro_batches} if micro_batches else {}))
        self._end_stepped()
        if start is not None:
            self._next = _number(start, "start")
        fetched, batch = 0, self._fetch(source)
        while batch is not _END:
            self._begin()
            # An exception in the body ends this generator as a `break` does; `__exit__` distinguishes them.
            yield batch
            fetched, batch = fetched + 1, self._fetch(source)
            if self._stepped() if micro_batches is None else batch is _END or fetched % micro_batches == 0:
                self._end()

    @contextmanager
    def step(self, iteration: int | None = None) -> Iterator[None]:
        """A context manager around the work on a batch, for a loop of another form; accumulated batches share an iteration.

        Args:
            iteration: its global number, counted from 0 across resumes; by default the next one.
        """
        self._end_stepped()
        self._begin(iteration)
        try:
            yield
        except BaseException as error:
            self._session.end_iteration(error)
            raise
        self._end_stepped()

    def phase(self, name: str) -> AbstractContextManager:
        """A context manager that names a phase inside the window: `host-to-device`, `evaluation`, or any other."""
        return self._session.watched_phase(name)

    def _fetch(self, source: Iterator[Any]) -> Any:
        with self._session.watched_phase("data-loading"):
            return next(source, _END)

    def _begin(self, iteration: int | None = None) -> None:
        """Begin the next iteration, unless one is open for accumulation."""
        if not self._session.in_iteration:
            self._session.begin_iteration(self._next if iteration is None else iteration)

    def _end_stepped(self) -> None:
        """End the open iteration, if any, where its last batch has ended it."""
        if self._session.in_iteration and self._stepped():
            self._end()

    def _end(self) -> None:
        self._session.end_iteration()
        self._next += 1


def _number(value: int, name: str) -> int:
    try:
        return whole_number(value)
    except ValueError as error:
        raise ProfilingConfigError(f"{name}={shown(value)} is not a number of iterations", why=str(error)) from None
