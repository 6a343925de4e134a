"""The nsys of this machine: whether there is one, which version, and what of the request it will not do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bridge_profiling.doctor.machine import Machine, Unavailable
from bridge_profiling.doctor.request import Request
from bridge_profiling.doctor.verdict import Verdict, fails, ok, refused, unknown, warning
from bridge_profiling.errors import CaptureError, ProfilingConfigError
from bridge_profiling.nsys.options import DEFAULT_OPTIONS, check_extra_args, check_trace, merge_options, split_options
from bridge_profiling.nsys.version import NsysVersion, find_nsys

_INSTALL = "Install Nsight Systems, or mount one and put its bin directory on PATH (docs/how-to/into-a-container.md)"

#: Options by which nsys interrupts the CPUs to see what they run; off by default.
_CPU_OPTIONS = {"--sample": ("none",), "--cpuctxsw": ("none",)}

#: The kernel's bits of CapEff.
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38

#: The identity map of a user namespace that is the machine's own.
_WHOLE_RANGE = "4294967295"


def check_nsys(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether nsys is here, and which of the options it does not know."""
    if request.name and not request.wants_nsys:
        return
    executable = machine.which("nsys")
    if executable is None:
        found = "nsys is not on this machine's PATH"
        yield fails("nsys", found, _INSTALL) if request.wants_nsys else warning("nsys", f"{found}: NsysPlugin fails", _INSTALL)
        return
    try:
        version = find_nsys(executable)
    except CaptureError as error:
        yield fails("nsys", str(error), _INSTALL) if request.wants_nsys else warning("nsys", str(error), _INSTALL)
        return
    yield ok("nsys", f"{version.text} at {executable}")
    yield from _check_options(request, version)
    if request.wants_gpu_metrics or not request.name:
        yield from _check_gpu_metrics(request, version, machine)


def _check_options(request: Request, version: NsysVersion) -> Iterator[Verdict]:
    profiling = request.profiling
    try:
        if profiling.nsys_trace is not None:
            check_trace(profiling.nsys_trace, name="profiling.nsys_trace")
        check_extra_args(profiling.nsys_extra_args, name="profiling.nsys_extra_args")
    except ProfilingConfigError as error:
        yield refused("nsys options", error)
        return
    asked = [*request.nsys_options, *profiling.nsys_extra_args]
    asked_names = {name for name, _ in split_options(asked)}
    unknown_options = False
    fitted = not request.nsys_prefix or profiling.use_nsys_profiler
    for name, text in version.adapt(merge_options(DEFAULT_OPTIONS, asked))[1].items():
        # A default that a version does not know is left out silently in the job as well.
        if name in asked_names:
            unknown_options = True
            if fitted:
                yield warning("nsys options", text, "Leave it out, or install another version of nsys")
            else:
                instead = "Add NsysPlugin, which fits the options where the job runs, or take it out of the launcher's"
                yield fails("nsys options", f"nsys {version.text} does not know {name}, and does not start with it", instead)
    if request.wants_nsys and not unknown_options:
        yield ok("nsys options", f"nsys {version.text} knows what is asked of it: {' '.join(asked) or 'the defaults'}")


def _check_gpu_metrics(request: Request, version: NsysVersion, machine: Machine) -> Iterator[Verdict]:
    try:
        machine.read("/proc/driver/nvidia/version")
    except Unavailable:
        return  # The permission's line says it.
    try:
        device = version.gpu_metrics_device(0)
    except CaptureError as error:
        report = fails if request.wants_gpu_metrics else warning
        yield report("GPU metrics", str(error), "Leave nsys_gpu_metrics out, or install an nsys that knows this GPU")
    else:
        yield ok("GPU metrics", f"nsys {version.text} samples them (device {device} for local rank 0)")


def check_gpu_metrics_permission(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether this user may read the GPU's performance counters."""
    if request.name and not request.wants_gpu_metrics:
        return
    check = "GPU-metric permission"
    try:
        admin_only = _admin_only(machine.read("/proc/driver/nvidia/params"))
    except Unavailable as reason:
        yield unknown(check, f"no NVIDIA driver is loaded here ({reason})", "Run doctor where the job runs")
        return
    if admin_only is None:
        yield unknown(check, "/proc/driver/nvidia/params does not say whether profiling is for administrators only")
    elif not admin_only:
        yield ok(check, "every user may sample GPU metrics (RmProfilingAdminOnly: 0)")
    elif _has_capability(machine, _CAP_SYS_ADMIN):
        yield ok(check, "for administrators only (RmProfilingAdminOnly: 1), and this process has CAP_SYS_ADMIN")
    else:
        report = fails if request.wants_gpu_metrics else warning
        yield report(
            check,
            "for administrators only (RmProfilingAdminOnly: 1), and this process has no CAP_SYS_ADMIN: nsys samples no GPU"
            " metrics; CUDA and NVTX are traced all the same",
            "Leave nsys_gpu_metrics out, start the container with CAP_SYS_ADMIN, or ask the administrator for"
            " `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d",
        )


def check_cpu_sampling(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether nsys may sample the CPUs, where it is asked to."""
    asked = _cpu_options(request)
    if request.name and not asked:
        return
    check = "CPU sampling"
    try:
        level = int(machine.read("/proc/sys/kernel/perf_event_paranoid"))
    except (Unavailable, ValueError) as reason:
        yield unknown(check, f"the kernel's perf_event_paranoid is not known: {reason}")
        return
    found = f"perf_event_paranoid is {level}"
    allowed = level <= 2 or _has_capability(machine, _CAP_SYS_ADMIN) or _has_capability(machine, _CAP_PERFMON)
    if allowed:
        yield ok(check, f"{found}: nsys may sample this user's processes" if level <= 2 else f"{found}, but this user may")
    elif asked:
        instead = "Leave it out (the defaults sample no CPU), or ask the administrator for kernel.perf_event_paranoid=2"
        yield fails(check, f"{found}, so {' '.join(asked)} is refused", instead)
    else:
        yield ok(check, f"{found}: not allowed, and not needed, since the defaults sample no CPU")


def check_temporary_directory(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether nsys has a temporary directory: without one it starts nothing."""
    if request.name and not request.wants_nsys:
        return
    place = request.environment.get("TMPDIR") or machine.environ.get("TMPDIR") or "/tmp"
    if not Path(place).is_dir():
        report = fails if request.wants_nsys else warning
        yield report("TMPDIR", f"{place} is no directory here, and nsys collects there", "Create it, or unset TMPDIR")


def _cpu_options(request: Request) -> list[str]:
    asked = [*request.nsys_options, *request.profiling.nsys_extra_args]
    return [
        " ".join(tokens)
        for name, tokens in split_options(asked)
        if name in _CPU_OPTIONS and (tokens[0].partition("=")[2] or (tokens[1:] or ["none"])[0]) not in _CPU_OPTIONS[name]
    ]


def _admin_only(params: str) -> bool | None:
    for line in params.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("RmProfilingAdminOnly", "NVreg_RestrictProfilingToAdminUsers"):
            return value.strip() != "0"
    return None


def _has_capability(machine: Machine, bit: int) -> bool:
    """Whether this process holds a capability over the machine; one inside a user namespace is not over the driver."""
    try:
        status, uid_map = machine.read("/proc/self/status"), machine.read("/proc/self/uid_map")
    except Unavailable:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> bit & 1) and uid_map.split()[-1:] == [_WHOLE_RANGE]
