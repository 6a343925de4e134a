"""Puts a rank under nsys at its start, if it is one of those that nsys is to profile; the other ranks run without.

The process becomes a supervisor (nsys_supervisor.py) that starts nsys, which starts the same command again. Its number
stays, so torchrun and srun go on supervising it. Where nsys cannot be started the rank trains without it, and its manifest
says why.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bridge_profiling.config import ProfilingConfig, resolve_output_dir
from bridge_profiling.errors import CaptureError, one_line
from bridge_profiling.layout import ParallelLayout, select_ranks
from bridge_profiling.nsys.channel import HANDOVER_VARIABLE, REFUSED_VARIABLE, Handover
from bridge_profiling.nsys.options import (
    DEFAULT_OPTIONS,
    DEFAULT_TRACE,
    captures_of,
    merge_options,
    reports_with_range,
    value_of,
)
from bridge_profiling.nsys.version import NsysVersion, adapt, find_nsys, gpu_metrics_device
from bridge_profiling.processes import Watch

logger = logging.getLogger(__name__)

#: The NVTX range that the hook opens for the window; nsys' capture range where there is no CUDA device.
CAPTURE_RANGE = "bridge_profiling_window"

#: APIs that need a CUDA device.
_CUDA_ONLY = frozenset({"cuda", "cuda-hw", "cuda-sw", "cublas", "cublas-verbose", "cudnn", "cusparse", "cusolver", "nccl"})

#: Settings of nsys itself that its manual does not tell, as `name=value;name=value`.
DIRECTIVES_VARIABLE = "NSYS_CONFIG_DIRECTIVES"

#: One of them, false by default: CUPTI is detached when the collection ends. Left attached, it costs a step that is bound by
#: its launches 6 % for the rest of the run (docs/benchmarks.md).
_DETACH = "CuptiFinalizeOnStop"

#: The versions with which that is known to work; others are not given what their manual does not tell.
_VERSIONS_THAT_DETACH = ("2024.2.",)


def runs_under_nsys(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an nsys is attached to this process, as its injection shows in the environment."""
    return "NSYS_PROFILING_SESSION_ID" in environ


def start_under_nsys(config: ProfilingConfig, *, rank: int, layout: ParallelLayout, local_rank: int, cuda: bool) -> None:
    """Start this process again under nsys, if nsys is asked for on this rank and does not run around it yet.

    Call it before anything that must not happen twice, and before CUDA is used; it returns only where nothing is to be done.
    What the process has done until then is lost with its memory.

    Args:
        config: the finalized `profiling` section.
        rank: global rank; it names the report.
        layout: the job's parallel layout.
        local_rank: rank on this machine; the number of its GPU.
        cuda: whether the training uses a CUDA device; without one the window is marked by an NVTX range.
    """
    if Handover.of_this_process() is not None:
        _end_with_supervisor()
        return
    selected = config.use_nsys_profiler and rank in select_ranks(config.profile_ranks, layout)
    if not selected or runs_under_nsys() or REFUSED_VARIABLE in os.environ:
        return
    try:
        command = _supervisor(config, rank=rank, local_rank=local_rank, cuda=cuda)
    except (CaptureError, OSError) as error:
        reason = str(error) if isinstance(error, CaptureError) else one_line(error)
        os.environ[REFUSED_VARIABLE] = reason
        logger.error("rank %d: training without nsys: %s", rank, reason)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


@contextmanager
def exit_code_told() -> Iterator[None]:
    """Tell the supervisor, if there is one, how the block ends: it answers to the launcher even when nsys is lost."""
    code: object = 1
    try:
        yield
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        raise
    finally:
        handover = Handover.of_this_process()
        if handover is not None:
            with suppress(OSError):
                handover.write("exit", code=code)


def nsys_command(
    config: ProfilingConfig, version: NsysVersion, *, report: Path, local_rank: int, cuda: bool
) -> tuple[list[str], list[str]]:
    """The command that runs nsys, without the application, and warnings about what of the request this nsys cannot do.

    Args:
        config: the `profiling` section.
        version: the nsys that will run it.
        report: the report's path, without its ending.
        local_rank: rank on this machine.
        cuda: whether the training uses a CUDA device.
    """
    trace = list(config.nsys_trace or DEFAULT_TRACE)
    # nsys' own default ends the application with its capture.
    end = f"repeat:{config.nsys_capture_count}" if config.nsys_capture_count > 1 else "stop"
    capture = ["--capture-range=cudaProfilerApi"] if cuda else ["--capture-range=nvtx", f"--nvtx-capture={CAPTURE_RANGE}"]
    capture = [] if value_of(config.nsys_extra_args, "--capture-range") else [*capture, f"--capture-range-end={end}"]
    warnings: list[str] = []
    if not cuda:
        left_out = [name for name in trace if name in _CUDA_ONLY]
        trace = [name for name in trace if name not in _CUDA_ONLY]
        if left_out and config.nsys_trace:
            warnings.append(f"no CUDA device: left out --trace={','.join(left_out)}")
        trace = trace or ["nvtx"]
    options = merge_options([*DEFAULT_OPTIONS, *capture], config.nsys_extra_args)
    if config.nsys_gpu_metrics and cuda:
        try:
            device = gpu_metrics_device(version, local_rank)
            options = merge_options([f"--gpu-metrics-devices={device}"], options)
        except CaptureError as error:
            warnings.append(str(error))
    elif config.nsys_gpu_metrics:
        warnings.append("no CUDA device: no GPU metrics")
    options, unknown = adapt(options, version)
    head = [version.executable, "profile", f"--trace={','.join(trace)}", f"--output={report}"]
    # A default that a version does not know is none of the user's business.
    asked = {argument.split("=", 1)[0] for argument in config.nsys_extra_args}
    return [*head, *options], warnings + [text for text in unknown if any(name in text for name in asked | {"gpu-metrics"})]


def directives(version: NsysVersion, options: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """NSYS_CONFIG_DIRECTIVES for an nsys: the user's own, and that CUPTI is detached when its one capture is over.

    Args:
        version: the nsys.
        options: of its `profile` command.
        environ: where the user's own are; what they say of detaching stands.
    """
    own = environ.get(DIRECTIVES_VARIABLE, "")
    one_capture = value_of(options, "--capture-range-end") == "stop"
    if not one_capture or not version.text.startswith(_VERSIONS_THAT_DETACH) or _DETACH.lower() in own.lower():
        return own
    return ";".join(filter(None, [own.rstrip(";"), f"{_DETACH}=true"]))


def _supervisor(config: ProfilingConfig, *, rank: int, local_rank: int, cuda: bool) -> list[str]:
    """The supervisor's command, with all it needs written down for it.

    Raises:
        CaptureError: no nsys that runs.
        OSError: the output directory cannot be written.
    """
    if not sys.orig_argv[1:]:
        raise CaptureError("an interactive interpreter cannot be started again under nsys")
    version = find_nsys()
    staging = resolve_output_dir(config) / "nsys" / f".rank-{rank}.{os.uname().nodename}.{os.getpid()}"
    staging.mkdir(parents=True, exist_ok=True)
    nsys, warnings = nsys_command(config, version, report=staging / "report", local_rank=local_rank, cuda=cuda)
    for warning in warnings:
        logger.warning("rank %d: %s", rank, warning)
    handover = Handover(Path(tempfile.mkdtemp(prefix=f"bridge_profiling-nsys-{rank}-")))
    handover.write(
        "spec",
        rank=rank,
        supervisor=os.getpid(),
        nsys=nsys,
        version=version.text,
        warnings=warnings,
        # The interpreter itself: what was typed may be a name that PATH resolves differently elsewhere.
        command=[sys.executable, *sys.orig_argv[1:]],
        report=str(staging / "report.nsys-rep"),
        export_sqlite=config.nsys_export_sqlite,
        captures=captures_of(nsys[2:]),
        # Of several captures nsys 2024.2 makes the reports when it has made the last, or the training has ended.
        reports_with_range=reports_with_range(nsys[2:]) and captures_of(nsys[2:]) == 1,
    )
    os.environ[HANDOVER_VARIABLE] = str(handover.directory)
    if cuda and (told := directives(version, nsys[2:])):
        os.environ[DIRECTIVES_VARIABLE] = told
    root = Path(__file__).resolve().parents[2]
    # By its path and not by -m: a training started by its own path need not have this package where -m looks.
    start = (
        f"import sys; sys.path.insert(0, {json.dumps(str(root))}); from bridge_profiling.nsys.supervisor import main; main()"
    )
    return [sys.executable, "-c", start]


def _end_with_supervisor() -> None:
    """End this process when its supervisor is killed, as it would have been killed itself without nsys around it."""
    handover = Handover.of_this_process()
    assert handover is not None
    try:
        supervisor = Watch(handover.read("spec")["supervisor"])
    except (KeyError, OSError):
        return

    def wait() -> None:
        supervisor.ended(None)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="bridge_profiling supervisor watch", daemon=True).start()
