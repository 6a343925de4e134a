"""The files of a run's directory, also behind links, and which of them are captures: of which profiler, and damaged or not.

Each folder is listed once, and never without end. Reads the first bytes of a trace, never all of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces.bounds import KINETO, unpack
from bridge_profiling.traces.types import Caveat, Source, caveat, texts

#: Bytes of a JSON file that decide whether it is a trace. Everything before the events fits.
_HEAD_BYTES = 1 << 18

#: In quotes of any kind: what Python prints of a trace is not JSON, which its reader says.
_TRACE_KEYS = re.compile(
    rb"[\"'](?:traceEvents|deviceProperties|distributedInfo|baseTimeNanoseconds|displayTimeUnit|ph)[\"']\s*:"
)

#: How our merged traces, pages and flame graphs begin, under whatever name.
_OWN_OUTPUT = re.compile(
    rb'\s*(?:\{\s*"(?:bridge_profiling"\s*:\s*"merged|\$schema"\s*:\s*"https://www\.speedscope)'
    rb'|<!doctype html>.{0,1000}<meta name="generator" content="bridge-profiling)',
    re.DOTALL,
)

_TRACE_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*"rank"\s*:\s*(\d{1,9})\s*[,}]')
NAMED_RANK = re.compile(r"rank[-_ .=]?(\d{1,7})(?!\d)", re.IGNORECASE)

#: Endings of packed files, of which readers unpack some and name the others.
_PACKINGS = (".xz", ".zst", ".bz2", ".lz4", ".zip", ".br")

SUFFIXES: dict[str, Source] = {
    ".json.gz": "kineto",
    ".json": "kineto",
    ".nsys-rep": "nsys",
    ".sqlite": "nsys",
    ".pickle": "memory",
    ".pkl": "memory",
}


class CaptureFile(NamedTuple):
    """A profiler's file, and the rank in its first bytes; None when they name none."""

    path: Path
    source: Source
    rank: int | None


def split(path: Path) -> tuple[str, str]:
    """A file's name without its format, and the format's suffix."""
    name = path.name
    for packed in _PACKINGS:
        name = name.removesuffix(packed)
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    stem = name[: len(name) - len(suffix)] if suffix else name
    return stem.removesuffix(".pt.trace").removesuffix(".trace"), suffix


def named_file(path: Path) -> CaptureFile:
    """The capture in a file that was named, which its reader may refuse.

    Raises:
        TraceError: we made it from captures, or another tool wrote it.
    """
    head = _head(path)
    if of_other := other_format(path, head):
        raise TraceError(of_other)
    if head is not None and _OWN_OUTPUT.match(head):
        raise TraceError(f"{path} is not a capture: bridge-profiling made it from captures. Name their directory")
    return _file(path) or _trace(path, head)


def listed_files(files: Iterable[Path]) -> tuple[list[CaptureFile], list[Path]]:
    """The captures among a directory's files, and the files that are none."""
    left = dict.fromkeys(files)
    known = [file for path in left if (file := _file(path)) is not None]
    for file in known:
        del left[file.path]
    known += _damaged_siblings(left, [file.path for file in known if file.source == "kineto"])
    return _without_exported_reports(_without_links(known)), [*left]


def other_format(path: Path, head: bytes | None = None) -> str | None:
    """What a file or folder of another tool is, and what to pass instead; None for one of an unknown kind.

    `head` are its first bytes, unpacked, which are read if they are needed and not given.
    """
    if head is None and path.is_file():
        head = _head(path)
    for each in _other_formats():
        if each["name"].search(path.name) or (head and each["head"].match(head)):
            return f"{path} is {each['what']}: {each['instead'].format(path=path)}"
    if head == b"" and split(path)[1] in SUFFIXES:
        return f"{path} is empty: the process that wrote it may still run, or was killed"
    return None


@cache
def _other_formats() -> list[dict[str, Any]]:
    never = r"(?!)"
    return [
        {
            **each,
            "name": re.compile(each.get("name", never)),
            "head": re.compile(each.get("head", never).encode(), re.DOTALL),
        }
        for each in texts(__package__, "others.toml")["format"]
    ]


#: A step of torch's profiler, as its trace marks it on the host and on the device, and the process.
_STEP = re.compile(rb'"ProfilerStep#(\d{1,9})"\s*,\s*"pid"\s*:\s*"?(\d{1,10})')

#: More bytes than such a mark has.
_MARK_BYTES = 256


def steps_of(path: Path) -> tuple[frozenset[int], frozenset[int]]:
    """Processes and devices that mark steps of torch's profiler in a trace, and the numbers of the steps. Reads all of it."""
    found: set[tuple[bytes, bytes]] = set()
    end = b""
    with contextlib.suppress(OSError, TraceError):
        for piece in unpack(path, KINETO):
            found.update(_STEP.findall(end + piece))
            end = piece[-_MARK_BYTES:]
    return frozenset(int(process) for _, process in found), frozenset(int(step) for step, _ in found)


def is_capture(path: Path) -> bool:
    """Whether a file is a profiler's, whole or damaged, and not a file that we made from captures."""
    return _file(path) is not None


def _file(path: Path) -> CaptureFile | None:
    """A profiler's file; None when none wrote it. A damaged file named like a capture is one: its reader says why."""
    stem, suffix = split(path)
    source = SUFFIXES.get(suffix)
    if source is None:
        return None
    if source != "kineto":
        return CaptureFile(path, source, None)
    head = _head(path)
    if other_format(path, head):
        return None
    if _is_damaged(head):
        is_trace = ".trace." in path.name or suffix == ".json.gz" or NAMED_RANK.search(stem) is not None
    else:
        is_trace = head is not None and _TRACE_KEYS.search(head) is not None and not _OWN_OUTPUT.match(head)
    return _trace(path, head) if is_trace else None


def _trace(path: Path, head: bytes | None) -> CaptureFile:
    named = _TRACE_RANK.search(head or b"")
    return CaptureFile(path, "kineto", None if named is None else int(named[1]))


def _is_damaged(head: bytes | None) -> bool:
    """Whether a file with these first bytes is neither a whole JSON document nor a file that we made."""
    if head is None:
        return True
    if _OWN_OUTPUT.match(head):
        return False
    if not head.lstrip(b"\0 \t\r\n").startswith((b"{", b"[")):
        return True
    if _TRACE_KEYS.search(head) or (len(head) == _HEAD_BYTES and b"\0" not in head):
        return False
    try:
        json.loads(head)
    except (ValueError, RecursionError):
        return True
    return False


def _damaged_siblings(files: Iterable[Path], traces: Iterable[Path]) -> Iterator[CaptureFile]:
    """Damaged files named like a trace next to them, except for numbers: `trace_3.json` next to `trace_2.json`."""
    patterns = {_pattern(path) for path in traces}
    for path in files:
        if _pattern(path) in patterns and _is_damaged(head := _head(path)):
            yield _trace(path, head)


def unknown_formats(others: Iterable[Path], captures: Iterable[Path]) -> Iterator[str]:
    """A sentence for each file or folder that is named like a capture, but for numbers, and is of a format that nothing reads.

    What also lies next to captures, such as a log of each rank, is none.
    """
    stems: dict[tuple[str, str], set[Path]] = {}
    for capture in captures:
        stem = capture.with_name(split(capture)[0])
        stems.setdefault(_numberless(stem), set()).add(stem)
    found: dict[tuple[str, str], list[Path]] = {}
    companions = set()
    for path in others:
        pieces = path.name.split(".")
        for count in range(len(pieces) - 1, 0, -1):
            stem = path.with_name(".".join(pieces[:count]))
            if (known := stems.get(_numberless(stem))) is not None:
                kind = _numberless(path)
                found.setdefault(kind, []).append(path)
                if stem in known:
                    companions.add(kind)
                break
    for path in (path for kind, paths in found.items() if kind not in companions for path in paths):
        if path.is_file() and _OWN_OUTPUT.match(_head(path) or b""):
            continue
        ranks = NAMED_RANK.findall(str(path))
        of_rank = f"rank {int(ranks[-1])} is not shown: " if ranks else ""
        yield f"{of_rank}{path} is named like a capture and is of no known format; if it is packed, unpack it"


def _numberless(path: Path) -> tuple[str, str]:
    """A path without its ranks' numbers, and without any number in its name."""
    return NAMED_RANK.sub("rank#", str(path.parent)), re.sub(r"\d+", "#", path.name)


def _pattern(path: Path) -> tuple[Path, str]:
    return path.parent, re.sub(r"\d+", "#", path.name)


def _head(path: Path) -> bytes | None:
    """A file's first bytes, unpacked; None when that fails."""
    try:
        return next(unpack(path, KINETO, _HEAD_BYTES), b"")
    except (OSError, TraceError):
        return None


def _without_links(files: list[CaptureFile]) -> list[CaptureFile]:
    """Of a capture and links to it, the capture: `latest.json` can be a link to `rank-0.json`."""
    linked = {file.path: resolved(file.path) for file in files if file.path.is_symlink()}
    if not linked:
        return files
    real = {resolved(file.path) for file in files if file.path not in linked}
    return [file for file in files if linked.get(file.path) not in real]


def _without_exported_reports(files: list[CaptureFile]) -> list[CaptureFile]:
    """Of a report and its SQLite export, the export."""
    exported = {file.path.with_name(split(file.path)[0]) for file in files if split(file.path)[1] == ".sqlite"}
    return [file for file in files if file.path.suffix != ".nsys-rep" or file.path.with_suffix("") not in exported]


def resolved(path: Path) -> Path:
    """A path without symlinks; one that leads nowhere stays."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # before Python 3.13, a loop is a RuntimeError
        return path.absolute()


#: Names that are read behind links. A run may link to its data or its checkpoints, which can be millions of files.
_MAX_LINKED_NAMES = 200_000

#: Links that a caveat names.
_NAMED_LINKS = 6

#: The kernel's files. Reading one can block, never end, or change the machine. `/dev/shm` is a disk like others.
_KERNEL = re.compile(r"/(?:proc|sys|dev(?!/shm(?:/|$)))(?:/|$)")

#: Linux follows no more links in one path.
_MOST_HOPS = 40

#: Why links are not followed: cases in caveats.toml.
_LOST, _UPWARDS, _KERNEL_FILES, _CUT = "lost", "upwards", "kernel", "cut"


class RunFiles:
    """The files under a directory, without hidden ones (temporary files, and caches).

    Links to folders are followed, unless they lead to a folder that contains them, or into /proc, /sys or /dev. A folder that a
    link and the directory itself lead to is listed once, in the directory.
    """

    def __init__(self, root: Path) -> None:
        self.errors: list[str] = []  # folders that cannot be read
        self._files: dict[Path, list[Path]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._links: deque[Path] = deque()  # to folders, not followed yet
        self._left: dict[str, list[Path]] = {why: [] for why in (_LOST, _UPWARDS, _KERNEL_FILES, _CUT)}
        if _KERNEL.match(os.path.realpath(root)):
            self._left[_KERNEL_FILES].append(root)
        else:
            self._add(root, sys.maxsize)
        left = _MAX_LINKED_NAMES
        while self._links:
            link = self._links.popleft()
            if Path(os.path.realpath(link.parent)).is_relative_to(os.path.realpath(link)):
                self._left[_UPWARDS].append(link)
            else:
                left -= self._add(link, left // 2)  # a large folder leaves room for others

    @property
    def files(self) -> list[Path]:
        """By folder, a folder's own before those in it."""
        return [path for folder in sorted(self._files) for path in self._files[folder]]

    @property
    def folders(self) -> list[Path]:
        """Those that files are listed of, the directory itself first."""
        return sorted(self._files)

    @property
    def manifests(self) -> list[Path]:
        """Files, and folders in place of one, that are named and placed as a rank's manifest is."""
        return [path for path in (*self._files, *self.files) if path.match("manifest/*/rank-*.json")]

    @property
    def caveats(self) -> list[Caveat]:
        """A caveat for each reason why links were not followed."""
        return [
            caveat(f"links_not_followed.{why}", links=_named(links), most=_MAX_LINKED_NAMES)
            for why, links in self._left.items()
            if links
        ]

    def _add(self, top: Path, at_most: int) -> int:
        """List a folder and those in it, and keep the links for later. Returns how many names were read."""
        pending, read, cut = [top], 0, False
        while pending and read < at_most:
            folder = pending.pop()
            try:
                found = folder.stat()
                if (found.st_dev, found.st_ino) in self._seen:
                    continue
                self._seen.add((found.st_dev, found.st_ino))
                with os.scandir(folder) as entries:
                    names = sorted(itertools.islice(entries, at_most - read), key=lambda entry: entry.name)
                    cut = next(entries, None) is not None
                read += len(names)
                pending += self._keep(folder, [entry for entry in names if not entry.name.startswith(".")])
            except OSError as error:
                self.errors.append(f"{error.filename} cannot be read: {error.strerror}")
        if pending or cut:
            self._left[_CUT].append(top)
        return read

    def _keep(self, folder: Path, entries: Iterable[os.DirEntry[str]]) -> Iterator[Path]:
        """Keep a folder's files and links; the folders in it."""
        files, is_top = self._files.setdefault(folder, []), os.path.abspath(folder) == "/"
        for entry in entries:
            path = folder / entry.name
            if (is_top and _KERNEL.match(f"/{entry.name}")) or (entry.is_symlink() and _leads_into_kernel(path)):
                self._left[_KERNEL_FILES].append(path)
            elif not entry.is_symlink() and entry.is_dir():
                yield path
            elif entry.is_symlink() and path.is_dir():
                self._links.append(path)
            else:
                files.append(path)
                # A lost link to a file, such as `latest.log`, hides no captures; one to a folder, such as `iter-2-4.1`, can.
                if entry.is_symlink() and not path.suffix[1:2].isalpha() and not os.path.exists(path):
                    self._left[_LOST].append(path)


def _leads_into_kernel(link: Path) -> bool:
    """Whether a link, or one that it leads to, names something in the kernel's files: `/proc/1/cwd` is a link again."""
    path = str(link)
    for _ in range(_MOST_HOPS):
        folder, name = os.path.split(path)
        path = os.path.join(os.path.realpath(folder), name)
        if _KERNEL.match(path):
            return True
        if not os.path.islink(path):
            return False
        path = os.path.abspath(os.path.join(os.path.dirname(path), os.readlink(path)))
        if _KERNEL.match(path):
            return True
    return False


def _named(links: list[Path]) -> str:
    more = f" and {len(links) - _NAMED_LINKS} more" if len(links) > _NAMED_LINKS else ""
    return ", ".join(f"{link} -> {os.path.realpath(link)}" for link in links[:_NAMED_LINKS]) + more
