"""What the integrations for hand-written training loops have in common: iterations, phases, their memory, and the facts.

with Profiling(model, optimizer, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5) as profiling:
    for batch in profiling.steps(loader):
        ...
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

from bridge_profiling.capture.work import IterationWork
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.integrations.callback_hook import CallbackHook
from bridge_profiling.integrations.torch_phases import PhaseWatch
from bridge_profiling.layout import ParallelLayout

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

_NO_RANGE: AbstractContextManager = nullcontext()

#: No batch is this one.
END: Any = object()


class LoopProfiling:
    """A context manager around a training loop. A subclass says what it watches and what its framework tells.

    Args:
        config: what to profile.
        output_dir: root of what is written; wins over the config's and over BRIDGE_PROFILING_DIR.
        layout: where each rank stands; wins over what is found.
        work: what one iteration of the whole job computes.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        output_dir: str | os.PathLike[str] | None,
        layout: ParallelLayout | None,
        work: IterationWork | None,
    ) -> None:
        self._config, self._layout, self._work = config, layout, work
        self._hook = CallbackHook(config, output_dir)
        self._phases: PhaseWatch | None = None
        self._undo: list[Callable[[], None]] = []
        self._next = 0

    # -- what a framework adds ---------------------------------------------------------------------------------------

    def _describe(self) -> tuple[ParallelLayout | None, dict[str, object]]:
        """The layout found, and the facts for the manifest."""
        raise NotImplementedError

    def _watch(self, phases: PhaseWatch) -> None:
        """Watch the framework's phases; what else is to be taken away goes to `self._undo`."""
        raise NotImplementedError

    def _conclude(self, facts: dict[str, object]) -> None:
        """Add to the facts what only the training's end tells."""

    # -- around the loop ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        self._next = 0
        if not self._config.enabled and self._config.on_demand is False:
            return self
        found: ParallelLayout | None = None
        facts: dict[str, object] = {}
        described = self._safely(self._describe)
        if described is not None:
            found, facts = described
        self._hook.open(self._layout or found, self._work)
        if self._hook.hook is None:
            return self
        self._hook.hook.facts.update(facts)
        self._phases = PhaseWatch(self._hook.phase)
        self._safely(lambda: self._watch(self._phases) if self._phases else None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._phases is not None:
            self._phases.detach()
            self._phases = None
        while self._undo:
            self._undo.pop()()
        if self._hook.hook is not None:
            facts = self._hook.hook.facts
            self._safely(lambda: self._conclude(facts))
        self._hook.close(error)

    # -- what a loop calls -------------------------------------------------------------------------------------------

    def steps(self, batches: Iterable[Batch], start: int | None = None, micro_batches: int = 1) -> Iterator[Batch]:
        """The batches, with an iteration around the loop's body for each.

        The next batch is fetched at an iteration's end, so an iteration holds the wait for the batch of the one after it, and
        the number of iterations is the number of batches. After a `break`, the iteration ends when the `with` is left.

        Args:
            batches: the loader, or any iterable.
            start: number of iterations that are complete, after a resume; else it goes on where the loop before this one
                (an epoch) ended, the first at 0.
            micro_batches: batches that make one iteration, where gradients are accumulated.
        """
        if start is not None:
            self._next = start
        source = iter(batches)
        batch = self._fetch(source)
        while batch is not END:
            self._begin(self._next)
            self._next += 1
            for _ in range(micro_batches):
                # What the body raises ends here too, and looks like a `break`: leaving the `with` tells them apart.
                yield batch
                batch = self._fetch(source)
                if batch is END:
                    break
            self._end()

    def step(self, iteration: int) -> AbstractContextManager:
        """A context manager around global iteration `iteration` (0-based, a resume counts on), for a loop of another form."""
        return _Step(self, iteration)

    def phase(self, name: str) -> AbstractContextManager:
        """A context manager that names a phase inside the window: `host-to-device`, `evaluation`, or any other."""
        return _Phase(self._phases, name) if self._phases is not None else _NO_RANGE

    # -- what these calls do -----------------------------------------------------------------------------------------

    def _begin(self, iteration: int) -> None:
        self._end()
        self._hook.begin_iteration(iteration)

    def _end(self, error: BaseException | None = None) -> None:
        if self._phases is not None:
            self._phases.end_open()
        self._hook.end_iteration(error)

    def _fetch(self, source: Iterator[Any]) -> Any:
        with self.phase("data-loading"):
            return next(source, END)

    def _safely(self, step: Callable[[], Any]) -> Any:
        """Whatever goes wrong in describing a framework costs the description, never the training."""
        try:
            return step()
        except Exception as error:
            logger.exception("%s: %s. Training goes on.", type(error).__name__, error)
            return None


class _Step(AbstractContextManager):
    __slots__ = ("_iteration", "_profiling")

    def __init__(self, profiling: LoopProfiling, iteration: int) -> None:
        self._profiling, self._iteration = profiling, iteration

    def __enter__(self) -> None:
        self._profiling._begin(self._iteration)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._profiling._end(error)


class _Phase(AbstractContextManager):
    __slots__ = ("_name", "_phases")

    def __init__(self, phases: PhaseWatch, name: str) -> None:
        self._phases, self._name = phases, name

    def __enter__(self) -> None:
        self._phases.begin(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._phases.end(self._name)
