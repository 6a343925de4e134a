"""The training hook for frameworks that call back, where no `with` can be written around an iteration.

What such a framework's callback has in common with every other: it takes settings as keywords, opens the hook late (when the
ranks are connected), is told of an iteration's begin and of its end, and is not told of everything that ends a training.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.capture.signals import unwind_on
from bridge_profiling.capture.work import IterationWork
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.integrations import phase_memory
from bridge_profiling.launch_env import LaunchEnv, initialized_distributed
from bridge_profiling.layout import ParallelLayout, select_ranks

logger = logging.getLogger(__name__)

_NO_RANGE: AbstractContextManager = nullcontext()

_NO_DEVICE = "unavailable: this process trains on no CUDA device"

_FIELDS = tuple(field.name for field in dataclasses.fields(ProfilingConfig))


class CallbackHook:
    """A `ProfilingHook` driven by calls. No call raises: what goes wrong is logged, and training goes on.

    Calls that come without the hook being open, or twice, do nothing more; an iteration that was not ended is ended by the
    next one's begin, and by `close`.

    Args:
        config: what to profile.
        output_dir: root of what is written; wins over the config's and over BRIDGE_PROFILING_DIR.
    """

    def __init__(self, config: ProfilingConfig, output_dir: str | os.PathLike[str] | None = None) -> None:
        self._config = config
        self._output_dir = output_dir
        self._hook: ProfilingHook | None = None
        self._open: list[AbstractContextManager] = []
        self._exit_signal: unwind_on | None = None
        self._memory: phase_memory.PhaseMemory | None = None
        self._iteration = 0

    def __reduce__(self) -> tuple[type[CallbackHook], tuple[object, ...]]:
        # A copy of a Trainer, with its callbacks, may train as well; it does not share what is captured here.
        return CallbackHook, (self._config, self._output_dir)

    @property
    def hook(self) -> ProfilingHook | None:
        """The hook, while it is open."""
        return self._hook

    @property
    def iteration(self) -> int:
        """The iteration that began last."""
        return self._iteration

    def open(
        self,
        layout: ParallelLayout | None = None,
        work: IterationWork | None = None,
        exit_signal: int | None = signal.SIGTERM,
        train_iters: int | None = None,
    ) -> None:
        """Open the hook. Every rank calls it, when the ranks are connected and best before the model is built.

        Args:
            layout: where each rank stands; a flat data-parallel one when it is not given.
            work: what an iteration of the whole job computes.
            exit_signal: a signal that would kill the process, and its capture with it; on a rank that is profiled it becomes a
                SystemExit while the hook is open. A handler that is installed already is left alone. None changes nothing.
            train_iters: iterations the training runs, when known: a request for later ones is refused at once.
        """
        self.close(RuntimeError("the training was started anew in the same process"))
        try:
            layout = layout or ParallelLayout(world_size=world_size())
            hook = ProfilingHook(
                self._config,
                rank=rank(),
                layout=layout,
                output_dir=self._output_dir,
                work=work,
                train_iters=train_iters,
            )
            self._hook = hook.__enter__()
            if exit_signal is not None and rank() in self._selected(layout):
                self._exit_signal = unwind_on(exit_signal).__enter__()
        except Exception as error:
            logger.error("nothing will be captured: %s: %s. Training goes on.", type(error).__name__, error)

    def begin_iteration(self, iteration: int) -> None:
        """Global iteration `iteration` (0-based, a resume counts on) begins."""
        if self._hook is not None:
            self.end_iteration()
            self._iteration = iteration
            self._begin(self._hook.iteration(iteration))

    def end_iteration(self, error: BaseException | None = None) -> None:
        """The iteration and every phase in it have ended, by an exception or not."""
        while self._open:
            self.end_phase(error)

    def begin_phase(self, name: str) -> None:
        """A phase begins, inside the one that is open; its name is a range inside the window."""
        if self._hook is not None:
            self._begin(self.phase(name))

    def range(self, name: str) -> AbstractContextManager:
        """A context manager around a part of a phase: a range inside the window."""
        return self._hook.range(name) if self._hook is not None else _NO_RANGE

    def phase(self, name: str) -> AbstractContextManager:
        """A context manager around a phase: a range inside the window, with the memory that it takes in the manifest."""
        one, hook = self.range(name), self._hook
        if hook is None or not hook.capturing:
            return one
        if "phase_memory" not in hook.facts:
            # Not before: a framework may set its device up late.
            self._memory = phase_memory.of_this_process()
            hook.facts["phase_memory"] = self._memory.table if self._memory is not None else _NO_DEVICE
        return self._memory.around(self._iteration, name, one) if self._memory is not None else one

    def end_phase(self, error: BaseException | None = None) -> None:
        """The phase that began last has ended."""
        if self._open:
            self._open.pop().__exit__(type(error) if error else None, error, None)

    def close(self, error: BaseException | None = None) -> None:
        """The training has ended, by an exception or not: what was captured is written."""
        hook, self._hook = self._hook, None
        if hook is None:
            return
        self.end_iteration(error)
        hook.__exit__(type(error) if error else None, error, None)
        if self._exit_signal is not None:
            self._exit_signal.__exit__()
            self._exit_signal = None

    def _begin(self, one: AbstractContextManager) -> None:
        one.__enter__()
        self._open.append(one)

    def _selected(self, layout: ParallelLayout) -> list[int]:
        return select_ranks(self._config.profile_ranks, layout) if self._config.enabled else []


def config_from(
    caller: str, settings: Mapping[str, Any], *, given: Any = None, train_iters: int | None = None
) -> ProfilingConfig:
    """What a callback's keywords ask for, checked.

    Args:
        caller: the callback's name, for errors.
        settings: fields of ProfilingConfig, which win.
        given: an object that has some of the same fields, such as a framework's own profiling section.
        train_iters: iterations the training runs, when known.

    Raises:
        ProfilingConfigError: a setting that does not exist, or a request that cannot work.
    """
    unknown = sorted(settings.keys() - set(_FIELDS))
    if unknown:
        raise ProfilingConfigError(
            f"{caller} got {unknown[0]!r}",
            why=f"the settings are {', '.join(_FIELDS)}",
            instead="Pass one of these, or leave it out",
        )
    theirs = {name: getattr(given, name) for name in _FIELDS if hasattr(given, name)}
    config = ProfilingConfig(**(theirs | dict(settings)))
    config.finalize(train_iters=train_iters, world_size=launch_world_size())
    return config


def connected() -> bool:
    """Whether ranks are connected through torch.distributed."""
    return initialized_distributed() is not None


def rank() -> int:
    """This process's global rank, 0 when it trains alone."""
    return torch.distributed.get_rank() if connected() else 0


def world_size() -> int:
    """The number of ranks, 1 when this process trains alone."""
    return torch.distributed.get_world_size() if connected() else 1


def launch_world_size() -> int | None:
    """The number of ranks before they are connected; None where no launcher says."""
    env = LaunchEnv.read()
    return None if env.launcher == "none" else env.world_size
