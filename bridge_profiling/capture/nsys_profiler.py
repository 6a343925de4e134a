"""The nsys backend: tells the nsys around the process when the window opens and closes, and where its report belongs.

nsys itself is started outside: by the rank at its start (nsys_launch.py), by the launcher, or by hand. Started without it,
a rank records nothing and its manifest says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from bridge_profiling.capture.profiler import Profiler
from bridge_profiling.capture.ranges import NvtxRange, range_functions
from bridge_profiling.errors import CaptureError
from bridge_profiling.nsys.channel import REFUSED_VARIABLE, Handover
from bridge_profiling.nsys.external import NsysAround
from bridge_profiling.nsys.launch import CAPTURE_RANGE, runs_under_nsys
from bridge_profiling.processes import Watch

_POLL_SECONDS = 0.1

#: A report of gigabytes takes minutes; a supervisor that has died is noticed at once.
_DELIVERY_SECONDS = 3600.0


class NsysProfiler(Profiler):
    """Opens nsys' capture range for the window, with a range around every iteration and phase.

    The window is marked twice, since who typed the nsys command chose what it listens to: by the CUDA profiler API where
    there is a CUDA device, and by the NVTX range `bridge_profiling_window`.
    """

    name = "nsys"

    _handover: Handover | None = None
    _marks: ExitStack | None = None
    #: Which of several captures this is, from 1.
    _number: int | None = None

    def open(self) -> None:
        """Refuse where nothing could be recorded, so that the manifest tells why instead of a report being missing."""
        import torch

        if not runs_under_nsys():
            raise CaptureError(
                os.environ.get(REFUSED_VARIABLE)
                or "this rank does not run under nsys; launch it with NsysPlugin, or type"
                " `nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop …` before the command"
            )
        self._cuda = torch.cuda.is_available()
        push, pop = range_functions(megatron_ranges=self.config.nvtx_ranges)
        self._push: Callable[[str], object] = push
        self._pop: Callable[[str], object] = pop
        self._handover = Handover.of_this_process()
        if self._handover is not None:
            spec = self._handover.read("spec")
            self.notes += spec.get("warnings", [])
            self.notes.append(f"nsys {spec.get('version')}: {' '.join(spec.get('nsys', [])[1:])}")
            if self._captures == 1:
                self._handover.write("capture", manifest=str(self.files.manifest), report=str(self.files.nsys_report))

    @property
    def _captures(self) -> int:
        """How many captures the nsys of this rank was told to make."""
        assert self._handover is not None
        return self._handover.read("spec").get("captures", 1)

    def start(self) -> None:
        """Open the capture range; a range per operator only when shapes are asked for (1.47 x the step, not 1.13 x)."""
        if self._handover is not None and self._captures > 1:
            self._number = self._handover.begin_capture(
                self._captures, manifest=str(self.files.manifest), report=str(self.files.nsys_report)
            )
        marks = self._marks = ExitStack()
        if self._cuda:
            cudart = _cudart()
            _check(cudart.cudaProfilerStart())
            # Stopped even if ending a range raises: an open capture would record the rest of the run.
            marks.callback(lambda: _check(cudart.cudaProfilerStop()))
        marks.enter_context(self.phase_range(CAPTURE_RANGE))
        if self.config.record_shapes and self._cuda:
            marks.enter_context(_emit_nvtx())
        elif self.config.record_shapes:
            self.notes.append("no CUDA device: torch puts shapes into NVTX ranges only with one")

    def iteration_range(self, iteration: int) -> AbstractContextManager:
        """`iteration_<global iteration>`."""
        return self.phase_range(f"iteration_{iteration}")

    def phase_range(self, name: str) -> AbstractContextManager:
        """An NVTX range."""
        return NvtxRange(name, self._push, self._pop)

    def stop(self, interrupted: list[int]) -> Callable[[], None] | None:
        """Close the capture range: nsys writes its report then, and holds the training until it has."""
        assert self._marks is not None
        if interrupted:
            self.notes.append(f"iteration {interrupted[0]} was interrupted; its range in the report is not a whole iteration")
        try:
            self._marks.close()
        finally:
            if self._handover is not None:
                self._handover.write("stopped" if self._number is None else f"stopped-{self._number}")
        if self._handover is None:
            return self._await_report
        if self._number is not None:
            self.notes.append(
                f"capture {self._number} of the {self._captures} that nsys was told to make: it writes their reports after the"
                " last, or when the process ends, and they are put into their places then"
            )
            return None
        if self._handover.read("spec")["reports_with_range"]:
            return self._await_delivery
        self.notes.append("nsys was told not to end with the window: its report comes when the process ends, or its own time")
        return None

    def _await_delivery(self) -> None:
        """Wait until the supervisor has put the report where it belongs."""
        assert self._handover is not None
        supervisor = Watch(self._handover.read("spec")["supervisor"])
        deadline = time.monotonic() + _DELIVERY_SECONDS
        try:
            while not self._handover.has("delivered"):
                if supervisor.ended(_POLL_SECONDS) or time.monotonic() > deadline:
                    raise CaptureError("nsys did not deliver its report")
        finally:
            supervisor.close()
        delivered = self._handover.read("delivered")
        self.artifacts += [Path(delivered[kind]) for kind in ("report", "sqlite") if delivered[kind]]
        if delivered["error"] and not delivered["report"]:
            raise CaptureError(delivered["error"])
        if delivered["error"]:
            self.notes.append(delivered["error"])

    def _await_report(self) -> None:
        """Find the report of an nsys that somebody else started, as far as its command line tells."""
        around = NsysAround.of_this_process()
        if around is None or around.report is None:
            self.notes.append("the report is where the nsys around this process was told to write it")
            return
        if not around.stops_with_range:
            self.notes.append(f"nsys writes {around.report} when the process ends: it was not given --capture-range-end=stop")
            return
        report = around.await_report()
        if around.wraps_one_rank:
            report = around.link(report, self.files.nsys_report)
        else:
            self.notes.append("the report holds every rank that this nsys started")
        self.artifacts.append(report)


def check_armed() -> None:
    """Refuse a further capture where no nsys waits for one.

    Raises:
        CaptureError: nsys does not run around this rank, or was told to make one capture.
    """
    handover = Handover.of_this_process() if runs_under_nsys() else None
    if handover is None or handover.read("spec").get("captures", 1) < 2:
        raise CaptureError("this rank was not started under an nsys that was told to make several captures")


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()


def _check(error: Any) -> None:
    import torch

    torch.cuda.check_error(int(error))


def _emit_nvtx() -> AbstractContextManager:
    import torch

    return torch.autograd.profiler.emit_nvtx(record_shapes=True)
