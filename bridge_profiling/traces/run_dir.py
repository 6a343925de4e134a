"""Finds what a run left: our manifests, and captures of any origin. Looks at a trace's first bytes, never reads one."""

from __future__ import annotations

import itertools
import lzma
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.errors import TraceError
from bridge_profiling.manifest import Manifest, read_manifest
from bridge_profiling.traces.types import RankSource, Source


@dataclass(frozen=True)
class RankCapture:
    """One rank's capture.

    Args:
        root: the output directory.
        folder: name of the attempt's folder, `iter-10-12`.
        manifest: the rank's manifest, as written.
    """

    root: Path
    folder: str
    manifest: Manifest

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.manifest.rank

    @property
    def captured(self) -> list[int]:
        """Iterations in the capture."""
        return self.manifest.captured_iterations

    @property
    def artifacts(self) -> list[Path]:
        """Files of the capture, traces first as the manifest lists them."""
        return [self.root / artifact.path for artifact in self.manifest.artifacts]

    @property
    def torch_trace(self) -> Path | None:
        """The Kineto trace, if there is one."""
        return next((path for path in self.artifacts if path.name.endswith(".pt.trace.json.gz")), None)

    def durations_by_iteration(self, *, profiled: bool) -> dict[int, int]:
        """Nanoseconds of each iteration; see `Manifest.durations_by_iteration`."""
        return self.manifest.durations_by_iteration(profiled=profiled)

    def durations_ns(self, *, profiled: bool) -> list[int]:
        """Durations of the iterations inside the window, or of those outside it that no profiler slowed down."""
        return list(self.durations_by_iteration(profiled=profiled).values())

    def mfu(self, *, profiled: bool) -> list[float]:
        """MFU of the same iterations, shares of the device's peak; empty where the manifest has none."""
        durations = self.manifest.durations_ns
        shares = dict(zip(durations.iteration, durations.mfu or (), strict=False))
        return [shares[iteration] for iteration in self.durations_by_iteration(profiled=profiled) if iteration in shares]


def find_captures(root: Path, folder: str | None = None) -> list[RankCapture]:
    """Every rank's capture under an output directory.

    Args:
        root: the output directory.
        folder: an attempt's folder; None takes the one written last, of those that captured something where one did.

    Raises:
        TraceError: there is no manifest, or one cannot be read.
    """
    manifests = sorted((root / "manifest").glob(f"{folder or '*'}/rank-*.json"))
    if not manifests:
        raise TraceError(f"{root} holds no manifest: nothing was profiled into it")
    captures = [RankCapture(root, path.parent.name, read_manifest(path)) for path in manifests]
    if folder is None:
        # A restart past the window writes a manifest as well, that says it missed what an earlier attempt has.
        times = {capture.folder: path.stat().st_mtime_ns for capture, path in zip(captures, manifests, strict=True)}
        wrote = {capture.folder for capture in captures if capture.artifacts}
        folder = max(wrote or times, key=lambda name: times[name])
    return sorted((capture for capture in captures if capture.folder == folder), key=lambda capture: capture.rank)


@dataclass(frozen=True)
class Capture:
    """One profiler's file of one rank, whoever wrote it.

    Args:
        path: the file.
        source: kineto, nsys or memory.
        rank: global rank.
        rank_source: what that number was read from: `trace`, `manifest`, `file name`, or `order` when nothing names a rank.
        manifest: the rank's manifest, when the file is an artifact of one.
    """

    path: Path
    source: Source
    rank: int
    rank_source: RankSource
    manifest: RankCapture | None = None


@dataclass(frozen=True)
class FoundRun:
    """What a directory or file holds.

    Args:
        root: the directory or file.
        captures: one per rank and source, by rank.
        limitations: sentences: which files were passed over for others, and which ranks are guesses.
    """

    root: Path
    captures: list[Capture]
    limitations: list[str]


def find_run(root: Path) -> FoundRun:
    """Every capture under a directory, of whatever origin, or the one that a file is.

    A rank comes from the trace, else from the manifest, else from the file's name (`rank-3`, `rank3`, `snapshot_3.pickle`),
    else from the files' order. Of several captures of one rank by one profiler, those in the folder written last count.

    Args:
        root: an output directory of ours, a NeMo-Run experiment's, a folder of plain torch.profiler files, nsys reports or
            memory snapshots; or one such file.

    Raises:
        TraceError: it does not exist, or holds no capture.
    """
    if not root.exists():
        raise TraceError(f"{root} does not exist")
    if root.is_file():
        ours = root.absolute().parents[:3][-1].glob("manifest/*/rank-*.json")
        manifests, limitations = _by_artifact(ours)
        return FoundRun(root, _with_ranks([(root, _source_of(root) or "kineto")], manifests, root.parent), limitations)
    manifests, limitations = _by_artifact(_manifests_of(root))
    files = _without_exported_reports([(path, source) for path in _files(root) if (source := _source_of(path)) is not None])
    if not files:
        raise TraceError(f"{root} holds no capture: no Kineto trace, nsys report or memory snapshot is under it")
    captures = _newest(_with_ranks(files, manifests, root), root, limitations)
    limitations += _several_windows(captures)
    guessed = [capture for capture in captures if capture.rank_source == "order"]
    if guessed:
        limitations.append(
            f"nothing names the rank of {len(guessed)} files, as {guessed[0].path.name}: they are numbered in order"
        )
    return FoundRun(root, sorted(captures, key=lambda capture: (capture.rank, capture.source)), limitations)


#: Bytes of a JSON file that are looked at to tell a trace from other JSON. What stands before the events fits.
_HEAD_BYTES = 1 << 18

_TRACE_KEYS = re.compile(rb'"(?:traceEvents|deviceProperties|distributedInfo|baseTimeNanoseconds|displayTimeUnit|ph)"\s*:')
_TRACE_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*"rank"\s*:\s*(\d{1,9})\s*[,}]')
_NAMED_RANK = re.compile(r"rank[-_ .=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"[-_](\d{1,7})$")
_SUFFIXES: dict[str, Source] = {
    ".json": "kineto",
    ".json.gz": "kineto",
    ".nsys-rep": "nsys",
    ".sqlite": "nsys",
    ".pickle": "memory",
    ".pkl": "memory",
}


def _files(root: Path) -> list[Path]:
    """Files under a directory, but for hidden ones: temporary files, and caches."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return found


def _split(path: Path) -> tuple[str, str]:
    """A file's name without what says its format, and that."""
    name = path.name.removesuffix(".xz")
    suffix = next((suffix for suffix in sorted(_SUFFIXES, key=len, reverse=True) if name.lower().endswith(suffix)), "")
    stem = name[: len(name) - len(suffix)] if suffix else name
    for ending in (".pt.trace", ".trace"):
        stem = stem.removesuffix(ending)
    return stem, suffix.lower()


def _source_of(path: Path) -> Source | None:
    """Which profiler wrote a file; None when none did. A file named like a capture is one, so that its damage is told."""
    stem, suffix = _split(path)
    source = _SUFFIXES.get(suffix)
    if source != "kineto":
        return source
    head = _head(path)
    if head is None or not head.strip(b"\0 \t\r\n"):
        named = ".trace." in path.name or suffix == ".json.gz" or _NAMED_RANK.search(stem) is not None
        return source if named else None
    return source if _TRACE_KEYS.search(head) else None


def _head(path: Path) -> bytes | None:
    """A file's first bytes, unpacked; None when they cannot be."""
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD_BYTES)
        for magic, unpacker in ((b"\x1f\x8b", zlib.decompressobj(31)), (b"\xfd7zXZ", lzma.LZMADecompressor())):
            if start.startswith(magic):
                return unpacker.decompress(start, _HEAD_BYTES)
        return start
    except (OSError, zlib.error, lzma.LZMAError):
        return None


def _without_exported_reports(files: list[tuple[Path, Source]]) -> list[tuple[Path, Source]]:
    """Of a report and its SQLite export, the export."""
    exported = {path.with_name(_split(path)[0]) for path, _ in files if _split(path)[1] == ".sqlite"}
    return [(path, source) for path, source in files if path.suffix != ".nsys-rep" or path.with_suffix("") not in exported]


def _manifests_of(root: Path) -> list[Path]:
    """Manifests under a directory; of one window's folder, those that tell of it from beside."""
    found = list(root.rglob("manifest/*/rank-*.json"))
    return found or list(root.absolute().parent.parent.glob(f"manifest/{root.absolute().name}/rank-*.json"))


def _by_artifact(manifests: Iterable[Path]) -> tuple[dict[Path, RankCapture], list[str]]:
    """Manifests by the files they list, and a sentence for each that cannot be read."""
    found: dict[Path, RankCapture] = {}
    unread = []
    for path in sorted(manifests):
        try:
            capture = RankCapture(path.parents[2], path.parent.name, read_manifest(path))
        except TraceError as error:
            unread.append(f"{error}; its capture is read without it")
            continue
        found |= {artifact.resolve(): capture for artifact in capture.artifacts if capture.rank >= 0}
    return found, unread


def _with_ranks(files: list[tuple[Path, Source]], manifests: dict[Path, RankCapture], root: Path) -> list[Capture]:
    captures, unnamed = [], []
    for path, source in files:
        manifest = manifests.get(path.resolve())
        named = _rank(path, source, manifest, root)
        together = _ranks_in(path) if source == "nsys" else []
        if len(together) > 1:  # one nsys around a launcher: its report holds all of the ranks that this started
            captures += [
                Capture(path, source, rank, "order", manifest if manifest is not None and manifest.rank == rank else None)
                for rank in together
            ]
        elif named is None:
            unnamed.append((path, source, manifest))
        else:
            captures.append(Capture(path, source, *named, manifest))
    for source in dict.fromkeys(source for _, source, _ in unnamed):
        taken = {capture.rank for capture in captures if capture.source == source}
        free = (rank for rank in itertools.count() if rank not in taken)
        captures += [Capture(path, source, next(free), "order", manifest) for path, kind, manifest in unnamed if kind == source]
    return captures


def _ranks_in(path: Path) -> list[int]:
    """The ranks that one exported report holds; empty where that cannot be told, and its reader will say why."""
    if _split(path)[1] != ".sqlite":
        return []
    try:
        from bridge_profiling.traces import nsys  # not above: whoever only looks for manifests needs no pyarrow

        return nsys.ranks_in(path)
    except (ImportError, TraceError):
        return []


def _rank(path: Path, source: Source, manifest: RankCapture | None, root: Path) -> tuple[int, RankSource] | None:
    if source == "kineto" and (found := _TRACE_RANK.search(_head(path) or b"")):
        return int(found[1]), "trace"
    if manifest is not None:
        return manifest.rank, "manifest"
    folders = path.relative_to(root).parent.parts if path.is_relative_to(root) else ()
    for part in (_split(path)[0], *reversed(folders)):
        if named := _NAMED_RANK.findall(part):
            return int(named[-1]), "file name"
    if numbered := _LAST_NUMBER.search(_split(path)[0]):
        return int(numbered[1]), "file name"
    return None


def _newest(captures: list[Capture], root: Path, limitations: list[str]) -> list[Capture]:
    """Of each source, the captures in the folder written last, and there the last one of each rank.

    What several folders hold of one rank, or of several windows by their manifests, is never shown together.
    """
    kept: list[Capture] = []
    for source in sorted({capture.source for capture in captures}):
        mine = [capture for capture in captures if capture.source == source]
        times = {capture.path: (capture.path.stat().st_mtime_ns, str(capture.path)) for capture in mine}
        ranks = [capture.rank for capture in mine]
        windows = {capture.manifest.folder for capture in mine if capture.manifest is not None}
        if len(ranks) > len(set(ranks)) or len(windows) > 1:
            newest = max(mine, key=lambda capture: times[capture.path])
            folder = newest.path.parent
            # Names of different ranks are different captures, even if a copy's content claims another's rank: its reader,
            # not its name, says which of the two is whole.
            chosen = {
                (capture.rank, (_NAMED_RANK.findall(_split(capture.path)[0]) or [None])[-1]): capture
                for capture in sorted(mine, key=lambda capture: times[capture.path])
                if capture.path.parent == folder
            }
            passed_over = [capture for capture in mine if capture not in chosen.values()]
            if not passed_over:
                kept += mine
                continue
            limitations.append(_passed_over(source, folder, passed_over, root))
            mine = list(chosen.values())
        kept += mine
    return kept


def _several_windows(captures: Iterable[Capture]) -> list[str]:
    """Says so where profilers were asked for different windows, by a request for one: their figures are not of one time."""
    windows = {capture.source: capture.manifest.folder for capture in captures if capture.manifest is not None}
    if len(set(windows.values())) < 2:
        return []
    return [_SEVERAL + ", ".join(f"{source} is of {folder}" for source, folder in sorted(windows.items()))]


_PASSED_OVER, _SEVERAL = "captures are passed over: this is", "not all are of one window: "

#: One of them stands in every sentence that says which of several windows is shown.
WHICH_WINDOW = (_PASSED_OVER, _SEVERAL)

#: How many other folders are named.
_NAMED_FOLDERS = 6


def _passed_over(source: Source, shown: Path, passed_over: list[Capture], root: Path) -> str:
    """Which folder is shown, which others there are, and how to see one of those."""
    others = {capture.path.parent: capture.path.stat().st_mtime_ns for capture in passed_over if capture.path.parent != shown}
    names = [str(folder.relative_to(root)) for folder in sorted(others, key=lambda folder: others[folder], reverse=True)]
    said = f"{len(passed_over)} {source} {_PASSED_OVER} {shown.relative_to(root)}, written last"
    if not names:
        return f"{said}, and there the last file of each rank"
    more = f" and {len(names) - _NAMED_FOLDERS} more" if len(names) > _NAMED_FOLDERS else ""
    return f"{said}; there are also {', '.join(names[:_NAMED_FOLDERS])}{more}: name {root / names[0]} to read that one"
