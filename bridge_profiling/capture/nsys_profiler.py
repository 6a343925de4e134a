"""The nsys backend: opens and closes nsys' capture range with the window, and brings nsys' report to its place.

nsys itself is started by the rank (`start_under_nsys`), by the launcher, or by hand. Without it a rank records nothing, and its
manifest says so.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from bridge_profiling.capture.profiler import Profiler
from bridge_profiling.capture.ranges import INJECTION_VARIABLE, NvtxRange, range_functions
from bridge_profiling.common.errors import CaptureError, TrainingLogger
from bridge_profiling.common.processes import WatchedProcess
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.nsys.channel import REFUSED_VARIABLE, Capture, Channel, Delivery, Spec
from bridge_profiling.nsys.command import CAPTURE_RANGE, NVTX_REMEDY, NsysRequest
from bridge_profiling.nsys.launch import ExternalNsys, link_report, restart_under_nsys, runs_under_nsys
from bridge_profiling.settings.profiling import ProfilingConfig, resolve_output_dir
from bridge_profiling.settings.window import select_ranks

logger = TrainingLogger(__name__)

_POLL_SECONDS = 0.1

#: A report of gigabytes takes minutes; the death of the supervisor is noticed at once.
_DELIVERY_SECONDS = 3600.0


def start_under_nsys(config: ProfilingConfig, *, rank: int, layout: ParallelLayout, local_rank: int, cuda: bool) -> None:
    """Restart this process under nsys if the config selects this rank and it does not run under nsys yet.

    Call it before anything that must not happen twice, and before CUDA is used: what the process holds in memory is lost. It
    returns only if it has nothing to do, or if nsys can't be started; the manifest then holds the reason.

    Args:
        config: the finalized `profiling` section.
        rank: global rank; it names the report.
        layout: the job's parallel layout.
        local_rank: rank on this machine; the number of its GPU.
        cuda: whether the training uses a CUDA device. Without one the window is marked by an NVTX range.
    """
    if config.use_nsys_profiler and rank in select_ranks(config.profile_ranks, layout):
        restart_under_nsys(nsys_request(config, rank=rank, local_rank=local_rank, cuda=cuda))


def nsys_request(config: ProfilingConfig, *, rank: int, local_rank: int, cuda: bool) -> NsysRequest:
    """The `profiling` section as a request to nsys; arguments as in `start_under_nsys`."""
    return NsysRequest(
        rank=rank,
        local_rank=local_rank,
        cuda=cuda,
        output_dir=resolve_output_dir(config),
        trace=config.nsys_trace,
        extra_args=config.nsys_extra_args,
        gpu_metrics=config.nsys_gpu_metrics,
        export_sqlite=config.nsys_export_sqlite,
        captures=config.nsys_capture_count,
    )


class NsysProfiler(Profiler):
    """Opens nsys' capture range for the window, with a range around every iteration and phase.

    The window is marked twice, because the author of the nsys command chose which mark opens the range: by the CUDA profiler
    API if there is a CUDA device, and by the NVTX range `bridge_profiling_window`.
    """

    name = "nsys"

    _channel: Channel | None = None
    _spec: Spec | None = None
    _marks: ExitStack
    #: Which of nsys' captures this is, from 1.
    _number: int | None = None
    _says_lost_ranges = False

    def open(self) -> None:
        """Raise where nothing could be recorded, so that the manifest gives the reason for the missing report."""
        import torch

        if not runs_under_nsys():
            raise CaptureError(
                os.environ.get(REFUSED_VARIABLE)
                or "this rank does not run under nsys; launch it with NsysPlugin, or type"
                " `nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop …` before the command"
            )
        self._cuda = torch.cuda.is_available()
        self._push, self._pop = range_functions(megatron_ranges=self.config.nvtx_ranges)
        self._channel = Channel.of_this_process()
        self._capture = Capture(str(self.files.manifest), str(self.files.nsys_report))
        self._check_nvtx()
        if self._channel is not None:
            self._spec = self._channel.spec
            self.notes += self._spec.notes
            if self._spec.captures == 1:
                # Now, not in `start`: an nsys that collects by the clock makes its report without ever seeing the window.
                self._number = self._channel.announce(self._capture)

    def start(self) -> None:
        """Open the capture range; a range per operator only if shapes are requested (1.47 x the step, not 1.13 x)."""
        import torch

        if self._channel is not None and self._number is None:
            self._number = self._channel.announce(self._capture)
        self._check_nvtx()
        marks = self._marks = ExitStack()
        if self._cuda:
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(int(cudart.cudaProfilerStart()))
            # Stopped even if ending a range raises: an open capture would record the rest of the run.
            marks.callback(lambda: torch.cuda.check_error(int(cudart.cudaProfilerStop())))
        marks.enter_context(self.phase_range(CAPTURE_RANGE))
        if self.config.record_shapes and self._cuda:
            marks.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))
        elif self.config.record_shapes:
            self.notes.append("no CUDA device: torch puts shapes into NVTX ranges only with one")

    def _check_nvtx(self) -> None:
        """Say that the ranges of the package nvtx are lost, where the training has imported it and this nsys refuses it."""
        package = sys.modules.get("nvtx")
        if package is None or INJECTION_VARIABLE not in os.environ or self._says_lost_ranges:
            return
        with suppress(Exception):  # another package of that name, or a release without these functions
            if package.enabled() and type(package.get_domain("bridge_profiling")).__name__ == "DummyDomain":
                lost = f"nsys does not record the ranges of nvtx {version('nvtx')} (nvtx.annotate)"
                self.notes.append(lost)
                self._says_lost_ranges = True
                logger.warning("rank %d: %s. %s.", self.files.rank, lost, NVTX_REMEDY)

    def phase_range(self, name: str) -> AbstractContextManager:
        """An NVTX range."""
        return NvtxRange(name, self._push, self._pop)

    def stop(self, interrupted: list[int]) -> Callable[[], None] | None:
        """Close the capture range. nsys then writes its report, and blocks the training until it has."""
        if interrupted:
            self.notes.append(f"iteration {interrupted[0]} was interrupted; its range in the report is not a whole iteration")
        try:
            self._marks.close()
        finally:
            if self._channel is not None:
                self._channel.write(replace(self._capture, stopped=True), self._number)
        if self._spec is None:
            return self._await_external_report
        if self._spec.reports_with_range:
            return self._await_delivery
        if self._spec.captures > 1:
            self.notes.append(
                f"capture {self._number} of {self._spec.captures}: nsys writes the reports after the last one, or when the"
                " process ends, and they are put into their places then"
            )
        else:
            self.notes.append("nsys does not stop with the window: its report comes when the process or its duration ends")
        return None

    def _await_delivery(self) -> None:
        """Wait until the supervisor has put the report into its place."""
        assert self._channel is not None
        deadline = time.monotonic() + _DELIVERY_SECONDS
        with closing(WatchedProcess(self._channel.spec.supervisor)) as supervisor:
            while (delivery := self._channel.read(Delivery, self._number)) is None:
                if supervisor.ended(_POLL_SECONDS) or time.monotonic() > deadline:
                    raise CaptureError("nsys did not deliver its report")
        self.artifacts += map(Path, delivery.artifacts)
        if delivery.error and not delivery.artifacts:
            raise CaptureError(delivery.error)
        if delivery.error:
            self.notes.append(delivery.error)

    def _await_external_report(self) -> None:
        """Find the report of an nsys that was started elsewhere, as far as its command line describes it."""
        nsys = ExternalNsys.of_this_process()
        if nsys is None or nsys.report is None:
            self.notes.append("the report is where the nsys around this process writes it")
        elif not nsys.stops_with_range:
            self.notes.append(f"nsys writes {nsys.report} when the process ends: it was not given --capture-range-end=stop")
        elif nsys.wraps_one_rank:
            self.artifacts.append(link_report(nsys.await_report(), self.files.nsys_report))
        else:
            self.notes.append("the report holds every rank that this nsys started")
            self.artifacts.append(nsys.await_report())


def check_armed() -> None:
    """Check that this rank's nsys can make a further capture; CaptureError says why not."""
    channel = Channel.of_this_process() if runs_under_nsys() else None
    if channel is None or channel.spec.captures < 2:
        raise CaptureError("this rank was not started under an nsys that makes several captures")
