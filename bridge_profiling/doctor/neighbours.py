"""Other profilers that already hold what ours needs: seen in the process table and in the environment."""

from __future__ import annotations

from collections.abc import Iterator

from bridge_profiling.doctor.machine import Machine, Process, Unavailable, join
from bridge_profiling.doctor.request import Request
from bridge_profiling.doctor.verdict import Verdict, ok, unknown, warning

_CHECK = "other profilers"

#: Programs by the name the kernel knows, what they hold, and what to do.
_DCGM = (
    "DCGM is running; while it collects profiling metrics, it holds the GPU's counters, which GPU metrics need",
    "Pause it for the job: `dcgmi profile --pause`, afterwards `dcgmi profile --resume`",
)
_PROGRAMS = {
    "nv-hostengine": _DCGM,
    "dcgm-exporter": _DCGM,
    "ncu": ("Nsight Compute is running; it locks the GPU's counters and clocks", "Wait for it, or end it"),
    "nsys": ("an nsys is running; simultaneous ones on one machine lose reports", "Wait for it, or end it"),
    "dynolog": ("dynolog is running; it may start the torch profiler in any training", "Agree with who runs it"),
}

#: Variables by which a tool gets into every CUDA process.
_INJECTIONS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")

#: The process namespace of the machine itself has this number, whatever the machine.
_HOST_NAMESPACE = "pid:[4026531836]"


def check_other_profilers(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Programs that hold the counters or CUPTI, and tools that would be loaded into the training."""
    environ = {**machine.environ, **request.environment}
    found = list(_injected(environ))
    yield from found
    try:
        processes = machine.processes()
    except Unavailable as reason:
        yield unknown(_CHECK, str(reason))
        return
    running = [(process, name) for process in processes for name in _PROGRAMS if _is(process, name)]
    for name in dict.fromkeys(name for _, name in running):
        pids = [process.pid for process, other in running if other == name]
        what, instead = _PROGRAMS[name]
        yield warning(_CHECK, f"{what} ({name}, process {join(pids)})", instead)
    if found or running:
        return
    try:
        sees_host = machine.link("/proc/self/ns/pid") == _HOST_NAMESPACE
    except Unavailable:
        sees_host = False
    if sees_host:
        yield ok(_CHECK, f"none among the {len(processes)} processes here")
    else:
        yield unknown(_CHECK, f"none among the {len(processes)} processes of this container; the host's are not seen from here")


def _injected(environ: dict[str, str]) -> Iterator[Verdict]:
    if "NSYS_PROFILING_SESSION_ID" in environ:
        yield warning(
            _CHECK,
            "this process itself runs under nsys, and so would what it starts",
            "Leave doctor out of the nsys command; the training's nsys then gets CUPTI for itself",
        )
        return
    for variable in _INJECTIONS:
        if environ.get(variable):
            yield warning(
                _CHECK,
                f"{variable}={environ[variable]} loads another tool into the training, and CUPTI serves one",
                f"Unset {variable} for the job",
            )
    for library in environ.get("LD_PRELOAD", "").replace(":", " ").split():
        if any(word in library.lower() for word in _PRELOADED):
            yield warning(_CHECK, f"LD_PRELOAD loads {library} into the training", "Unset LD_PRELOAD for the job")
    if environ.get("KINETO_USE_DAEMON"):
        yield warning(
            _CHECK,
            f"KINETO_USE_DAEMON={environ['KINETO_USE_DAEMON']}: a daemon may start the torch profiler in the middle of yours",
            "Unset KINETO_USE_DAEMON for the job",
        )


#: What libraries of profilers have in their names.
_PRELOADED = ("toolsinjection", "nsight", "cupti", "scorep", "vampir", "libtau", "extrae", "darshan", "hpctoolkit", "libdlprof")


def _is(process: Process, name: str) -> bool:
    # Names end after 15 characters; an interpreter's own says nothing, so the program's path counts, too.
    program = process.arguments[0].rpartition("/")[2] if process.arguments else ""
    return name in (process.name, program)
