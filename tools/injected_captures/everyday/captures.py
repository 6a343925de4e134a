"""The everyday captures: `cases.json`, read, and the captures themselves, unpacked. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.injected_captures.everyday import columns

FOLDER = Path(__file__).parents[3] / "tests" / "everyday"

#: Rounds of captures of which what was set aside has been looked at.
OPENED = (1, 2, 3, 4)

_TABLE: dict[str, Any] = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Milliseconds:
    """An unprofiled iteration: the median of blocks of nine iterations, the fastest block and the slowest."""

    median: float
    lowest: float
    highest: float

    @property
    def spread(self) -> float:
        """How far the blocks are apart, as a share of the median."""
        return (self.highest - self.lowest) / self.median


@dataclass(frozen=True, kw_only=True)
class Capture:
    """One capture.

    Args:
        name: of the capture, a folder once it is unpacked.
        group: whose file holds it.
        recorder: `hook` or `torch.profiler`.
        world_size: number of ranks; all of them are captured.
        findings: ids of which one must come first; empty for a healthy run.
        ranks: that the finding must name.
        unprofiled: the iteration of this training.
        baseline: name of the capture without the cause; None for a healthy run.
        baseline_unprofiled: its iteration, measured in turns with the other.
        comparable: the cause costs the difference of both iterations.
        set_aside: not looked at while findings were developed.
        round: of captures, from 1 on.
        busy_share: of a healthy run, share of the unprofiled iteration in which its devices compute or copy; else None.
        window_share: how often the cause strikes in the window, over how often it does in the measured iterations.
        pause_alone: the capture has neither stacks nor ranges of the cause, and shows that the host pauses and not why.
    """

    name: str
    group: str
    recorder: str
    world_size: int
    findings: tuple[str, ...]
    ranks: tuple[int, ...]
    unprofiled: Milliseconds
    baseline: str | None = None
    baseline_unprofiled: Milliseconds | None = None
    comparable: bool = True
    set_aside: bool = False
    round: int = 1
    busy_share: float | None = None
    window_share: float = 1.0
    pause_alone: bool = False

    @property
    def gain(self) -> float | None:
        """Milliseconds that an iteration of the window would be shorter without the cause; None where that says nothing."""
        if self.baseline_unprofiled is None or not self.comparable:
            return None
        return (self.unprofiled.median - self.baseline_unprofiled.median) * self.window_share

    @property
    def noise(self) -> float:
        """Milliseconds that the gain may be off, from how far the blocks are apart."""
        if self.baseline_unprofiled is None:
            return 0.0
        pairs = (self.unprofiled, self.baseline_unprofiled)
        return sum(one.highest - one.lowest for one in pairs) / 2 * self.window_share


def _capture(row: dict[str, Any]) -> Capture:
    strikes = row.get("strikes")
    known = {name: value for name, value in row.items() if name in Capture.__dataclass_fields__}
    known |= {name: tuple(row[name]) for name in ("findings", "ranks")}
    known |= {name: Milliseconds(**row[f"{name}_ms"]) for name in ("unprofiled", "baseline_unprofiled") if f"{name}_ms" in row}
    if strikes:
        known["window_share"] = strikes["every"] * strikes["in_window"] / strikes["of"]
    return Capture(**known)


#: Every capture by its name.
CAPTURES: dict[str, Capture] = {row["name"]: _capture(row) for row in _TABLE["captures"]}

#: Those that may be looked at.
VISIBLE: dict[str, Capture] = {
    name: capture for name, capture in CAPTURES.items() if not capture.set_aside or capture.round in OPENED
}

#: Files that hold them.
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(capture.group for capture in CAPTURES.values()))


def unpack(group: str, target: Path) -> None:
    """Write the captures of a group as their recorders left them: a folder for each, with traces and manifests."""
    for path, trace in columns.decode((FOLDER / f"{group}.columns").read_bytes()):
        _write(target / path, trace)
    manifests = FOLDER / f"{group}.manifests.json"
    if manifests.is_file():
        for path, manifest in json.loads(manifests.read_text(encoding="utf-8")).items():
            _write(target / path, manifest)


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
