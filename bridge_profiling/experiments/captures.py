"""Finds an experiment's captures, and on request fetches those of another machine: only the files needed, each once.

Fetching uses the experiment's own SSH tunnel, as NeMo-Run makes it, and writes below the experiment alone. Manifests are
fetched first, then the files listed by those of the attempt that captured last. Without manifests, every file named like a
capture. Never checkpoints, logs or code.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from bridge_profiling.common.atomic import write_atomically
from bridge_profiling.common.errors import ProfilingConfigError, TraceError, require
from bridge_profiling.common.printable import shell_path
from bridge_profiling.experiments.jobs import Built, locate_captures
from bridge_profiling.manifest import read_manifest
from bridge_profiling.traces.files import RunFiles

#: Called with the number of files done and the number of files in all.
OnProgress = Callable[[int, int], None]

#: Names of captures that no manifest lists.
_CAPTURE = re.compile(r"(?:\.json\.gz|\.trace\.json|\.nsys-rep|\.sqlite|\.pickle|\.pkl)(?:\.xz)?$")

_MANIFEST = re.compile(r"(?:.*/)?manifest/[^/]+/rank-\d+\.json")

#: Arguments of a serialized SSHTunnel that a new one needs. `pre_command` would run before each command there.
_TUNNEL = {"host": str, "user": str, "job_dir": str, "port": int, "identity": str}

_LISTED = re.compile(r"(\d+) (\d+(?:\.\d+)?) (.+)")


class RemoteFile(NamedTuple):
    """A remote file: path relative to the directory of captures (absolute outside it), bytes, seconds since 1970."""

    path: str
    size: int
    modified: float


def captures_of(
    experiment: Path,
    job_name: str | None = None,
    *,
    remote: bool = False,
    on_progress: OnProgress = lambda done, total: None,
    tunnel_to: Callable[[Built], Any] | None = None,
) -> Path:
    """The local directory with the captures of an experiment's job.

    Args:
        experiment: its directory.
        job_name: the job; None if only one has captures.
        remote: fetch the captures first if the job ran behind an SSH tunnel.
        on_progress: called as files are copied.
        tunnel_to: opens the tunnel; None means NeMo-Run's own.

    Raises:
        ProfilingConfigError: the captures are elsewhere and `remote` is false, or the experiment cannot be read.
        TraceError: the job has written none.
    """
    job, path = locate_captures(experiment, job_name)
    if job.ssh_tunnel is None:
        found = RunFiles(Path(path))
        if found.manifests or any(_CAPTURE.search(file.name) for file in found.files):
            return Path(path)
        nothing = (
            "captured nothing: the script does not read profiling overrides, or failed early, as its log shows. Have it call"
            " bridge_profiling.settings.overrides.apply_overrides and open a ProfilingHook"
        )
        reason = nothing if job.has_overrides else f"has written no captures: {path} holds none"
        raise TraceError(f"the job {job.name} of {experiment.name} {reason}")
    folder = job.name.partition("[")[0]
    target = experiment / folder / "profiles"
    require(
        folder not in ("", ".", "..") and not {"/", "\0"} & set(folder) and _is_below(target, experiment),
        f"the captures of the job {job.name!r} cannot be copied to {target}",
        why=f"that is not below {experiment}",
        instead="Copy them yourself and type their directory",
    )
    host, user = job.ssh_tunnel.get("host", of=str), job.ssh_tunnel.get("user", of=str)
    if not remote:
        copied = f", or type {shell_path(target)} for the copy made before" if target.is_dir() else ""
        raise ProfilingConfigError(
            f"the captures of the job {job.name} are on another machine, in {path} at {user}@{host}",
            why="nothing is copied from there without --fetch",
            instead=f"Add --fetch to copy them over SSH to {target}{copied}",
        )
    tunnel = (tunnel_to or ssh_tunnel)(job.ssh_tunnel)
    try:
        fetch(tunnel, path, target, on_progress=on_progress)
    finally:
        tunnel.cleanup()
    return target


def fetch(tunnel: Any, source: str, target: Path, *, on_progress: OnProgress = lambda done, total: None) -> list[Path]:
    """Copy the captures in a remote directory to a local one, except files of equal size.

    Returns the copied files, without manifests. `tunnel` is one of NeMo-Run's.
    """
    # Hidden files are skipped below the directory only: it may itself be in a hidden one, such as NeMo-Run's ~/.nemo_run.
    if not source.startswith("/"):
        source = f"./{source}"  # `find` reads a leading dash as an action
    below = f"{shlex.quote(source)} -mindepth 1 -name '.*' -prune -o -type f -printf '%s %T@ %P\\n'"
    files = {file.path: file for file in _found(tunnel, below)}
    if not files and not tunnel.run(f"test -d {shlex.quote(source)}", hide=True, warn=True).ok:
        raise TraceError(f"{source} does not exist at the other end of the tunnel: the job has written no captures")
    manifests = [file for path, file in files.items() if _MANIFEST.fullmatch(path)]
    # A manifest changes in place while the job runs, and is small: it is fetched each time.
    for file in manifests:
        _get(tunnel, source, target, file)
    wanted = _listed_by(target, manifests, files, tunnel) or [file for path, file in files.items() if _CAPTURE.search(path)]
    if not wanted and not manifests:
        raise TraceError(f"{source} at the other end of the tunnel holds no captures")
    here = {path: path.stat().st_size for path in target.rglob("*") if path.is_file()}
    missing = [file for file in wanted if here.get(_local(target, file)) != file.size]
    copied: list[Path] = []
    for file in missing:
        on_progress(len(copied), len(missing))
        copied.append(_get(tunnel, source, target, file))
    on_progress(len(missing), len(missing))
    return copied


def ssh_tunnel(tunnel: Built) -> Any:
    """Open NeMo-Run's own tunnel to the machine that a serialized one names."""
    import nemo_run as run

    given = {name: tunnel.get(name, of=kind) for name, kind in _TUNNEL.items()}
    opened = run.SSHTunnel(**{name: value for name, value in given.items() if value is not None})
    try:
        # NeMo-Run prints that it connects; standard output is for the command's answer.
        with contextlib.redirect_stdout(sys.stderr):
            opened.connect()
    except (OSError, SystemExit) as error:  # NeMo-Run exits when the login is refused
        raise ProfilingConfigError(
            f"the tunnel to {tunnel.get('user')}@{tunnel.get('host')} cannot be opened",
            why=str(error) if isinstance(error, OSError) else "it refused the key and the password",
            instead="Try ssh to that machine from here; or copy the captures yourself and type their directory",
        ) from error
    return opened


def _found(tunnel: Any, arguments: str) -> Iterator[RemoteFile]:
    """The files that `find` lists there as size, time and path."""
    for line in tunnel.run(f"find -L {arguments}", hide=True, warn=True).stdout.splitlines():
        # A name with a line break has two lines; neither is read as a file.
        if (found := _LISTED.fullmatch(line)) and ".." not in found[3].split("/"):
            yield RemoteFile(found[3], int(found[1]), float(found[2]))


def _listed_by(target: Path, manifests: Sequence[RemoteFile], files: Mapping[str, RemoteFile], tunnel: Any) -> list[RemoteFile]:
    """The files listed by the manifests of the attempt that captured last; none where no manifest lists any."""
    attempts: dict[str, list[str]] = defaultdict(list)
    for file in sorted(manifests, key=attrgetter("modified")):
        with contextlib.suppress(TraceError):
            listed = [artifact.path for artifact in read_manifest(target / file.path).artifacts]
            folder = posixpath.dirname(file.path)
            # The attempt of the newest manifest comes last.
            attempts[folder] = attempts.pop(folder, []) + listed
    captured = [folder for folder, listed in attempts.items() if listed]
    if not captured:
        return []
    # manifest/iter-2-4 is in the directory that an artifact's path starts at.
    root, paths = posixpath.dirname(posixpath.dirname(captured[-1])), set(attempts[captured[-1]])
    # A report with an SQLite export is read from the export.
    paths -= {path.removesuffix(".sqlite") + ".nsys-rep" for path in paths if path.endswith(".sqlite")}
    found = [files[path] for each in sorted(paths) if (path := posixpath.join(root, each)) in files]
    # Files outside the directory of captures, such as a memory snapshot with a path of its own.
    outside = " ".join(shlex.quote(path) for path in sorted(paths) if path.startswith("/") and _CAPTURE.search(path))
    return found + list(_found(tunnel, f"{outside} -maxdepth 0 -printf '%s %T@ %p\\n'") if outside else ())


def _local(target: Path, file: RemoteFile) -> Path:
    return target / "elsewhere" / posixpath.basename(file.path) if file.path.startswith("/") else target / file.path


def _get(tunnel: Any, source: str, target: Path, file: RemoteFile) -> Path:
    """Copy one file with its modification time, which decides which attempt is the newest."""

    def write(temporary: Path) -> None:
        # The tunnel reads braces in a local path as fields to fill in.
        tunnel.get(posixpath.join(source, file.path), str(temporary).replace("{", "{{").replace("}", "}}"))
        os.utime(temporary, (file.modified, file.modified))

    local = _local(target, file)
    if not _is_below(local, target):
        raise TraceError(f"{local} cannot be written: a link leads out of {target}")
    return write_atomically(local, write)


def _is_below(path: Path, folder: Path) -> bool:
    """Whether a path stays in a folder once links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
