"""The captures of everyday trainings: the table of their causes, and the captures themselves, unpacked. Needs no torch.

    python tools/everyday.py FULL TARGET NAME...    # stores the captures of these names, of a set that has more

A set is a folder: `cases.json`, and a file for each group of captures. tests/everyday is the one that the repository keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import columns  # noqa: E402

STORED = ROOT / "tests" / "everyday"

#: Precision of the stored times, as a part of a microsecond: half the size of nanoseconds.
_TICKS = 10


def full() -> Path | None:
    """The set that has all captures: $EVERYDAY_CAPTURES, or shared/everyday next to the checkout; None without."""
    named = os.environ.get("EVERYDAY_CAPTURES")
    folder = Path(named) if named else ROOT.parent / "shared" / "everyday"
    return folder if (folder / "cases.json").is_file() else None


@dataclass(frozen=True)
class Milliseconds:
    """An unprofiled iteration: the median of blocks of nine iterations, the fastest block and the slowest."""

    median: float
    lowest: float
    highest: float


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
        baseline_unprofiled: that of the training without the cause, measured in turns with it; None for a healthy run.
        comparable: the cause costs the difference of both iterations.
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
    baseline_unprofiled: Milliseconds | None = None
    comparable: bool = True
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


def captures(folder: Path) -> dict[str, Capture]:
    """The captures of a set by their names."""
    rows = json.loads((folder / "cases.json").read_text(encoding="utf-8"))["captures"]
    return {row["name"]: _capture(row) for row in rows}


def _capture(row: dict[str, Any]) -> Capture:
    known = {field.name: row[field.name] for field in fields(Capture) if field.name in row}
    known |= {name: tuple(row[name]) for name in ("findings", "ranks")}
    known |= {name: Milliseconds(**row[f"{name}_ms"]) for name in ("unprofiled", "baseline_unprofiled") if f"{name}_ms" in row}
    if strikes := row.get("strikes"):
        known["window_share"] = strikes["every"] * strikes["in_window"] / strikes["of"]
    return Capture(**known)


def documents(folder: Path, group: str) -> dict[str, dict[str, Any]]:
    """Traces and manifests of a group, by the path below the set's unpacked captures."""
    found = dict(columns.decode((folder / f"{group}.columns").read_bytes()))
    manifests = folder / f"{group}.manifests.json"
    return found | (json.loads(manifests.read_text(encoding="utf-8")) if manifests.is_file() else {})


def unpack(folder: Path, group: str, target: Path) -> None:
    """Write the captures of a group as their recorders left them: a folder for each, with traces and manifests."""
    columns.write(documents(folder, group).items(), target)


def store(folder: Path, target: Path, names: set[str]) -> None:
    """Pack the captures of these names, and their rows of `cases.json`, into a set of their own."""
    table = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    kept = [row for row in table["captures"] if row["name"] in names]
    for group in dict.fromkeys(row["group"] for row in kept):
        chosen = {path: each for path, each in documents(folder, group).items() if path.partition("/")[0] in names}
        (target / f"{group}.columns").write_bytes(columns.encode(chosen, _TICKS))
    rows = ",\n".join(json.dumps(row) for row in kept)
    text = f'{{"machines": {json.dumps(table["machines"])},\n"captures": [\n{rows}\n]}}\n'
    (target / "cases.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("full", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    store(options.full, options.target, set(options.names))
