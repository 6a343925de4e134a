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
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bridge_profiling.capture.files import asked_in_time
from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.capture.signals import raised_by_handler, unwind_on
from bridge_profiling.capture.work import IterationWork
from bridge_profiling.common.errors import ProfilingConfigError, TrainingLogger, contained, one_line, require
from bridge_profiling.common.launch_env import LAUNCH_VARIABLE, LaunchEnv, initialized_distributed
from bridge_profiling.common.plain import shown, whole_number, whole_text
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import ProfilingConfig
from bridge_profiling.settings.window import FIELDS, Spelling, select_ranks

if TYPE_CHECKING:
    from bridge_profiling.frameworks.phases import PhaseMemory, PhaseWatch, RangeOf

logger = TrainingLogger(__name__)

Batch = TypeVar("Batch")
Result = TypeVar("Result")

#: Root of captures, as an argument.
OutputDir = str | os.PathLike[str] | None

#: Fetched after the last batch.
END: Any = object()

#: How long torchrun's store may take to answer. It runs before the first rank starts.
_STORE_SECONDS = 10.0

#: Names of the settings.
SETTINGS = tuple(field.name for field in dataclasses.fields(ProfilingConfig))

#: Drivers of this process with an open hook, the latest last.
_open_drivers: list[ProfilingDriver] = []


class ProfilingDriver:
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
        before_end: called with the iteration before a captured iteration ends.
        signals: restores signals at the end of the training.
    """

    def __init__(self, config: ProfilingConfig, output_dir: OutputDir = None, *, close_on_error: bool = False) -> None:
        self.config = config
        self.hook: ProfilingHook | None = None
        self.phases: PhaseWatch | None = None
        self.iteration = 0
        self.before_end: Callable[[int], None] | None = None
        self._output_dir, self._close_on_error = output_dir, close_on_error
        self._current: AbstractContextManager | None = None
        self._memory: PhaseMemory | None = None
        self.signals = ExitStack()
        self._process, self._thread = os.getpid(), threading.get_ident()

    def __reduce__(self) -> tuple[type[ProfilingDriver], tuple[object, ...]]:
        return ProfilingDriver, (self.config, self._output_dir)

    # -- open and close ----------------------------------------------------------------------------------------------

    def open(
        self,
        layout: ParallelLayout | None = None,
        facts: Mapping[str, object] | None = None,
        *,
        watch: Callable[[PhaseWatch], None] | None = None,
        range_of: RangeOf | None = None,
        exit_signal: int | None = signal.SIGTERM,
        independent: bool = False,
        **hook_arguments: Any,
    ) -> bool:
        """Open the hook; every rank calls it. A failure is logged, and nothing is captured. Returns whether it is open.

        `facts` are the manifest's `framework` section, `watch` selects phases, and `exit_signal` becomes SystemExit on profiled
        ranks. Ranks that are `independent` open their hooks at different times, or never, so they must not communicate; every
        phase of theirs is watched, and signals are left to the hook.
        """
        self.close(RuntimeError("the training was started again in the same process"))
        try:
            env = LaunchEnv.current() if independent else connected_ranks()
            layout = layout or ParallelLayout(world_size=env.world_size)
            # Child processes inherit the environment, so the launch has its name only while the hook opens.
            with restored(LAUNCH_VARIABLE):
                if independent:
                    name_launch()
                self.start(facts=facts, rank=env.rank, layout=layout, **hook_arguments)
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

    def start(self, *, facts: Mapping[str, object] | None = None, **hook_arguments: Any) -> None:
        """Open the hook for a rank that the caller knows, unless nothing can be captured.

        Raises ProfilingConfigError for settings that don't fit the job.
        """
        if not self.config.enabled and self.config.on_demand is False:
            return
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._memory = None
        self.hook = ProfilingHook(self.config, output_dir=self._output_dir, **hook_arguments).__enter__()
        self.hook.facts.update(facts or {})
        _open_drivers.append(self)

    def close(self, error: BaseException | None = None) -> None:
        """Close the hook at the end of the training, which `error` ended, if given; writes the capture.

        An open iteration never reached its end, so it does not count as captured.
        """
        self.abandon_iteration(error)
        hook, self.hook = self.hook, None
        if hook is None:
            return
        _open_drivers.remove(self)
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

    def describe(self, facts: Mapping[str, object]) -> None:
        """Add facts to the manifest's `framework` section."""
        if self.hook is not None:
            self.hook.facts.update(facts)

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
    def on_first_rank(self) -> bool:
        """Whether this is the first profiled rank, where every rank is data-parallel."""
        here = LaunchEnv.current()
        return here.rank == select_ranks(self.config.profile_ranks, ParallelLayout(world_size=here.world_size))[0]

    @property
    def in_own_thread(self) -> bool:
        """Whether this is the process and the thread that opened the hook."""
        return self.in_own_process and threading.get_ident() == self._thread

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
        if self.before_end is not None and captured:
            self.guard(self.before_end, self.iteration)
        current.__exit__(type(error) if error else None, error, None)
        if error is not None and captured and self._close_on_error:
            self.close(error)

    def abandon_iteration(self, error: BaseException | None = None) -> None:
        """End the open iteration, if any, so that it does not count as captured."""
        if self.in_iteration:
            self.end_iteration(error or StopIteration())

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
            from bridge_profiling.frameworks.phases import memory_of_this_process

            self._memory = memory_of_this_process()
            unavailable = "unavailable: this process trains on no CUDA device"
            hook.facts["phase_memory"] = self._memory.table if self._memory is not None else unavailable
        return self._memory.around(self.iteration, name, one) if self._memory is not None else one


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


class Closing:
    """A context manager that closes its driver."""

    _driver: ProfilingDriver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self._driver.close(error)

    def _fetch(self, source: Iterator[Any]) -> Any:
        with self._driver.watched_phase("data-loading"):
            return next(source, END)


class LoopProfiling(Closing):
    """A context manager around a hand-written training loop. A subclass describes and watches its framework.

    Args:
        config: the settings.
        output_dir: root of captures; overrides the config's and BRIDGE_PROFILING_DIR.
        layout: where each rank is; overrides the layout found.
        work: the computation of one iteration of the whole job.
    """

    def __init__(
        self, config: ProfilingConfig, output_dir: OutputDir, layout: ParallelLayout | None, work: IterationWork | None
    ) -> None:
        self._driver, self._layout, self._work = ProfilingDriver(config, output_dir), layout, work
        self._next = 0

    def _describe(self) -> tuple[ParallelLayout, dict[str, object]]:
        """The layout found, and the facts for the manifest."""
        raise NotImplementedError

    def _watch(self, phases: PhaseWatch) -> None:
        """Watch the framework's phases."""

    def _conclude(self, facts: dict[str, object]) -> None:
        """Add facts that are known at the end of the training."""

    def __enter__(self) -> Self:
        self._next = 0
        layout, facts = self._driver.guard(self._describe) or (None, {})
        facts |= {"iteration": "optimizer step", "world_size": world_size()}
        self._driver.open(self._layout or layout, facts, watch=self._watch, work=self._work)
        return self

    def _close(self, error: BaseException | None) -> None:
        if self._driver.hook is not None:
            self._driver.guard(self._conclude, self._driver.hook.facts)
        # A `break` leaves its iteration open, which is complete.
        self._driver.end_iteration(error)
        super()._close(error)

    def steps(self, batches: Iterable[Batch], start: int | None = None, micro_batches: int = 1) -> Iterator[Batch]:
        """Yield the batches, with an iteration around the loop's body for each.

        The next batch is fetched at the end of an iteration, so each iteration contains the wait for the following batch, and
        there are as many iterations as batches. After a `break`, the iteration ends when the `with` block is left.

        Args:
            batches: the loader, or any iterable.
            start: number of complete iterations, after a resume; by default the count continues from the previous loop (an
                epoch), the first from 0.
            micro_batches: batches per iteration, for gradient accumulation.
        """
        if start is not None:
            try:
                self._next = whole_number(start)
            except ValueError as error:
                raise ProfilingConfigError(f"steps() got start={shown(start)}", why=str(error)) from None
        require(
            isinstance(micro_batches, int) and micro_batches >= 1,
            f"steps() got micro_batches={micro_batches!r}",
            why="an iteration has at least one batch",
            instead="Leave it out, or pass the number of batches of each optimizer step",
        )
        source = iter(batches)
        self._driver.describe(loader_facts(batches) | {"gradient_accumulation": micro_batches})
        batch = self._fetch(source)
        while batch is not END:
            self._driver.begin_iteration(self._next)
            self._next += 1
            for _ in range(micro_batches):
                # An exception in the body ends this generator as a `break` does; `__exit__` distinguishes them.
                yield batch
                batch = self._fetch(source)
                if batch is END:
                    break
            self._driver.end_iteration()

    def step(self, iteration: int) -> AbstractContextManager:
        """A context manager around global iteration `iteration`, counted from 0 across resumes, for a loop of another form."""
        return self._driver.step(iteration)

    def phase(self, name: str) -> AbstractContextManager:
        """A context manager that names a phase inside the window: `host-to-device`, `evaluation`, or any other."""
        return self._driver.watched_phase(name)


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


def current_hook() -> ProfilingHook | None:
    """The hook that was opened last in this process, of those that are open."""
    return _open_drivers[-1].hook if _open_drivers else None


def connected_ranks() -> LaunchEnv:
    """Rank and world size in torch.distributed; a process that is not connected trains alone, whatever launched it."""
    return LaunchEnv.current({})


def world_size() -> int:
    """The number of ranks connected through torch.distributed, 1 if this process is not connected."""
    return connected_ranks().world_size


# -- the name of a launch ---------------------------------------------------------------------------------------------


def name_launch(environ: MutableMapping[str, str] = os.environ) -> None:
    """Name the launch in the environment, so all ranks choose the same folder and other launches another, without a barrier.

    The first rank to ask leaves a name in the store of torchrun or torch.distributed, and the others find it there. Without a
    name, the hooks of the ranks that capture wait for each other.
    """
    env = LaunchEnv.read(environ)
    if env.launch_is_named:
        return
    name = env.launch_id if env.world_size > 1 else ""
    distributed = initialized_distributed()
    # The launcher's own id is nearly as good as a name from its store.
    with suppress(Exception):
        connect: Any = None
        if env.agent_store is not None:
            from torch.distributed import TCPStore  # here: loading torch may take longer than the store

            (host, port), limit = env.agent_store, timedelta(seconds=_STORE_SECONDS)
            connect = functools.partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=limit)
        elif distributed is not None:
            connect = distributed.distributed_c10d._get_default_store
        if connect is not None:
            key = f"bridge_profiling/launch/{env.restarts or 0}"
            name = asked_in_time(_STORE_SECONDS, lambda: connect().compare_set(key, "", uuid.uuid4().hex).decode())
    environ[LAUNCH_VARIABLE] = name or uuid.uuid4().hex


@contextmanager
def restored(variable: str) -> Iterator[None]:
    """Restore an environment variable at the end of the block."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before
