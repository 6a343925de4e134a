"""The captures of a launch, in lines for the person who started it. Reads manifests only; loads no torch."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from bridge_profiling.common.printable import shell_path
from bridge_profiling.common.regular_files import modified_ns
from bridge_profiling.layout import name_ranks
from bridge_profiling.manifest import RankCapture, find_captures


def captures_since(root: Path, started_ns: int) -> list[RankCapture]:
    """Captures under an output directory, by folder, that are newer than `started_ns`, as from `time.time_ns`."""
    manifests = (root / "manifest").glob("*/rank-*.json")
    folders = sorted({path.parent.name for path in manifests if modified_ns(path) >= started_ns})
    captures = [capture for folder in folders for capture in find_captures(root, folder)]
    return [each for each in captures if each.manifest.clock is not None and each.manifest.clock.unix_ns >= started_ns]


def lines(root: Path, captures: Iterable[RankCapture], *, next_to_others: str = "") -> list[str]:
    """For each window, failures and their reasons, the captured files, and the command to type next.

    `next_to_others` is the folder of a window to read alone, because the root holds other windows of the run.
    """
    captures, printed = list(captures), []
    for folder, of_window in groupby(captures, lambda capture: capture.folder):
        mine = list(of_window)
        failed: dict[str, list[int]] = {}
        for capture in mine:
            manifest = capture.manifest
            if manifest.status != "complete":
                reasons = filter(None, [manifest.reason, *(profiler.reason for profiler in manifest.profilers)])
                why = f"{manifest.status}, {next(reasons, 'the reason is unknown')}"
                failed.setdefault(why, []).append(capture.rank)
        printed += [f"{name_ranks(ranks)}, {folder}: {why}" for why, ranks in failed.items()]
        good = [capture for capture in mine if capture.artifacts]
        if good:
            kinds = sorted({path.parent for capture in good for path in capture.artifacts})
            ranks = f"rank {good[0].rank}" if len(good) == 1 else f"{len(good)} ranks"
            printed.append(f"captured {ranks}: {', '.join(map(str, kinds))}")
    printed += [
        f"type: {own_command('report', str(place))}"
        for place in places_to_report(root, captures, next_to_others=next_to_others).values()
    ]
    return printed


def places_to_report(root: Path, captures: Iterable[RankCapture], *, next_to_others: str = "") -> dict[str, Path]:
    """What to type after `report` for each window, by the name of its folder.

    A directory with one window is read with its unprofiled iterations; of several windows, each is read alone.
    """
    files = {capture.folder: capture.artifacts for capture in captures if capture.artifacts}
    is_alone = len(files) == 1 and next(iter(files)) != next_to_others
    return {folder: root if is_alone else paths[0].parent for folder, paths in files.items()}


def own_command(*arguments: str) -> str:
    """A command of ours as it works in this shell: by its path where its environment is not activated."""
    name, sibling = "bridge-profiling", Path(sys.executable).with_name("bridge-profiling")
    found = shutil.which(name)
    if sibling.exists() and (found is None or not Path(found).samefile(sibling)):
        name = shortest_path(sibling)
    return " ".join(map(shell_path, (name, *arguments)))


def shortest_path(path: Path) -> str:
    """A path as one would type it: relative to the working directory where it is below that."""
    here = os.path.relpath(path)
    return str(path) if here.startswith("..") else here
