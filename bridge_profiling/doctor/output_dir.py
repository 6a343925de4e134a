"""The output directory: whether it can be written, whether all nodes see the same one, and whether the traces fit.

Writes only files of its own into it, and removes them again.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bridge_profiling.config import DEFAULT_OUTPUT_DIR, OUTPUT_DIR_VARIABLE
from bridge_profiling.doctor.machine import Machine, Unavailable
from bridge_profiling.doctor.request import Request
from bridge_profiling.doctor.trace_size import estimate, readable
from bridge_profiling.doctor.verdict import Status, Verdict, fails, ok, unknown, warning

#: File systems that every machine sees which mounts them.
_SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cephfs", "panfs", "wekafs", "pvfs2", "orangefs", "afs", "cifs"}
    | {f"fuse.{name}" for name in ("ceph", "ceph-fuse", "glusterfs", "juicefs", "sshfs", "dfuse", "beegfs", "quobyte")}
    | {"smb3"}
)
#: Those that end with the machine, the job or the container.
_PASSING = frozenset({"tmpfs", "ramfs", "overlay", "devtmpfs", "squashfs"})
#: A disk of the machine; it may be exported to others, which cannot be seen from here.
_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs"})

#: Waiting for nodes: in an allocation srun starts at once, in an idle queue within seconds.
_SRUN_SECONDS = 60


def directory_of(request: Request, machine: Machine) -> Path | None:
    """Where the captures go; None where a job elsewhere decides it."""
    if request.output_dir is not None:
        chosen: str | Path = request.output_dir
    else:
        told = request.profiling.output_dir or request.environment.get(OUTPUT_DIR_VARIABLE)
        if not told and request.elsewhere:
            return None
        chosen = told or machine.environ.get(OUTPUT_DIR_VARIABLE) or DEFAULT_OUTPUT_DIR
    return Path(chosen).expanduser().absolute()


def check_output_dir(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Writable, shared, and with room for the traces."""
    directory = directory_of(request, machine)
    if directory is None:
        yield unknown(
            "output directory",
            "the job decides it, in a place that this machine does not know",
            "Type --output-dir DIRECTORY, or set profiling.output_dir",
        )
        return
    existing = _existing(directory)
    problem = _write_problem(existing)
    if problem:
        yield fails("output directory", f"{existing} cannot be written: {problem}", _ELSEWHERE)
        return
    created = "" if existing == directory else f" (will be made in {existing})"
    yield ok("output directory", f"{directory} can be written{created}")
    yield from _check_shared(request, machine, existing)
    if request.name and request.profiling.enabled:
        yield from _check_space(request, machine, existing)


_ELSEWHERE = "Type profiling.output_dir=DIRECTORY, or export BRIDGE_PROFILING_DIR, with one that every node can write"


_TELL_THE_MODEL = (
    "Type model.num_layers=…, train.micro_batch_size=…, train.global_batch_size=… and --world-size N; for a recipe,"
    " `python launch/describe.py --recipe NAME --settings` prints them"
)


def _existing(directory: Path) -> Path:
    """The directory, or what stands in its place, or the nearest one above it that exists."""
    return next(place for place in (directory, *directory.parents) if os.path.lexists(place))


def _write_problem(directory: Path) -> str:
    """Why no file can be written there; empty when one could."""
    if not directory.is_dir():
        return "it is no directory"
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".bridge-profiling-doctor-") as file:
            file.write(b"?")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _check_shared(request: Request, machine: Machine, directory: Path) -> Iterator[Verdict]:
    check = "shared by the nodes"
    if request.probe and machine.which(request.srun[0]):
        seen = _look_from_nodes(request, machine, directory)
        yield seen
        if seen.status is not Status.unknown:
            return
    elif request.nodes == 1 and not request.elsewhere:
        yield from _check_lasting(machine, directory)
        return
    kind, shown = _file_system(machine, directory), _described(machine, directory)
    look = "Type --nodes N where there is srun: it writes a file and looks for it from N nodes"
    if not request.name and request.nodes is None:
        yield unknown(check, shown, look)
    elif kind in _SHARED:
        yield ok(check, f"{shown}, a network file system")
    elif kind in _PASSING:
        report = fails if request.nodes and request.nodes > 1 else warning
        yield report(check, f"{shown}: no other machine sees it, and what it holds goes with the job or container", _ELSEWHERE)
    elif kind in _DISK:
        found = f"{shown}: a disk of this machine, which others see only if it is exported"
        yield warning(check, found, f"{_ELSEWHERE}. {look}")
    else:
        yield unknown(check, f"{shown}: not known whether other machines see it", look)


def _check_lasting(machine: Machine, directory: Path) -> Iterator[Verdict]:
    if _file_system(machine, directory) in _PASSING:
        yield warning(
            "lasting", f"{_described(machine, directory)}: what it holds goes with the container or the machine", _ELSEWHERE
        )


def _look_from_nodes(request: Request, machine: Machine, directory: Path) -> Verdict:
    """Write a file here and have every node read it, and have every node write one and look for it here."""
    check, word, nodes = "shared by the nodes", uuid.uuid4().hex, request.nodes or 1
    mine = directory / f".bridge-profiling-doctor-{word}"
    script = (
        f'printf %s "$SLURMD_NODENAME" > {shlex.quote(str(mine))}-node-"$SLURM_NODEID";'
        f" cat {shlex.quote(str(mine))}; exit 0"  # what a node cannot do shows in what it has not done
    )
    # Whatever image the job has, the directory is the machine's.
    srun = [word for word in request.srun if not word.startswith("--container")]
    where = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", f"--immediate={_SRUN_SECONDS}"]
    try:
        mine.write_text(f"{word}\n")
        printed = machine.run(*srun, *where, "--chdir=/", "sh", "-c", script, seconds=2 * _SRUN_SECONDS)
        names = [path.read_text() for path in sorted(directory.glob(f"{mine.name}-node-*"))]
    except OSError as error:
        return fails(check, f"{directory} cannot be written: {error.strerror}", _ELSEWHERE)
    except Unavailable as reason:
        instead = "Run doctor inside an allocation (salloc), or export SLURM_ACCOUNT and SLURM_PARTITION"
        return unknown(check, f"the nodes could not be asked: {reason}", instead)
    finally:
        for path in (mine, *directory.glob(f"{mine.name}-node-*")):
            with suppress(OSError):
                path.unlink()
    seen = printed.count(word) - sum(line.count(word) for line in printed.splitlines() if str(mine) in line)
    if seen == len(names) == nodes:
        return ok(check, f"{nodes} nodes ({', '.join(names)}) read a file written here, and theirs are seen here")
    return fails(
        check,
        f"{directory}: {seen} of {nodes} nodes read what was written here, and {len(names)} of their files are seen here",
        _ELSEWHERE,
    )


def _check_space(request: Request, machine: Machine, directory: Path) -> Iterator[Verdict]:
    size, ranks = estimate(request), request.profiled_ranks()
    shown = f"about {readable(size.kept)} a rank and {readable(size.peak)} while it is written"
    margin = f"give or take a factor of {size.uncertainty}{f', assuming {size.assumed}' if size.assumed else ''}"
    if ranks is None:
        yield unknown("trace size", f"{shown} ({margin}), and how many ranks is not known here", "Type --world-size N")
        return
    found = f"{shown}, {readable(ranks * size.kept)} for {ranks} {'rank' if ranks == 1 else 'ranks'} ({margin})"
    yield unknown("trace size", found, _TELL_THE_MODEL) if size.guessed else ok("trace size", found)
    places = {"output directory": (directory, ranks * size.peak)}
    temporary = Path(request.environment.get("TMPDIR") or machine.environ.get("TMPDIR") or "/tmp")
    if request.wants_nsys and temporary.is_dir():
        places["TMPDIR of nsys"] = temporary, ranks * size.peak
    for name, (place, needed) in places.items():
        yield _room(name, place, needed, size.uncertainty, machine)


def _room(name: str, place: Path, needed: int, uncertainty: int, machine: Machine) -> Verdict:
    check, fewer = "free space", "Profile fewer ranks or iterations, leave out stacks and shapes, or choose another directory"
    try:
        free = machine.free_bytes(place)
    except Unavailable as reason:
        return unknown(check, str(reason))
    found = f"{name} {place}: {readable(free)} free, about {readable(needed)} needed"
    if free < needed / uncertainty:
        return fails(check, found, fewer)
    if free < needed * uncertainty:
        return warning(check, f"{found}, give or take a factor of {uncertainty}", fewer)
    return ok(check, found)


def _described(machine: Machine, directory: Path) -> str:
    kind = _file_system(machine, directory)
    return f"{directory} is on {kind}" if kind else f"{directory} is on a file system that /proc/mounts does not name"


def _file_system(machine: Machine, directory: Path) -> str:
    """The type of the file system a directory lies on; empty where that cannot be seen."""
    try:
        mounts = machine.read("/proc/mounts")
    except Unavailable:
        return ""
    found, longest = "", -1
    resolved = directory.resolve()
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].encode().decode("unicode_escape")  # spaces are written \040
        # Of two mounts on one point, the later one is seen.
        if len(point) >= longest and resolved.is_relative_to(point):
            found, longest = fields[2], len(point)
    return found
