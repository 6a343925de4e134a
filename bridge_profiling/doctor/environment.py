"""Variables, configuration files, programs and packages that slow a job down, distort its profile, or prevent it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from bridge_profiling.common.megatron_versions import tested_requirement, untested
from bridge_profiling.doctor.checks import (
    Machine,
    Process,
    Unavailable,
    Verdict,
    checked,
    join,
    ok,
    parse_settings,
    unknown,
    warning,
)
from bridge_profiling.doctor.request import Request

_ON = "1|TRUE|YES|ON"
_HOST_MEMORY = "GPUs of one machine communicate through host memory instead of NVLink or PCIe"
_WAITS = "the host waits for every collective"

#: Settings that slow communication down or distort a profile: a pattern of the harmful values, and their effect.
_SETTINGS = {
    "NCCL_P2P_DISABLE": (_ON, _HOST_MEMORY),
    "NCCL_P2P_LEVEL": ("LOC|0", _HOST_MEMORY),
    "NCCL_SHM_DISABLE": (_ON, "ranks of one machine communicate through the network"),
    "NCCL_IB_DISABLE": (_ON, "machines communicate through TCP sockets instead of InfiniBand or RoCE"),
    "NCCL_NET": ("SOCKET", "machines communicate through TCP sockets"),
    "NCCL_NET_GDR_LEVEL": ("LOC|0", "the network card copies through host memory"),
    "NCCL_DEBUG": ("TRACE", "NCCL logs all the time, and the profile includes the cost"),
    "NCCL_DEBUG_SUBSYS": (r"(?!\^)(.*,)?(ALL|COLL|P2P)(,.*)?", "with NCCL_DEBUG=INFO, NCCL logs every collective"),
    "NCCL_ALGO": (".+", "NCCL uses this algorithm for every message size, even where another one is faster"),
    "NCCL_PROTO": (".+", "NCCL uses this protocol for every message size, even where another one is faster"),
    "NCCL_BLOCKING_WAIT": (_ON, _WAITS),
    "TORCH_NCCL_BLOCKING_WAIT": (_ON, _WAITS),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "another collective checks every collective, and the profile includes it"),
    "CUDA_LAUNCH_BLOCKING": (_ON, "the host waits for every kernel: nothing overlaps, and the profile shows another program"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON, "CUDA allocates every tensor, and the profile includes the cost"),
}

#: Settings without effect on one machine.
_BETWEEN_MACHINES = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_GDR_LEVEL")

_DCGM = (
    "DCGM is running; while it collects profiling metrics, it holds the GPU's counters, which GPU metrics need",
    "Pause it for the job: `dcgmi profile --pause`, afterwards `dcgmi profile --resume`",
)
#: Programs by name: what they hold, and what to do.
_PROGRAMS = {
    "nv-hostengine": _DCGM,
    "dcgm-exporter": _DCGM,
    "ncu": ("Nsight Compute is running; it locks the GPU's counters and clocks", "Wait for it, or end it"),
    "nsys": ("an nsys is running; simultaneous ones on one machine lose reports", "Wait for it, or end it"),
    "dynolog": ("dynolog is running; it may start the torch profiler in any training", "Coordinate with its operator"),
}

_INJECTED = "it loads another tool into the training, and CUPTI serves only one"
_LIBRARIES = "toolsinjection|nsight|cupti|scorep|vampir|libtau|extrae|darshan|hpctoolkit|libdlprof"

#: Variables that load a profiler into the training, in the form of _SETTINGS.
_INJECTIONS = {
    "CUDA_INJECTION64_PATH": (".+", _INJECTED),
    "NVTX_INJECTION64_PATH": (".+", _INJECTED),
    "LD_PRELOAD": (f".*({_LIBRARIES}).*", _INJECTED),
    "KINETO_USE_DAEMON": (".+", "a daemon may start the torch profiler during the profile"),
}

#: The number of the host's process namespace, the same on every Linux machine.
_HOST_NAMESPACE = "pid:[4026531836]"


@checked("NCCL settings")
def check_nccl_settings(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Variables and NCCL's own files with settings known to slow communication down or to distort a profile."""
    places: dict[str, Mapping[str, str]] = {"environment": {**machine.environ, **request.environment}}
    home = str(Path(machine.environ.get("HOME", "/"), ".nccl.conf"))
    for path in ("/etc/nccl.conf", machine.environ.get("NCCL_CONF_FILE") or home):
        with suppress(Unavailable):
            places[path] = parse_settings(machine.read(path), "=")
    harmful = [
        warning(f"{setting} ({place}): {effect}", f"Unset {name} for the job")
        for place, settings in places.items()
        for name, setting, effect in _harmful(_SETTINGS, settings)
        if not (name in _BETWEEN_MACHINES and request.nodes == 1)
    ]
    yield from harmful or [ok("none known to slow communication down or to distort a profile")]


@checked("other profilers")
def check_other_profilers(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Programs that hold the GPU's counters or CUPTI, and tools that would be loaded into the training."""
    environ = {**machine.environ, **request.environment}
    injected = _harmful(_INJECTIONS, environ)
    problems = [warning(f"{setting}: {effect}", f"Unset {name} for the job") for name, setting, effect in injected]
    if "NSYS_PROFILING_SESSION_ID" in environ:  # that nsys has set the other variables
        found = "doctor itself runs under nsys, and so does everything it starts"
        problems = [warning(found, "Run doctor outside the nsys command, so that only the training's own nsys uses CUPTI")]
    yield from problems
    processes = machine.processes()
    for program, (found, instead) in _PROGRAMS.items():
        pids = [process.pid for process in processes if program in _names(process)]
        if pids:
            problems.append(warning(f"{found} ({program}, process {join(pids)})", instead))
            yield problems[-1]
    if problems:
        return
    if machine.link("/proc/self/ns/pid") == _HOST_NAMESPACE:
        yield ok(f"none among the {len(processes)} processes here")
    else:
        yield unknown(f"none among the {len(processes)} processes of this container; the host's are not visible from here")


@checked("megatron-core")
def check_megatron_core(request: Request, machine: Machine) -> Iterator[Verdict]:
    """The installed release; nothing where there is none, since a job may train with another framework."""
    try:
        version = machine.package_version("megatron-core")
    except Unavailable:
        return
    problem = untested(version)
    if problem is None:
        yield ok(f"megatron-core {version} belongs to a tested series")
    else:
        yield warning(problem, f"If the job fails, type pip install {tested_requirement()}")


def _harmful(table: Mapping[str, tuple[str, str]], settings: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """The name, `name=value` and effect of each setting with a harmful value."""
    for name, (harmful, effect) in table.items():
        value = settings.get(name, "").strip()
        if re.fullmatch(harmful, value, re.IGNORECASE):
            yield name, f"{name}={value}", effect


def _names(process: Process) -> tuple[str, str]:
    # The kernel's name ends after 15 characters, and is the interpreter's for a script.
    return process.name, process.arguments[0].rpartition("/")[2] if process.arguments else ""
