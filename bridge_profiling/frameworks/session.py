"""The lifecycle that all adapters share: open a hook, move it from iteration to iteration, name phases, close it.

Importing this module loads no torch: an unchanged script decides when it does, and a Ray driver does without.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.capture.signals import raised_by_handler, unwind_on
from bridge_profiling.common.errors import TrainingLogger, contained, one_line, require
from bridge_profiling.common.launch_env import LAUNCH_VARIABLE, LaunchEnv
from bridge_profiling.common.plain import whole_number, whole_text
from bridge_profiling.frameworks.launch_name import name_launch, restored
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import ProfilingConfig
from bridge_profiling.settings.window import FIELDS, Spelling, select_ranks

if TYPE_CHECKING:
    from bridge_profiling.frameworks.phase_memory import PhaseMemory
    from bridge_profiling.frameworks.phases import PhaseWatch, RangeOf

logger = TrainingLogger(__name__)

Result = TypeVar("Result")

#: Root of captures, as an argument.
OutputDir = str | os.PathLike[str] | None

#: Names of the settings.
SETTINGS = tuple(field.name for field in dataclasses.fields(ProfilingConfig))

#: Sessions of this process with an open hook, the latest last.
_open_sessions: list[Session] = []


@dataclass
class Job:
    """What a framework says of its training."""

    layout: ParallelLayout | None = None  # None: every rank is data-parallel
    facts: dict[str, object] = field(default_factory=dict)  # the manifest's section `framework`
    train_iters: int | None = None


class Session:
    """Drives a `ProfilingHook` from the calls of a framework.

    Only `start` raises. A call without an open hook does nothing. The begin of an iteration ends an open one. Copies and
    pickles have the settings and nothing of the capture, because a copied Trainer may train as well.

    Args:
        config: the settings.
        output_dir: root of captures; overrides the config's and BRIDGE_PROFILING_DIR.
        close_on_error: close the hook when an error ends a captured iteration, because another may never come.

    Attributes:
        hook: the hook while it is open.
        phases: the watch of the open hook, once torch is loaded.
        iteration: the iteration that began last.
        signals: restores signals at the end of the training.
    """

    def __init__(self, config: ProfilingConfig, output_dir: OutputDir = None, *, close_on_error: bool = False) -> None:
        self.config = config
        self.hook: ProfilingHook | None = None
        self.phases: PhaseWatch | None = None
        self.iteration = 0
        self.signals = ExitStack()
        self._output_dir, self._close_on_error = output_dir, close_on_error
        self._current: AbstractContextManager | None = None
        self._memory: PhaseMemory | None = None
        self._process, self._thread = os.getpid(), threading.get_ident()

    def __reduce__(self) -> tuple[type[Session], tuple[object, ...]]:
        return Session, (self.config, self._output_dir)

    # -- open and close ----------------------------------------------------------------------------------------------

    def open(
        self,
        job: Job | None = None,
        *,
        watch: Callable[[PhaseWatch], None] | None = None,
        range_of: RangeOf | None = None,
        exit_signal: int | None = signal.SIGTERM,
        independent: bool = False,
        **hook_arguments: Any,
    ) -> bool:
        """Open the hook; every rank calls it. A failure is logged, and nothing is captured. Returns whether it is open.

        Without a `job`, which a framework may fail to describe, every rank is data-parallel.

        `watch` selects phases, and `exit_signal` becomes SystemExit on profiled ranks. Ranks that are `independent` open their
        hooks at different times, or never, so they must not communicate; every phase of theirs is watched, and signals are left
        to the hook.
        """
        self.close(RuntimeError("the training was started again in the same process"))
        job = job or Job()
        try:
            env = LaunchEnv.current() if independent else connected_ranks()
            layout = job.layout or ParallelLayout(world_size=env.world_size)
            # Child processes inherit the environment, so the launch has its name only while the hook opens.
            with restored(LAUNCH_VARIABLE):
                if independent:
                    name_launch()
                self.start(job.facts, rank=env.rank, layout=layout, train_iters=job.train_iters, **hook_arguments)
            if self.hook is not None and "torch" in sys.modules:
                from bridge_profiling.frameworks.phases import PhaseWatch

                self.phases = PhaseWatch(range_of or self.phase)
                self.phases.fetches = self._describe_fetched
                watch = PhaseWatch.everything if independent else watch
                if watch is not None:
                    self.guard(watch, self.phases)
            profiled = self.config.enabled and env.rank in select_ranks(self.config.profile_ranks, layout)
            if exit_signal is not None and profiled and not independent:
                self.signals.enter_context(unwind_on(exit_signal))
        except Exception as error:
            if raised_by_handler(error):
                raise
            logger.error("nothing will be captured: %s. Training goes on.", one_line(error))
        return self.hook is not None

    def start(self, facts: Mapping[str, object], **hook_arguments: Any) -> None:
        """Open the hook for a rank that the caller knows, unless nothing can be captured.

        Raises ProfilingConfigError for settings that don't fit the job.
        """
        if not self.config.enabled and self.config.on_demand is False:
            return
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._memory = None
        self.hook = ProfilingHook(self.config, output_dir=self._output_dir, **hook_arguments).__enter__()
        self.hook.facts.update(facts)
        _open_sessions.append(self)

    def close(self, error: BaseException | None = None) -> None:
        """Close the hook at the end of the training, which `error` ended, if given; writes the capture.

        An open iteration never reached its end, so it does not count as captured.
        """
        if self.in_iteration:
            self.end_iteration(error or StopIteration())
        hook, self.hook = self.hook, None
        if hook is None:
            return
        _open_sessions.remove(self)
        if self.phases is not None:
            self.guard(self.phases.detach)
            self.phases = None
        hook.__exit__(type(error) if error else None, error, None)
        self.signals.close()

    def guard(self, step: Callable[..., Result], *arguments: Any) -> Result | None:
        """Call `step`; a failure is logged and returns None, unless a signal handler raised it."""
        try:
            return step(*arguments)
        except Exception as error:
            if raised_by_handler(error):
                raise
            logger.exception("profiling: %s. Training goes on.", one_line(error))
            return None

    def describe(self, facts: Mapping[str, object] | None) -> None:
        """Add facts to the manifest's `framework` section."""
        if self.hook is not None:
            self.hook.facts.update(facts or {})

    def _describe_fetched(self, loader: object) -> None:
        # Batches of a first evaluation are fetched before the first iteration.
        if self.in_iteration and self.phases is not None and self.hook is not None:
            # Once: the length of a dataset may take long to find.
            self.phases.fetches = lambda loader: None
            self.describe(loader_facts(loader) | self.hook.facts)

    @property
    def in_own_process(self) -> bool:
        """Whether this is the process that opened the hook, not one forked from it."""
        return os.getpid() == self._process

    @property
    def in_own_thread(self) -> bool:
        """Whether this is the process and the thread that opened the hook."""
        return self.in_own_process and threading.get_ident() == self._thread

    @property
    def on_first_rank(self) -> bool:
        """Whether this is the first profiled rank, where every rank is data-parallel."""
        here = LaunchEnv.current()
        return here.rank == select_ranks(self.config.profile_ranks, ParallelLayout(world_size=here.world_size))[0]

    # -- iterations and phases ---------------------------------------------------------------------------------------

    @property
    def capturing(self) -> bool:
        """Whether a window is open."""
        return self.hook is not None and self.hook.capturing

    @property
    def in_iteration(self) -> bool:
        """Whether an iteration has begun and not ended."""
        return self._current is not None

    def begin_iteration(self, iteration: int) -> None:
        """Begin global iteration `iteration`, counted from 0 across resumes."""
        if self.hook is not None:
            self.end_iteration()
            self.iteration = iteration
            self._current = self.hook.iteration(iteration)
            self._current.__enter__()

    def end_iteration(self, error: BaseException | None = None) -> None:
        """End the iteration and every phase in it, which `error` ended, if given."""
        if self.phases is not None:
            self.phases.end_open()
        current, self._current = self._current, None
        if current is None:
            return
        captured = self.capturing
        current.__exit__(type(error) if error else None, error, None)
        if error is not None and captured and self._close_on_error:
            self.close(error)

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """A context manager around an iteration."""
        self.begin_iteration(iteration)
        try:
            yield
        except BaseException as error:
            self.end_iteration(error)
            raise
        self.end_iteration()

    def begin_phase(self, name: str) -> None:
        """Begin a phase in the watch."""
        if self.phases is not None:
            self.phases.begin(name)

    def end_phase(self, name: str) -> None:
        """End a phase in the watch."""
        if self.phases is not None:
            self.phases.end(name)

    def watched_phase(self, name: str) -> AbstractContextManager:
        """A phase in the watch, in a context manager."""
        return self.phases.phase(whole_text(name)) if self.phases is not None else nullcontext()

    def range(self, name: str) -> AbstractContextManager:
        """A range inside the window."""
        return self.hook.range(name) if self.hook is not None else nullcontext()

    def phase(self, name: str) -> AbstractContextManager:
        """A range inside the window, with the phase's device memory in the manifest."""
        one, hook = self.range(name), self.hook
        if hook is None or not hook.capturing:
            return one
        if "phase_memory" not in hook.facts:
            # Only now, because a framework may initialize its device late.
            from bridge_profiling.frameworks.phase_memory import memory_of_this_process

            self._memory = memory_of_this_process()
            unavailable = "unavailable: this process trains on no CUDA device"
            hook.facts["phase_memory"] = self._memory.table if self._memory is not None else unavailable
        return self._memory.around(self.iteration, name, one) if self._memory is not None else one


class Closing:
    """A context manager that closes its session."""

    _session: Session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self._session.close(error)


def config_from(
    caller: str,
    settings: Mapping[str, Any],
    *,
    given: Any = None,
    train_iters: int | None = None,
    spelled: Spelling = FIELDS,
) -> ProfilingConfig:
    """The checked settings of a callback's keywords, over those of `given`, such as a framework's own profiling section."""
    unknown = sorted(settings.keys() - set(SETTINGS))
    require(
        not unknown,
        f"{caller} got {', '.join(map(repr, unknown))}",
        why=f"the settings are {', '.join(SETTINGS)}",
        instead="Pass one of these, or leave it out",
    )
    theirs = {name: getattr(given, name) for name in SETTINGS if hasattr(given, name)}
    config = ProfilingConfig(**(theirs | dict(settings)))
    env = LaunchEnv.read()
    known = None if env.launcher == "none" else env.world_size
    config.finalize(train_iters=train_iters, world_size=known, spelled=spelled)
    return config


def loader_facts(loader: Any) -> dict[str, object]:
    """`batch_size`, samples that a rank fetches at a time, and `dataset_size`, as far as a loader or its iterator says."""
    found: dict[str, object] = {}
    for name, places in _LOADER_FACTS.items():
        for place in places:
            with contained():  # whatever a loader's attributes do, and datasets without a length
                value = functools.reduce(getattr, place, loader)
                found.setdefault(name, whole_number(len(value) if name == "dataset_size" else value))
    return found


#: Where torch's loaders, their iterators, and those that wrap them have it.
_LOADER_FACTS = {
    "batch_size": (
        ("batch_size",),
        ("batch_sampler", "batch_size"),
        ("batch_sampler", "batch_sampler", "batch_size"),
        ("_index_sampler", "batch_size"),
    ),
    "dataset_size": (("dataset",), ("_dataset",)),
}


def current_hook() -> ProfilingHook | None:
    """The hook that was opened last in this process, of those that are open."""
    return _open_sessions[-1].hook if _open_sessions else None


def connected_ranks() -> LaunchEnv:
    """Rank and world size in torch.distributed; a process that is not connected trains alone, whatever launched it."""
    return LaunchEnv.current({})


def world_size() -> int:
    """The number of ranks connected through torch.distributed, 1 if this process is not connected."""
    return connected_ranks().world_size
