"""Whether a running job can do what a request asks for, and in which iterations: one answer for the desk and for rank 0.

Arithmetic over what the job says of itself. Reads and writes nothing, imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from bridge_profiling.capture.control.request import CaptureRequest
from bridge_profiling.config import Window
from bridge_profiling.errors import ProfilingConfigError

#: How often the ranks look, until the last of them has surely heard of a request: rank 0 reads it at one look, the others
#: its decision at the next, and as much again for a file system that is slow to show it.
_LOOKS = 4

#: Ranks are not all in the same iteration, and a profiler warms up in the one before its window.
_ITERATIONS_APART = 2

#: Fewer iterations say nothing of how fast the next ones are: the first pays for what is only done once.
MIN_COMPLETED = 3


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What a running job says of itself, as rank 0 publishes it.

    Attributes:
        run: names this run of the job, and no restart of it.
        launch: what its ranks have in common in their environments.
        job_id: the launcher's name for it.
        host: rank 0's machine.
        pid: rank 0's process there.
        pid_space: what that number means something in; None where it cannot be told.
        iteration: the one that rank 0 is in; None before its first.
        completed: how many it has timed.
        fastest_ns: the shortest of the last ten, from begin to begin where the loop waits between iterations.
        median_ns: the median of the last fifty, likewise.
        poll_seconds: how often the ranks look for a request.
        world_size: number of ranks.
        pipeline_ranks: one rank per pipeline stage.
        profile_ranks: the ranks profiled unless a request names others.
        profilers: those used unless a request names others.
        train_iters: iterations the training runs, where that is known.
        windows: `(start, end)` of those it was launched with and has not reached yet.
        records_memory: whether a memory history is being recorded for one of them.
        cuda: whether rank 0 uses a CUDA device.
        under_nsys: whether nsys runs around the ranks, or is meant to.
        nsys_captures_left: how many more captures that nsys was told to make.
        open: the request that is open, or None.
        ended: how the training ended, or None.
    """

    run: str
    launch: str
    job_id: str | None
    host: str
    pid: int
    pid_space: str | None
    iteration: int | None
    completed: int
    fastest_ns: int | None
    median_ns: int | None
    poll_seconds: float
    world_size: int
    pipeline_ranks: list[int]
    profile_ranks: list[int] | str
    profilers: list[str]
    train_iters: int | None
    windows: list[list[int]]
    records_memory: bool
    cuda: bool
    under_nsys: bool
    nsys_captures_left: int
    open: dict[str, Any] | None = None
    ended: str | None = None

    def as_json(self) -> dict[str, object]:
        """What is published."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> JobState:
        """What was published.

        Raises:
            KeyError: something is missing.
        """
        return cls(**{one.name: content[one.name] for one in fields(cls)})

    @property
    def nearest(self) -> int | None:
        """The nearest iteration that every rank can hear of in time; None while nobody knows how long one takes."""
        if self.iteration is None or self.completed < MIN_COMPLETED or not self.fastest_ns:
            return None
        return self.iteration + math.ceil(_LOOKS * self.poll_seconds * 1e9 / self.fastest_ns) + _ITERATIONS_APART


@dataclass(frozen=True)
class Admitted:
    """A request as it will be carried out.

    Attributes:
        window: the iterations.
        ranks: the global ranks.
        profilers: what records them.
    """

    window: Window
    ranks: list[int]
    profilers: list[str]


def admit(request: CaptureRequest, state: JobState) -> Admitted:
    """What a job makes of a request.

    Args:
        request: a checked one.
        state: of the job.

    Raises:
        ProfilingConfigError: the job cannot do it; why, and what to ask for instead.
    """
    if state.ended is not None:
        raise ProfilingConfigError(f"the job has ended: {state.ended}", instead="Ask a job that is running")
    if request.run is not None and request.run != state.run:
        raise ProfilingConfigError(
            "the request was made for another run of this job", why="the job has been restarted since", instead="Ask again"
        )
    profilers = request.profilers or state.profilers
    ranks = _ranks(request, state)
    _check_profilers(profilers, ranks, state)
    return Admitted(_window(request, state), ranks, profilers)


def open_request(state: JobState) -> ProfilingConfigError:
    """What is told who asks while a request is open."""
    about = state.open or {}
    where = f"iterations {about['start']} to {about['end'] - 1}" if "start" in about else "it has not been read yet"
    return ProfilingConfigError(
        f"a request is open already: {where}",
        why="a job carries out one after the other",
        instead=f"Ask again after iteration {about['end']}" if "end" in about else "Ask again in a few seconds",
    )


def _ranks(request: CaptureRequest, state: JobState) -> list[int]:
    asked = state.profile_ranks if request.ranks is None else request.ranks
    listed = _listed(asked, state)
    outside = [rank for rank in listed if rank >= state.world_size]
    if outside:
        raise ProfilingConfigError(
            f"the job has no rank {', '.join(map(str, outside))}",
            why=f"its ranks are 0 to {state.world_size - 1}" if state.world_size > 1 else "it has one rank, rank 0",
            instead="Name ranks of this job, or type --ranks all",
        )
    return listed


def _listed(ranks: list[int] | str, state: JobState) -> list[int]:
    if isinstance(ranks, str):
        return state.pipeline_ranks if ranks == "pp" else list(range(state.world_size))
    return ranks


def _check_profilers(profilers: list[str], ranks: list[int], state: JobState) -> None:
    if "torch" in profilers and state.under_nsys:
        raise ProfilingConfigError(
            "the torch profiler cannot be started in this job",
            why="it was launched for nsys; both need CUPTI, and only one of them gets it",
            instead="Type --profiler nsys where the job was launched with profiling.nsys_captures above 1; or launch a job"
            " without nsys",
        )
    if "nsys" in profilers and not state.under_nsys:
        raise ProfilingConfigError(
            "nsys cannot be started in this job",
            why="nsys runs around a process from its start, and this job was launched without it",
            instead="Type --profiler torch; or launch the job with profiling.use_nsys_profiler=true profiling.nsys_captures=5",
        )
    if "nsys" in profilers and state.nsys_captures_left < 1:
        raise ProfilingConfigError(
            "nsys makes no further capture in this job",
            why="it was told at its start how many to make, and those are made or taken",
            instead="Launch the job with a larger profiling.nsys_captures",
        )
    launched = _listed(state.profile_ranks, state)
    if "nsys" in profilers and not set(ranks) <= set(launched):
        raise ProfilingConfigError(
            f"rank {min(set(ranks) - set(launched))} does not run under nsys",
            why=f"the job was launched with profiling.profile_ranks={state.profile_ranks}",
            instead="Leave --ranks out",
        )
    if "memory" in profilers and not state.cuda:
        raise ProfilingConfigError(
            "a memory history cannot be recorded in this job",
            why="it records CUDA allocations, and rank 0 uses no CUDA device",
            instead="Type --profiler torch",
        )
    if "memory" in profilers and state.records_memory:
        raise ProfilingConfigError(
            "a memory history is being recorded already",
            why="the job was launched with one, which lasts until its window ends, and there is one in a process",
            instead="Ask again after that window, or type --profiler torch",
        )


def _window(request: CaptureRequest, state: JobState) -> Window:
    if state.nearest is None:
        raise ProfilingConfigError(
            f"the job has completed {state.completed} iterations",
            why=f"after {MIN_COMPLETED} it is known how long one takes, and when all ranks will have heard of a request",
            instead="Ask again then",
        )
    taken = [Window(start, end) for start, end in sorted(state.windows)]
    if request.start is None:
        window = Window(state.nearest, state.nearest + request.iterations)
        for other in taken:
            if _touch(window, other):
                window = Window(other.end + 1, other.end + 1 + request.iterations)
    else:
        window = Window(request.start, request.start + request.iterations)
        _check_start(window, state)
        for other in taken:
            if _touch(window, other):
                raise ProfilingConfigError(
                    f"iterations {window.start} to {window.last} meet the window {other} that the job was launched with",
                    why="one profiler runs at a time, and warms up in the iteration before",
                    instead=f"Type --start {other.end + 1}, or leave --start out",
                )
    if state.train_iters is not None and window.end > state.train_iters:
        raise ProfilingConfigError(
            f"the training ends before: its last iteration is {state.train_iters - 1}",
            why=f"iterations {window.start} to {window.last} would be captured, and the job is at {state.iteration}",
            instead="Ask for fewer iterations, or a job that runs longer",
        )
    return window


def _check_start(window: Window, state: JobState) -> None:
    assert state.nearest is not None
    assert state.iteration is not None
    if window.start >= state.nearest:
        return
    instead = f"Type --start {state.nearest + max(1, (state.nearest - state.iteration) // 4)} or later, or leave --start out"
    if window.start <= state.iteration:
        raise ProfilingConfigError(
            f"iteration {window.start} is past", why=f"the job is at iteration {state.iteration}", instead=instead
        )
    raise ProfilingConfigError(
        f"iteration {window.start} is too near",
        why=f"the job is at iteration {state.iteration}, and until {state.nearest} some rank may not have heard of it",
        instead=instead,
    )


def _touch(window: Window, other: Window) -> bool:
    """Whether one would warm up, or record, while the other records."""
    return window.start - 1 < other.end and other.start - 1 < window.end
