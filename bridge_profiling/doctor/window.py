"""The window against the run's length, and the ranks against the world."""

from __future__ import annotations

from collections.abc import Iterator

from bridge_profiling import config
from bridge_profiling.doctor.machine import Machine, join
from bridge_profiling.doctor.request import Request
from bridge_profiling.doctor.verdict import Verdict, fails, ok, refused, unknown, warning
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.layout import normalize_ranks, select_ranks


def check_window_fits(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether the training runs through the whole window."""
    profiling, train = request.profiling, request.settings.train
    if not request.name:
        return
    try:
        config.check_window(profiling.profile_step_start, profiling.profile_step_end)
        config.check_window_fits(profiling.profile_step_end, train.train_iters)
    except ProfilingConfigError as error:
        yield refused("window", error)
        return
    window = profiling.window
    if train.train_iters is None:
        yield unknown(
            "window",
            f"iterations {window.start} to {window.last}, and train.train_iters is not known here: the recipe sets it",
            "Type train.train_iters=N with the recipe's number",
        )
    elif window.end <= train.start_iteration:
        yield fails(
            "window",
            f"the training starts at train.start_iteration={train.start_iteration}, after the window {window}",
            f"Set profiling.profile_step_start to {train.start_iteration + 2} or more",
        )
    elif window.start <= train.start_iteration:
        yield warning(
            "window",
            f"iteration {train.start_iteration} is the run's first: it pays for lazy initialisation, and no step before it"
            " can be compared with it",
            f"Set profiling.profile_step_start to {train.start_iteration + 2} or more",
        )
    else:
        yield ok("window", f"iterations {window.start} to {window.last} of 0 to {train.train_iters - 1}")


def check_ranks_exist(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether the job has the ranks that are to be profiled."""
    if not request.name:
        return
    try:
        chosen = normalize_ranks(request.profiling.profile_ranks)
        config.check_ranks_exist(chosen, request.world_size)
        layout = request.layout()
    except ProfilingConfigError as error:
        yield refused("ranks", error)
        return
    if layout is None:
        yield unknown(
            "ranks",
            f"profiling.profile_ranks={_shown(chosen)}, and the number of ranks is not known here",
            "Type --world-size N",
        )
        return
    ranks = select_ranks(chosen, layout)
    if len(ranks) > _MANY:
        yield warning(
            "ranks",
            f"{len(ranks)} ranks write a trace each, and those that do not are held up by them",
            "Type profiling.profile_ranks=pp for one rank a pipeline stage, or list a few",
        )
    else:
        yield ok("ranks", f"{join(ranks)} of {layout.world_size}")


#: 128 ranks that dumped 150 MB each were somebody's trouble (slime #2397).
_MANY = 64


def _shown(ranks: list[int] | str) -> str:
    return ranks if isinstance(ranks, str) else f"[{','.join(map(str, ranks))}]"
