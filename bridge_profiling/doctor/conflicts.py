"""What does not go together in the request itself, however it was asked for."""

from __future__ import annotations

from collections.abc import Iterator

from bridge_profiling.config import check_exclusive
from bridge_profiling.doctor.machine import Machine
from bridge_profiling.doctor.request import Request
from bridge_profiling.doctor.verdict import Verdict, fails, ok, refused, warning
from bridge_profiling.errors import ProfilingConfigError


def check_profilers(request: Request, machine: Machine) -> Iterator[Verdict]:
    """One profiler that needs CUPTI, and nsys not under fault tolerance."""
    profiling = request.profiling
    if not request.name:
        return
    try:
        check_exclusive(use_nsys_profiler=request.wants_nsys, use_pytorch_profiler=profiling.use_pytorch_profiler)
    except ProfilingConfigError as error:
        yield refused("profilers", error)
        return
    if request.wants_nsys and request.fault_tolerant:
        how = "the launcher is ft" if request.launcher == "ft" else "ft.enable_ft_package is true"
        yield fails(
            "profilers",
            f"nsys is asked for, and {how}: Nsys not supported with the FaultTolerancePlugin, so it is switched off and there"
            " will be no report",
            "Profile with the torch profiler (profiling.use_pytorch_profiler=true), or without fault tolerance",
        )
    elif request.nsys_prefix and not profiling.use_nsys_profiler:
        yield warning(
            "profilers",
            "the launcher starts nsys, and profiling.use_nsys_profiler is off: nothing marks the window for it",
            "Add NsysPlugin, which sets both, or type profiling.use_nsys_profiler=true",
        )
    elif not profiling.enabled:
        yield warning(
            "profilers",
            "no profiler is on, so nothing will be captured",
            "Type profiling.use_pytorch_profiler=true or profiling.use_nsys_profiler=true, or add a plugin",
        )
    else:
        chosen = {
            "nsys": request.wants_nsys,
            "the torch profiler": profiling.use_pytorch_profiler,
            "memory history": profiling.record_memory_history,
        }
        yield ok("profilers", " and ".join(name for name, on in chosen.items() if on))
