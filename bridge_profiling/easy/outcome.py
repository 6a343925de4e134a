"""What a launch captured, in lines for the person who typed it. Reads manifests only; loads no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from bridge_profiling.traces.run_dir import RankCapture, find_captures


def captures_since(root: Path, started_ns: int) -> list[RankCapture]:
    """What was captured under an output directory after a moment.

    Args:
        root: the output directory.
        started_ns: the moment, as `time.time_ns` gives it.

    Raises:
        TraceError: a manifest cannot be read.
    """
    manifests = (root / "manifest").glob("*/rank-*.json")
    folders = sorted({path.parent.name for path in manifests if path.stat().st_mtime_ns >= started_ns})
    captures = [capture for folder in folders for capture in find_captures(root, folder)]
    return [each for each in captures if each.manifest.clock is not None and each.manifest.clock.unix_ns >= started_ns]


def lines(root: Path, captures: Iterable[RankCapture]) -> list[str]:
    """What each window captured, what went wrong and why, where it lies, and what to type next."""
    captures = list(captures)
    told = []
    for folder in sorted({capture.folder for capture in captures}):
        mine = [capture for capture in captures if capture.folder == folder]
        good = [capture for capture in mine if capture.artifacts]
        for capture in mine:
            if capture.manifest.status != "complete":
                told.append(f"rank {capture.rank}, {folder}: {capture.manifest.status}, {_reason(capture)}")
        if good:
            kinds = sorted({path.parent for capture in good for path in capture.artifacts})
            ranks = f"rank {good[0].rank}" if len(good) == 1 else f"{len(good)} ranks"
            told.append(f"captured {ranks}: {', '.join(map(str, kinds))}")
    places = list(dict.fromkeys(path.parent for capture in captures for path in capture.artifacts))
    # A directory with one window is read with what it knows of the unprofiled iterations; of several, each is read alone.
    for place in [root] if len({capture.folder for capture in captures if capture.artifacts}) == 1 else places:
        told.append(f"type: bridge-profiling report {shlex.quote(str(place))}")
    return told


def _reason(capture: RankCapture) -> str:
    reasons = [capture.manifest.reason, *(profiler.reason for profiler in capture.manifest.profilers)]
    return next((reason for reason in reasons if reason), "no reason is known")
