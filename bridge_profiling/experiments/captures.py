"""Brings an experiment's captures to this machine, where they are not here: only what is needed, and only once.

Through the experiment's own SSH tunnel, as NeMo-Run makes it. Manifests come first; of the attempt that captured last, the
files they list. Without manifests, files that are named like captures. Never checkpoints, logs or code.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bridge_profiling.errors import ProfilingConfigError, TraceError
from bridge_profiling.experiments.find import Job, read_jobs
from bridge_profiling.experiments.places import Place, chosen_output_dir, place_of
from bridge_profiling.experiments.serialized import Built
from bridge_profiling.manifest import Manifest, read_manifest

#: Called with how many files are done, and how many there are.
OnProgress = Callable[[int, int], None]

#: What a capture is named like where no manifest lists it.
_CAPTURE = re.compile(r"(?:\.json\.gz|\.trace\.json|\.nsys-rep|\.sqlite|\.pickle|\.pkl)(?:\.xz)?$")

_MANIFEST = re.compile(r"^(?P<root>(?:.*/)?)manifest/(?P<folder>[^/]+)/rank-\d+\.json$")

#: What of an SSHTunnel says where it leads.
_TUNNEL = ("host", "user", "job_dir", "port", "identity", "shell", "pre_command")


class Tunnel(Protocol):
    """What of NeMo-Run's tunnels is used."""

    def run(self, command: str, hide: bool = True, warn: bool = False) -> Any:
        """A command there; its result has `stdout` and `ok`."""

    def get(self, remote_path: str, local_path: str) -> None:
        """Copy a file from there."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at the other end.

    Args:
        path: below the directory of captures; absolute when it lies elsewhere.
        size: bytes.
        modified: seconds since 1970.
    """

    path: str
    size: int
    modified: float


def captures_of(
    experiment: Path,
    job: str | None = None,
    *,
    on_progress: OnProgress | None = None,
    tunnel_to: Callable[[Built], Tunnel] | None = None,
) -> Path:
    """Where the captures of an experiment's job are on this machine, fetched if they were not.

    Args:
        experiment: its directory.
        job: which of its jobs; None where only one has captures.
        on_progress: called as files come.
        tunnel_to: makes the tunnel; None for NeMo-Run's own.

    Raises:
        ProfilingConfigError: there is no such job, or several could be meant, or the tunnel does not lead anywhere.
        TraceError: the job has written no captures.
    """
    place, named = _chosen(experiment, job)
    if place.tunnel is None:
        if not Path(place.path).is_dir():
            raise TraceError(f"the job {named} of {experiment.name} has written no captures: {place.path} is not there")
        return Path(place.path)
    target = experiment / named.partition("[")[0] / "profiles"
    with _connected(place.tunnel, tunnel_to or ssh_tunnel) as tunnel:
        fetch(tunnel, place.path, target, on_progress=on_progress)
    return target


def fetch(tunnel: Tunnel, source: str, target: Path, *, on_progress: OnProgress | None = None) -> list[Path]:
    """Copy what is needed of a directory of captures; what is here with the same size is not copied again.

    Args:
        tunnel: leads there.
        source: the directory there.
        target: the directory here.
        on_progress: called as files come.

    Returns:
        What was copied.

    Raises:
        TraceError: the directory is not there, or holds no captures.
    """
    files = {file.path: file for file in _listing(tunnel, source)}
    manifests = [file for file in files.values() if _MANIFEST.match(file.path)]
    # A manifest changes in place as the job goes on, and is small: it comes each time.
    for file in manifests:
        _get(tunnel, source, target, file)
    wanted = _listed_by(target, manifests, files, tunnel) or [file for file in files.values() if _CAPTURE.search(file.path)]
    if not wanted and not manifests:
        raise TraceError(f"{source} holds no captures at the other end of the tunnel")
    missing = [file for file in wanted if not _is_here(target, file)]
    copied = []
    for count, file in enumerate(missing):
        if on_progress is not None:
            on_progress(count, len(missing))
        copied.append(_get(tunnel, source, target, file))
    if on_progress is not None:
        on_progress(len(missing), len(missing))
    return copied


def ssh_tunnel(tunnel: Built) -> Tunnel:
    """NeMo-Run's own tunnel to where a serialized one leads.

    Args:
        tunnel: of an executor.

    Raises:
        ProfilingConfigError: nobody answers there, or lets us in.
    """
    import nemo_run as run

    arguments = {name: tunnel.get(name) for name in _TUNNEL if tunnel.get(name) is not None}
    found = run.SSHTunnel(**arguments)
    try:
        # NeMo-Run says that it connects where our answer goes.
        with contextlib.redirect_stdout(sys.stderr):
            found.connect()
    except (OSError, SystemExit) as error:  # NeMo-Run ends the program when nobody lets it in
        raise ProfilingConfigError(
            f"the tunnel to {tunnel.get('user')}@{tunnel.get('host')} cannot be opened",
            why=str(error) if isinstance(error, OSError) else "it refused the key and the password",
            instead="Try ssh to that machine from here; or copy the captures yourself and name their directory",
        ) from error
    return found


def _chosen(experiment: Path, wanted: str | None) -> tuple[Place, str]:
    """The place of the job that is meant, and its name."""
    jobs = read_jobs(experiment)
    if wanted is not None:
        jobs = [job for job in jobs if wanted in (job.name, _directory(job))]
    places = {job.name: place for job in jobs if (place := place_of(job.executor, chosen_output_dir(job))) is not None}
    if len(places) == 1:
        ((name, place),) = places.items()
        return place, name
    if places:
        raise ProfilingConfigError(
            f"several jobs of {experiment.name} were profiled: {', '.join(places)}",
            instead=f"Name one of them: {experiment.name}/{next(iter(places))}",
        )
    what = f"the experiment {experiment.name} has no job {wanted!r}" if wanted is not None and not jobs else ""
    raise ProfilingConfigError(
        what or f"no job of the experiment {experiment.name} says where it writes captures",
        why="" if what else "none was submitted with a profiler's plugin",
        instead="Name the directory of captures itself",
    )


def _directory(job: Job) -> str:
    return Path(str(job.executor.get("job_dir") or "")).name


@contextlib.contextmanager
def _connected(built: Built, tunnel_to: Callable[[Built], Tunnel]) -> Iterator[Tunnel]:
    tunnel = tunnel_to(built)
    try:
        yield tunnel
    finally:
        cleanup = getattr(tunnel, "cleanup", None)
        if cleanup is not None:
            cleanup()


def _listing(tunnel: Tunnel, directory: str) -> Iterator[RemoteFile]:
    """Every file under a directory there."""
    # Hidden is what is so below the directory; it may itself lie in a hidden one, as NeMo-Run's own ~/.nemo_run.
    command = f"find -L {shlex.quote(directory)} -mindepth 1 -name '.*' -prune -o -type f -printf '%s %T@ %P\\n'"
    result = tunnel.run(command, hide=True, warn=True)
    if not result.ok and not result.stdout.strip():
        raise TraceError(f"{directory} is not there at the other end of the tunnel: the job has written no captures")
    yield from _parsed(result.stdout)


def _parsed(listing: str) -> Iterator[RemoteFile]:
    for line in listing.splitlines():
        size, modified, path = line.split(" ", 2)
        if ".." not in path.split("/"):
            yield RemoteFile(path, int(size), float(modified))


def _listed_by(target: Path, manifests: list[RemoteFile], files: Mapping[str, RemoteFile], tunnel: Tunnel) -> list[RemoteFile]:
    """The files that the manifests of the attempt which captured last list."""
    by_folder: dict[tuple[str, str], list[tuple[RemoteFile, Manifest]]] = {}
    for file in manifests:
        match = _MANIFEST.match(file.path)
        assert match is not None
        try:
            manifest = read_manifest(target / file.path)
        except TraceError:
            continue
        by_folder.setdefault((match["root"], match["folder"]), []).append((file, manifest))
    captured = {place: each for place, each in by_folder.items() if any(manifest.artifacts for _, manifest in each)}
    if not captured:
        return []
    root, _ = newest = max(captured, key=lambda place: max(file.modified for file, _ in captured[place]))
    paths = [artifact.path for _, manifest in captured[newest] for artifact in manifest.artifacts]
    # An exported report is read from its export.
    paths = [path for path in paths if not (path.endswith(".nsys-rep") and path.removesuffix(".nsys-rep") + ".sqlite" in paths)]
    inside = [files[root + path] for path in paths if root + path in files]
    return inside + _elsewhere([path for path in paths if path.startswith("/")], tunnel)


def _elsewhere(paths: list[str], tunnel: Tunnel) -> list[RemoteFile]:
    """Files outside the directory of captures, as a memory snapshot with a path of its own."""
    if not paths:
        return []
    names = " ".join(shlex.quote(path) for path in paths)
    return list(_parsed(tunnel.run(f"find -L {names} -maxdepth 0 -printf '%s %T@ %p\\n'", hide=True, warn=True).stdout))


def _here(target: Path, file: RemoteFile) -> Path:
    return target / "elsewhere" / posixpath.basename(file.path) if file.path.startswith("/") else target / file.path


def _is_here(target: Path, file: RemoteFile) -> bool:
    place = _here(target, file)
    return place.is_file() and place.stat().st_size == file.size


def _get(tunnel: Tunnel, source: str, target: Path, file: RemoteFile) -> Path:
    """Copy one file, with its time: which attempt is the newest is told by that."""
    place = _here(target, file)
    place.parent.mkdir(parents=True, exist_ok=True)
    # Hidden until it is whole, so that a capture that was cut off on its way is not taken for one.
    part = place.with_name(f".{place.name}.part")
    # The tunnel reads braces in a local path as fields to fill in.
    tunnel.get(posixpath.join(source, file.path), str(part).replace("{", "{{").replace("}", "}}"))
    os.utime(part, (file.modified, file.modified))
    part.replace(place)
    return place
