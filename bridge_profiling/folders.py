"""Files below a directory, also those behind links to other directories. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Files that are looked for behind one link: a link to a dataset is no reason to list all of it.
_BEHIND_A_LINK = 20_000


@dataclass
class Files:
    """The files below a directory, each under one path; hidden files and directories are left out."""

    paths: list[Path] = field(default_factory=list)
    directories: list[Path] = field(default_factory=list)
    unreadable: list[OSError] = field(default_factory=list)  # of directories
    not_followed: dict[Path, str] = field(default_factory=dict)  # links to directories, and why


def files_below(root: Path) -> Files:
    """Every file below a directory.

    A directory that several links lead to is read once, under its own path if that is below `root` as well. So links may lead
    in circles.
    """
    found, seen = Files(), set[tuple[int, int]]()
    links: list[Path] = []
    for folder in _walk(root, found, seen, links):
        found.paths += folder
    above = {_identity(os.stat(folder)) for folder in root.absolute().resolve().parents}
    for link in links:  # grows while links are found behind links
        if _identity(os.stat(link)) in above:
            found.not_followed[link] = f"it leads to a directory around {root}"
            continue
        behind: list[Path] = []
        for folder in _walk(link, found, seen, links):
            behind += folder
            if len(behind) > _BEHIND_A_LINK:
                found.not_followed[link] = f"more than {_BEHIND_A_LINK:,} files are behind it"
                break
        else:
            found.paths += behind
    return found


def _walk(start: Path, found: Files, seen: set[tuple[int, int]], links: list[Path]) -> Iterator[list[Path]]:
    """The files of each directory below `start` that has not been seen; adds the links on the way."""
    for folder, folders, names in os.walk(start, onerror=found.unreadable.append):
        identity = _identity(os.stat(folder))
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        found.directories.append(Path(folder))
        visible = sorted(name for name in folders if not name.startswith("."))
        of_links = {name for name in visible if os.path.islink(os.path.join(folder, name))}
        folders[:] = [name for name in visible if name not in of_links]
        links += [Path(folder, name) for name in visible if name in of_links]
        files = [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
        for path in files:
            # A link that leads nowhere looks like a file. One with a suffix was meant to be a file, and its reader says why.
            if not path.suffix and path.is_symlink() and not path.exists():
                found.not_followed[path] = "it leads nowhere"
        yield files


def _identity(of: os.stat_result) -> tuple[int, int]:
    return of.st_dev, of.st_ino
