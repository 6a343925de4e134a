"""Reads what a training left in its output directory: the manifests, and the iterations and phases in the traces."""

import gzip
import json
from pathlib import Path

PHASES = (
    *("data-loading", "host-to-device", "forward", "backward", "forward-backward", "optimizer"),
    *("checkpoint", "evaluation", "logging"),
)


def read_trace(path: Path) -> dict:
    with gzip.open(path, "rt") as file:
        return json.load(file)


def iterations_in(events: list[dict]) -> list[int]:
    """The iterations of a trace in the order in which they ran, each time that it ran."""
    steps = [event for event in events if event.get("ph") == "X" and event["name"].startswith("ProfilerStep#")]
    return [int(step["name"].removeprefix("ProfilerStep#")) for step in sorted(steps, key=lambda step: step["ts"])]


class Captured:
    """The captures of one window below `root`."""

    def __init__(self, root: Path, folder: str) -> None:
        self.root, self._folder = root, folder

    def manifest(self, rank: int = 0) -> dict:
        return json.loads((self.root / "manifest" / self._folder / f"rank-{rank}.json").read_text())

    def events(self, rank: int = 0) -> list[dict]:
        """The complete events of a trace, in the order of their begin."""
        trace = read_trace(self.root / "torch" / self._folder / f"rank-{rank}.pt.trace.json.gz")
        return sorted((event for event in trace["traceEvents"] if event.get("ph") == "X"), key=lambda event: event["ts"])

    def ranges(self, rank: int = 0) -> list[str]:
        """Names of the ranges in a trace, in order."""
        return [event["name"] for event in self.events(rank) if event.get("cat") == "user_annotation"]

    def phases(self, rank: int = 0) -> dict[int | None, list[str]]:
        """The phases of each iteration in a trace, in order; under None those between iterations."""
        ranges = [event for event in self.events(rank) if event.get("cat") == "user_annotation"]
        steps = [event for event in ranges if event["name"].startswith("ProfilerStep#")]
        found: dict[int | None, list[str]] = {int(step["name"].removeprefix("ProfilerStep#")): [] for step in steps}
        for event in ranges:
            if event["name"] in PHASES:
                around = [step for step in steps if step["ts"] <= event["ts"] < step["ts"] + step["dur"]]
                number = int(around[0]["name"].removeprefix("ProfilerStep#")) if around else None
                found.setdefault(number, []).append(event["name"])
        return found
