"""Decides whether a running job can carry out a request, and in which iterations.

Works on the job's published status alone, so the client and rank 0 reach the same answer. Reads no files, imports no torch.
"""

from __future__ import annotations

from bridge_profiling.capture.control.protocol import MIN_COMPLETED, AcceptedCapture, CaptureRequest, JobStatus
from bridge_profiling.config import Window, check_ranks_exist
from bridge_profiling.errors import ProfilingConfigError, require


def plan_capture(request: CaptureRequest, status: JobStatus) -> AcceptedCapture:
    """The capture that a request leads to, in folder number 0.

    Raises:
        ProfilingConfigError: the job cannot carry it out; why, and what to request instead.
    """
    require(status.ended is None, f"the job has ended: {status.ended}", instead="Name a job that is running")
    require(request.run in (None, status.run), "the job has restarted since the request", instead="Request it again")
    ranks = _select_ranks(status.profile_ranks if request.ranks is None else request.ranks, status)
    check_ranks_exist(ranks, status.world_size, name="--ranks")
    profilers = request.profilers or status.profilers
    _check_profilers(profilers, ranks, status)
    window = _plan_window(request, status)
    decided = {"start": window.start, "end": window.end, "ranks": ranks, "profilers": profilers}
    decided |= {"launch": status.launch, "run": status.run, "attempt": 0, "accepted_at_iteration": status.iteration}
    return AcceptedCapture(**vars(request) | decided)


def check_none_open(status: JobStatus, *, pending: bool = False) -> None:
    """Refuse a second request while one is pending or open.

    Raises:
        ProfilingConfigError: one is.
    """
    capture = status.open
    require(
        capture is None and not pending,
        "another request is open: " + (f"iterations {capture.start} to {capture.end - 1}" if capture else "not read yet"),
        why="a job carries out one request at a time",
        instead=f"Try again after iteration {capture.end}" if capture else "Try again in a few seconds",
    )


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
        require(
            status.cuda, "a memory history records CUDA allocations, and rank 0 uses no GPU", instead="Type --profiler torch"
        )
        require(
            not status.records_memory,
            "the job already records a memory history until its own window ends",
            instead="Try again after that window, or type --profiler torch",
        )


def _plan_window(request: CaptureRequest, status: JobStatus) -> Window:
    nearest = status.nearest_start
    if nearest is None or status.iteration is None:
        raise ProfilingConfigError(
            f"the job has completed {status.completed} iterations",
            why=f"it takes {MIN_COMPLETED} to know how soon all ranks can start a capture",
            instead="Try again in a few seconds",
        )
    start = nearest if request.start is None else request.start
    past = start <= status.iteration
    require(
        start >= nearest,
        f"iteration {start} is {'past' if past else 'too soon'}",
        why=f"the job is at iteration {status.iteration}"
        + ("" if past else f", and some ranks may not receive the request before iteration {nearest}"),
        instead=f"Type --start {nearest + max(1, (nearest - status.iteration) // 4)} or later, or leave --start out",
    )
    window = Window(start, start + request.iterations)
    for other in (Window(*bounds) for bounds in sorted(status.windows)):
        # A profiler warms up in the iteration before its window.
        if window.start - 1 < other.end and other.start - 1 < window.end:
            require(
                request.start is None,
                f"iterations {window.start} to {window.last} overlap the job's own window {other}",
                why="one profiler runs at a time, and warms up in the iteration before its window",
                instead=f"Type --start {other.end + 1}, or leave --start out",
            )
            window = Window(other.end + 1, other.end + 1 + request.iterations)
    require(
        status.train_iters is None or window.end <= status.train_iters,
        f"training ends before iteration {window.last}: its last one is {(status.train_iters or 0) - 1}",
        why=f"the request is for iterations {window.start} to {window.last}, and the job is at iteration {status.iteration}",
        instead="Request fewer iterations, or use a job that runs longer",
    )
    return window
