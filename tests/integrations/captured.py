"""Reads what a training left in its output directory: the manifests, and the iterations and phases in the traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

PHASES = (
    *("data-loading", "host-to-device", "forward", "backward", "forward-backward", "optimizer"),
    *("checkpoint", "evaluation", "logging"),
)


class Captured:
    """The captures of one window below `root`."""

    def __init__(self, root: Path, folder: str) -> None:
        self.root, self._folder = root, folder

    def manifest(self, rank: int = 0) -> dict:
        return json.loads((self.root / "manifest" / self._folder / f"rank-{rank}.json").read_text())

    def events(self, rank: int = 0) -> list[dict]:
        """The complete events of a trace, in the order of their begin."""
        with gzip.open(self.root / "torch" / self._folder / f"rank-{rank}.pt.trace.json.gz", "rt") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        return sorted(events, key=lambda event: event["ts"])

    def ranges(self, rank: int = 0) -> list[str]:
        """Names of the ranges in a trace, in order."""
        return [event["name"] for event in self._ranges(rank)]

    def _ranges(self, rank: int) -> list[dict]:
        return [event for event in self.events(rank) if event.get("cat") == "user_annotation"]

    def phases(self, rank: int = 0) -> dict[int | None, list[str]]:
        """The phases of each iteration in a trace, in order; under None those between iterations."""
        ranges = self._ranges(rank)
        steps = [event for event in ranges if event["name"].startswith("ProfilerStep#")]
        found: dict[int | None, list[str]] = {int(step["name"].removeprefix("ProfilerStep#")): [] for step in steps}
        for event in ranges:
            if event["name"] in PHASES:
                around = [step for step in steps if step["ts"] <= event["ts"] < step["ts"] + step["dur"]]
                number = int(around[0]["name"].removeprefix("ProfilerStep#")) if around else None
                found.setdefault(number, []).append(event["name"])
        return found
