"""Decides whether a running job can carry out a request, and in which iterations.

Works on the job's published status alone, so the client and rank 0 reach the same answer. Reads no files, imports no torch.
"""

from __future__ import annotations

import math

from bridge_profiling.capture.control.messages import MAX_OPEN, AcceptedCapture, CaptureRequest, JobStatus
from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.settings.profiling import Window
from bridge_profiling.settings.window import OPTIONS, check_ranks

#: A rank receives a request within four polls: rank 0 reads it at one, the other ranks its decision at the next, and a slow
#: file system may take as long again.
_POLLS = 4

#: Ranks are not all in the same iteration.
_ITERATIONS_APART = 1

#: The first iterations include one-time work, so they do not show how long later ones take.
_MIN_COMPLETED = 3

#: How far away a capture may be. A later one is a slip, as in 12000000 for 120, or belongs into the next launch's settings.
_FARTHEST_S = 24 * 3600


def plan_capture(request: CaptureRequest, status: JobStatus) -> AcceptedCapture:
    """The capture that a request leads to, in folder number 0; ProfilingConfigError says what to request instead."""
    require(status.ended is None, f"the job has ended: {status.ended}", instead="Name a job that is running")
    require(request.run in (None, status.run), "the job has restarted since the request", instead="Request it again")
    require(
        len(status.open) < MAX_OPEN,
        f"{MAX_OPEN} requests are open",
        instead=f"Try again after iteration {min((one.end for one in status.open), default=0)}",
    )
    require(
        request.kind == "request" or status.slow_captures_left > 0,
        "the job makes no more captures of slow iterations: profiling.slow_iteration_captures limits them",
        instead="Leave kind out",
    )
    ranks = _select_ranks(status.profile_ranks if request.ranks is None else request.ranks, status)
    check_ranks(ranks, OPTIONS, world_size=status.world_size)
    profilers = request.profilers or status.profilers
    _check_profilers(profilers, ranks, status)
    window = _plan_window(request, status)
    decided = {"start": window.start, "end": window.end, "ranks": ranks, "profilers": profilers}
    decided |= {"launch": status.launch, "run": status.run, "attempt": 0, "accepted_at_iteration": status.iteration}
    return AcceptedCapture(**vars(request) | decided)


def _select_ranks(ranks: list[int] | str, status: JobStatus) -> list[int]:
    if isinstance(ranks, str):
        return status.pipeline_ranks if ranks == "pp" else list(range(status.world_size))
    return ranks


def _check_profilers(profilers: list[str], ranks: list[int], status: JobStatus) -> None:
    require(
        "torch" not in profilers or not status.under_nsys,
        "the torch profiler cannot start in this job",
        why="the job was launched for nsys; both need CUPTI, and only one of them gets it",
        instead="Type --profiler nsys if the job has profiling.nsys_captures above 1, or launch a job without nsys",
    )
    if "nsys" in profilers:
        require(
            status.under_nsys,
            "nsys cannot start in this job",
            why="nsys runs around a process from its start, and this job was launched without it",
            instead="Type --profiler torch, or launch the job with profiling.use_nsys_profiler=true profiling.nsys_captures=5",
        )
        require(
            status.nsys_captures_left > 0,
            "nsys has no captures left in this job",
            why="their number is set when nsys starts, and all are made or reserved",
            instead="Launch the job with a larger profiling.nsys_captures",
        )
        without_nsys = set(ranks) - set(_select_ranks(status.profile_ranks, status))
        require(
            not without_nsys,
            f"rank {min(without_nsys, default=None)} does not run under nsys",
            why=f"the job was launched with profiling.profile_ranks={status.profile_ranks}",
            instead="Leave --ranks out",
        )
    if "memory" in profilers:
        require(status.cuda, "memory history records CUDA allocations; rank 0 has no GPU", instead="Type --profiler torch")
        require(
            not status.records_memory,
            "the job already records a memory history until its own window ends",
            instead="Try again after that window, or type --profiler torch",
        )
        recorded = next((one for one in status.open if "memory" in one.profilers), None)
        if recorded is not None:
            raise ProfilingConfigError(
                f"another request records a memory history until iteration {recorded.window.last}",
                instead=f"Try again after iteration {recorded.end}, or type --profiler torch",
            )


def warm_up_of(request: CaptureRequest, status: JobStatus) -> int:
    """Iterations before the window in which profilers warm up: as configured for torch, one for others."""
    is_torch = "torch" in (request.profilers or status.profilers)
    return request.settings.get("pytorch_profiler_warmup", status.warm_up) if is_torch else 1


def _plan_window(request: CaptureRequest, status: JobStatus) -> Window:
    now = status.iteration
    if now is None or status.completed < _MIN_COMPLETED or not status.fastest_ns:
        raise ProfilingConfigError(
            f"the job has completed {status.completed} iterations",
            why=f"it takes {_MIN_COMPLETED} to know how soon all ranks can start a capture",
            instead="Try again in a few seconds",
        )
    warm_up = warm_up_of(request, status)
    nearest = now + math.ceil(_POLLS * status.poll_seconds * 1e9 / status.fastest_ns) + _ITERATIONS_APART + warm_up
    start = nearest if request.start is None else request.start
    require(
        start >= nearest,
        f"iteration {start} is {'past' if start <= now else 'too soon'}",
        why=f"the job is at iteration {now}, and some ranks may not receive the request before iteration {nearest}",
        instead=f"Type --start {nearest + max(1, (nearest - now) // 4)} or later, or leave --start out",
    )
    farthest = now + int(_FARTHEST_S * 1e9 / max(status.median_ns or 0, status.fastest_ns))
    require(
        start <= farthest or request.start is None,
        f"iteration {start} is too far away: about {(start - now) * (status.median_ns or 0) / 3.6e12:.0f} hours",
        why=f"the job is at iteration {now}, and a request is for the next {_FARTHEST_S // 3600} hours",
        instead=f"Type --start {farthest} or earlier, or leave --start out",
    )
    window = Window(start, start + request.iterations)
    taken = [(Window(*bounds), status.warm_up, "the job's own window") for bounds in status.windows]
    taken += [(one.window, warm_up_of(one, status), "another request's window") for one in status.open]
    for other, others_warm_up, whose in sorted(taken, key=lambda each: each[0].start):
        if window.start - warm_up < other.end and other.start - others_warm_up < window.end:
            require(
                request.start is None,
                f"iterations {window.start} to {window.last} overlap {whose} {other}",
                why="one profiler runs at a time, and warms up before its window",
                instead=f"Type --start {other.end + warm_up}, or leave --start out",
            )
            window = Window(other.end + warm_up, other.end + warm_up + request.iterations)
    require(
        status.train_iters is None or window.end <= status.train_iters,
        f"training ends before iteration {window.last}: its last one is {(status.train_iters or 0) - 1}, and it is at {now}",
        instead="Request fewer iterations, or use a job that runs longer",
    )
    return window
