"""Checks of the request itself, with the same result on every machine: its profilers, its window and its ranks."""

from __future__ import annotations

from collections.abc import Iterator

from bridge_profiling import config
from bridge_profiling.doctor.machine import Machine, join
from bridge_profiling.doctor.request import Request
from bridge_profiling.doctor.verdict import Verdict, checked, fails, ok, unknown, warning
from bridge_profiling.layout import normalize_ranks

#: In slime #2397, 128 ranks that wrote 150 MB each stalled the job.
_MANY = 64


@checked("profilers")
def check_profilers(request: Request, machine: Machine) -> Iterator[Verdict]:
    """At most one profiler that needs CUPTI, and no nsys with fault tolerance."""
    profiling = request.profiling
    if not request.name:
        return
    config.check_exclusive(use_nsys_profiler=request.wants_nsys, use_pytorch_profiler=profiling.use_pytorch_profiler)
    if request.wants_nsys and (request.launcher == "ft" or request.ft.enable_ft_package):
        cause = "the launcher is ft" if request.launcher == "ft" else "ft.enable_ft_package is true"
        found = f"nsys is on, and {cause}: Nsys not supported with the FaultTolerancePlugin, so it writes no report"
        yield fails(found, "Use the torch profiler (profiling.use_pytorch_profiler=true), or no fault tolerance")
    elif request.nsys_prefix and not profiling.use_nsys_profiler:
        found = "the launcher starts nsys, but profiling.use_nsys_profiler is off: nothing marks the window for it"
        yield warning(found, "Add NsysPlugin, which sets both, or type profiling.use_nsys_profiler=true")
    elif not profiling.enabled:
        instead = "Type profiling.use_pytorch_profiler=true or profiling.use_nsys_profiler=true, or add a plugin"
        yield warning("no profiler is on, so nothing will be captured", instead)
    else:
        chosen = {
            "nsys": request.wants_nsys,
            "the torch profiler": profiling.use_pytorch_profiler,
            "memory history": profiling.record_memory_history,
        }
        yield ok(" and ".join(name for name, on in chosen.items() if on))


@checked("window")
def check_window_fits(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether the training runs through the whole window."""
    if not request.name:
        return
    window, train_iters = request.profiling.window, request.integer("train.train_iters")
    first = request.integer("train.start_iteration") or 0
    config.check_window(window.start, window.end)
    config.check_window_fits(window.end, train_iters)
    later = f"Set profiling.profile_step_start to {first + 2} or more"
    if train_iters is None:
        found = f"iterations {window.start} to {window.last}, and train.train_iters is not known here: the recipe sets it"
        yield unknown(found, "Type train.train_iters=N with the recipe's number")
    elif window.end <= first:
        yield fails(f"training starts at train.start_iteration={first}, after the window {window}", later)
    elif window.start <= first:
        found = f"iteration {first} is the run's first: it includes lazy initialization and has no earlier one to compare with"
        yield warning(found, later)
    else:
        yield ok(f"iterations {window.start} to {window.last} of 0 to {train_iters - 1}")


@checked("ranks")
def check_ranks_exist(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether the job has the ranks to profile."""
    if not request.name:
        return
    setting = request.profiling.profile_ranks
    config.check_ranks_exist(normalize_ranks(setting), request.world_size)
    ranks = request.profiled_ranks()
    if ranks is None or request.world_size is None:
        found = f"profiling.profile_ranks={setting}, and the number of ranks is not known here"
        yield unknown(found, "Type --world-size N")
    elif len(ranks) > _MANY:
        instead = "Type profiling.profile_ranks=pp for one rank per pipeline stage, or list a few"
        yield warning(f"{len(ranks)} ranks write a trace each, and the others wait for them", instead)
    else:
        yield ok(f"{join(ranks)} of {request.world_size}")
