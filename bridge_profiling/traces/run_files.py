"""Lists the files of a run's directory, also behind links to other folders: each folder once, and never without end."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from bridge_profiling.traces.types import Caveat, caveat

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
