"""The nsys of this machine: whether it runs, its version, and which parts of the request it cannot carry out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bridge_profiling.common.errors import CaptureError
from bridge_profiling.doctor.checks import Machine, Unavailable, Verdict, checked, fails, ok, parse_settings, unknown, warning
from bridge_profiling.doctor.request import Request
from bridge_profiling.nsys.command import (
    NVTX_REMEDY,
    NsysVersion,
    check_extra_args,
    check_trace,
    find_nsys,
    nvtx_is_too_new,
)

_INSTALL = "Install Nsight Systems, or mount one and put its bin directory on PATH (docs/first-hour/your-job.md)"

#: The kernel's bit of CapEff.
_CAP_SYS_ADMIN = 21

#: Number of ids in the identity map of the machine's own user namespace.
_WHOLE_RANGE = "4294967295"


@checked("nsys")
def check_nsys(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether nsys is installed, and which of the options it does not know."""
    if request.name and not request.wants_nsys:
        return
    wrong = list(_check_words(request))
    yield from wrong
    executable = machine.which("nsys")
    try:
        if executable is None:
            raise CaptureError("nsys is not on this machine's PATH")
        version = find_nsys(executable)
    except CaptureError as error:
        yield fails(str(error), _INSTALL, certain=request.wants_nsys)
        return
    yield ok(f"{version.text} at {executable}")
    if not wrong:
        yield from _check_options(request, version)
    yield from _check_nvtx(version, machine)
    if request.wants_gpu_metrics or not request.name:
        yield from _check_gpu_metrics(request, version, machine)


@checked("nsys options")
def _check_words(request: Request) -> Iterator[Verdict]:
    """What the job refuses whatever its nsys; also on a machine without one."""
    if request.profiling.nsys_trace is not None:
        check_trace(request.profiling.nsys_trace, name="profiling.nsys_trace")
    check_extra_args(request.profiling.nsys_extra_args, name="profiling.nsys_extra_args")
    yield from ()


@checked("nsys options")
def _check_options(request: Request, version: NsysVersion) -> Iterator[Verdict]:
    profiling = request.profiling
    asked = _options(request)
    problems = version.adapt(asked)[1]
    for name, problem in problems.items():
        if not request.nsys_prefix or profiling.use_nsys_profiler:
            yield warning(problem, "Leave it out, or install another version of nsys")
        else:
            instead = "Add NsysPlugin, which adapts the options where the job runs, or remove it from the launcher's options"
            yield fails(f"nsys {version.text} does not know {name}, and does not start with it", instead)
    if request.wants_nsys and not problems:
        yield ok(f"nsys {version.text} knows all of them: {' '.join(asked) or 'the defaults'}")


@checked("nvtx")
def _check_nvtx(version: NsysVersion, machine: Machine) -> Iterator[Verdict]:
    """Whether ranges of the package nvtx reach this nsys; ours do not need it."""
    with suppress(Unavailable):
        package = machine.package_version("nvtx")
        if nvtx_is_too_new(package, version.text):
            yield warning(f"nsys {version.text} does not record the ranges of nvtx {package} (nvtx.annotate)", NVTX_REMEDY)


@checked("GPU metrics")
def _check_gpu_metrics(request: Request, version: NsysVersion, machine: Machine) -> Iterator[Verdict]:
    try:
        machine.read("/proc/driver/nvidia/version")
        device = version.gpu_metrics_device(0)
    except Unavailable:
        return  # The check of the permission reports it.
    except CaptureError as error:
        instead = "Leave nsys_gpu_metrics out, or install an nsys that knows this GPU"
        yield fails(str(error), instead, certain=request.wants_gpu_metrics)
    else:
        yield ok(f"nsys {version.text} samples them (device {device} for local rank 0)")


@checked("GPU-metric permission", instead="Run doctor where the job runs, on a machine with an NVIDIA driver")
def check_gpu_metrics_permission(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether this user may read the GPU's performance counters; nsys traces CUDA and NVTX without them."""
    if request.name and not request.wants_gpu_metrics:
        return
    parameters = parse_settings(machine.read("/proc/driver/nvidia/params"), ":")
    restricted = parameters.get("RmProfilingAdminOnly", parameters.get("NVreg_RestrictProfilingToAdminUsers"))
    if restricted is None:
        yield unknown("/proc/driver/nvidia/params does not say whether profiling is restricted to administrators")
    elif restricted == "0":
        yield ok("every user may sample GPU metrics (RmProfilingAdminOnly: 0)")
    elif _may_administrate(machine):
        yield ok("restricted to administrators (RmProfilingAdminOnly: 1), and this process has CAP_SYS_ADMIN")
    else:
        found = "restricted to administrators (RmProfilingAdminOnly: 1), and this process lacks CAP_SYS_ADMIN"
        instead = (
            "Leave nsys_gpu_metrics out, start the container with CAP_SYS_ADMIN, or ask the administrator for"
            " `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d"
        )
        yield fails(found, instead, certain=request.wants_gpu_metrics)


@checked("TMPDIR")
def check_temporary_directory(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether nsys has a temporary directory: without one it does not start."""
    if request.name and not request.wants_nsys:
        return
    place = Path(request.environment.get("TMPDIR") or machine.environ.get("TMPDIR") or "/tmp")
    if not place.is_dir():
        found = f"{place} is not a directory, and nsys collects there"
        yield fails(found, "Create it, or unset TMPDIR", certain=request.wants_nsys)


def _options(request: Request) -> list[str]:
    return [*request.nsys_options, *request.profiling.nsys_extra_args]


def _may_administrate(machine: Machine) -> bool:
    """Whether this process has CAP_SYS_ADMIN on the machine; the driver ignores one inside a user namespace."""
    with suppress(Unavailable):
        effective = parse_settings(machine.read("/proc/self/status"), ":").get("CapEff", "0")
        return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1) and machine.read("/proc/self/uid_map").split()[-1:] == [
            _WHOLE_RANGE
        ]
    return False
