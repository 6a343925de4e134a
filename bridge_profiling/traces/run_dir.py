"""Finds what a run left in its output directory. Reads manifests, never traces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_profiling.errors import TraceError


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
    manifest: dict[str, Any]

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.manifest["rank"]

    @property
    def captured(self) -> list[int]:
        """Iterations in the capture."""
        return (self.manifest["captured"] or {}).get("iterations", [])

    @property
    def artifacts(self) -> list[Path]:
        """Files of the capture, traces first as the manifest lists them."""
        return [self.root / artifact["path"] for profiler in self.manifest["profilers"] for artifact in profiler["artifacts"]]

    @property
    def torch_trace(self) -> Path | None:
        """The Kineto trace, if there is one."""
        return next((path for path in self.artifacts if path.name.endswith(".pt.trace.json.gz")), None)

    def durations_ns(self, *, profiled: bool) -> list[int]:
        """Durations of the iterations inside the window, or of those outside it that the profiler did not touch.

        The iteration before the window (the profiler warms up in it), the one after it (it pays for the flush) and
        the first of the run (it pays for lazy initialisation) count to neither side.
        """
        durations = self.manifest["durations_ns"]
        iterations = durations["iteration"]
        inside = set(self.captured)
        if not iterations:
            return []
        window = self.manifest["window"]
        near = {window["start"] - 1, window["end"], iterations[0]}
        return [
            duration
            for iteration, duration in zip(iterations, durations["duration_ns"], strict=True)
            if (iteration in inside if profiled else iteration not in inside | near)
        ]


def find_captures(root: Path, folder: str | None = None) -> list[RankCapture]:
    """Every rank's capture under an output directory.

    Args:
        root: the output directory.
        folder: an attempt's folder; None takes the one written last.

    Raises:
        TraceError: there is no manifest, or one cannot be read.
    """
    manifests = sorted((root / "manifest").glob(f"{folder or '*'}/rank-*.json"))
    if not manifests:
        raise TraceError(f"{root} holds no manifest: nothing was profiled into it")
    if folder is None:
        folder = max(manifests, key=lambda path: path.stat().st_mtime_ns).parent.name
    chosen = [path for path in manifests if path.parent.name == folder]
    return sorted((RankCapture(root, folder, _read(path)) for path in chosen), key=lambda capture: capture.rank)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} is no manifest: {error}") from error
