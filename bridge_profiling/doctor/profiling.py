"""Checks of the profiling settings: profilers, window, ranks and output directory.

Writes only files of its own to the output directory, and removes them again.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bridge_profiling.doctor.checks import Machine, Unavailable, Verdict, checked, fails, join, ok, unknown, warning
from bridge_profiling.doctor.request import Request
from bridge_profiling.settings import profiling as config
from bridge_profiling.settings.profiling import DEFAULT_OUTPUT_DIR, OUTPUT_DIR_VARIABLE
from bridge_profiling.settings.window import check_ranks, check_window

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
    check_window(window.start, window.end, train_iters=train_iters)
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
    check_ranks(setting, world_size=request.world_size)
    ranks = request.profiled_ranks()
    if ranks is None or request.world_size is None:
        found = f"profiling.profile_ranks={setting}, and the number of ranks is not known here"
        yield unknown(found, "Type --world-size N")
    elif len(ranks) > _MANY:
        instead = "Type profiling.profile_ranks=pp for one rank per pipeline stage, or list a few"
        yield warning(f"{len(ranks)} ranks write a trace each, and the others wait for them", instead)
    else:
        yield ok(f"{join(ranks)} of {request.world_size}")


#: File systems that all machines see which mount them.
_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|panfs|wekafs|pvfs2|orangefs|afs|cifs|smb3"
    r"|(fuse\.)?(beegfs|ceph|ceph-fuse|cephfs|glusterfs|juicefs|sshfs|dfuse|quobyte)"
)
#: File systems that end with the machine, the job or the container.
_TEMPORARY = re.compile("tmpfs|ramfs|overlay|devtmpfs|squashfs")
#: Disks of the machine; it may export them, which is not visible from here.
_DISK = re.compile("ext[234]|xfs|btrfs|zfs|f2fs|jfs|reiserfs|bcachefs")

_ANOTHER = "Type profiling.output_dir=DIRECTORY, or export BRIDGE_PROFILING_DIR, with one that every node can write"


@checked("output directory")
def check_output_dir(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Whether the directory is writable and shared."""
    chosen = request.output_dir or request.profiling.output_dir or request.environment.get(OUTPUT_DIR_VARIABLE)
    if not chosen and request.elsewhere:
        instead = "Type --output-dir DIRECTORY, or set profiling.output_dir"
        yield unknown("the job chooses it, in a place that is not known here", instead)
        return
    directory = Path(chosen or machine.environ.get(OUTPUT_DIR_VARIABLE) or DEFAULT_OUTPUT_DIR).expanduser().absolute()
    existing = next(place for place in (directory, *directory.parents) if os.path.lexists(place))
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".bridge-profiling-doctor-") as file:
            file.write(b"?")
            file.flush()
    except OSError as error:
        yield fails(f"{existing} cannot be written: {error.strerror or error}", _ANOTHER)
        return
    created = "" if existing == directory else f" (will be created in {existing})"
    yield ok(f"{directory} can be written{created}")
    yield from _check_shared(request, machine, existing)


@checked("shared by the nodes")
def _check_shared(request: Request, machine: Machine, directory: Path) -> Iterator[Verdict]:
    kind = _file_system(machine, directory)
    shown = f"{directory} is on {kind or 'a file system that /proc/mounts does not name'}"
    try_it = "To try it, write a file here and read it on the other nodes: `srun --nodes N ls FILE`"
    if request.nodes == 1 and not request.elsewhere:
        if _TEMPORARY.fullmatch(kind):
            found = f"{shown}: its content is lost with the container or the machine"
            yield Verdict("lasting", "warning", found, _ANOTHER)
    elif not request.name and request.nodes is None:
        yield unknown(shown, try_it)
    elif _NETWORK.fullmatch(kind):
        yield ok(f"{shown}, a network file system")
    elif _TEMPORARY.fullmatch(kind):
        found = f"{shown}: no other machine sees it, and its content is lost with the job or container"
        yield fails(found, _ANOTHER, certain=request.nodes and request.nodes > 1)
    elif _DISK.fullmatch(kind):
        found = f"{shown}: a disk of this machine, which others see only if it is exported"
        yield warning(found, f"{_ANOTHER}. {try_it}")
    else:
        yield unknown(f"{shown}: not known whether other machines see it", try_it)


def _file_system(machine: Machine, directory: Path) -> str:
    """The type of a directory's file system; empty where it is not visible."""
    found, longest, resolved = "", -1, directory.resolve()
    with suppress(Unavailable):
        for line in machine.read("/proc/mounts").splitlines():
            _, point, kind, *_ = [*line.split(" "), "", ""]
            point = point.encode().decode("unicode_escape")  # spaces are written \040
            # The later of two mounts on one point hides the other.
            if len(point) >= longest and resolved.is_relative_to(point):
                found, longest = kind, len(point)
    return found
