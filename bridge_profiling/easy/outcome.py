"""The captures of a launch, in lines for the person who started it. Reads manifests only; loads no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from bridge_profiling.manifest import RankCapture, find_captures


def captures_since(root: Path, started_ns: int) -> list[RankCapture]:
    """Captures under an output directory, by folder, that are newer than `started_ns`, as from `time.time_ns`."""
    manifests = (root / "manifest").glob("*/rank-*.json")
    folders = sorted({path.parent.name for path in manifests if path.stat().st_mtime_ns >= started_ns})
    captures = [capture for folder in folders for capture in find_captures(root, folder)]
    return [each for each in captures if each.manifest.clock is not None and each.manifest.clock.unix_ns >= started_ns]


def lines(root: Path, captures: Iterable[RankCapture]) -> list[str]:
    """For each window, failures and their reasons, the captured files, and the command to type next."""
    captures, printed = list(captures), []
    for folder, of_window in groupby(captures, lambda capture: capture.folder):
        mine = list(of_window)
        for capture in mine:
            manifest = capture.manifest
            if manifest.status != "complete":
                reasons = filter(None, [manifest.reason, *(profiler.reason for profiler in manifest.profilers)])
                printed.append(f"rank {capture.rank}, {folder}: {manifest.status}, {next(reasons, 'the reason is unknown')}")
        good = [capture for capture in mine if capture.artifacts]
        if good:
            kinds = sorted({path.parent for capture in good for path in capture.artifacts})
            ranks = f"rank {good[0].rank}" if len(good) == 1 else f"{len(good)} ranks"
            printed.append(f"captured {ranks}: {', '.join(map(str, kinds))}")
    places = list(dict.fromkeys(path.parent for capture in captures for path in capture.artifacts))
    # A directory with one window is read with its unprofiled iterations; of several windows, each is read alone.
    for place in [root] if len({capture.folder for capture in captures if capture.artifacts}) == 1 else places:
        printed.append(f"type: bridge-profiling report {shlex.quote(str(place))}")
    return printed
