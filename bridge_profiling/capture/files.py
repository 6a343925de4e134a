"""Names of a capture's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.config import DEFAULT_MEMORY_SNAPSHOT_PATH, Window


@dataclass(frozen=True)
class CaptureFiles:
    """Names of one rank's files in one attempt of a run.

    Args:
        root: the output directory.
        window: the iterations asked for; they name the folder.
        attempt: 0 for the first, n for the n-th restart into the same root.
        rank: global rank; it names the files.
        memory_snapshot_path: the user's own place for memory snapshots, or the default.
    """

    root: Path
    window: Window
    attempt: int
    rank: int
    memory_snapshot_path: str = DEFAULT_MEMORY_SNAPSHOT_PATH

    @property
    def folder(self) -> str:
        """Name of this attempt's folder, the same under torch/, nsys/, memory/ and manifest/."""
        return folder_name(self.window, self.attempt)

    @property
    def torch_trace(self) -> Path:
        """Kineto trace; the name is what TensorBoard and Perfetto look for."""
        return self.root / "torch" / self.folder / f"rank-{self.rank}.pt.trace.json.gz"

    @property
    def chakra_trace(self) -> Path:
        """Chakra execution trace."""
        return self.root / "torch" / self.folder / f"rank-{self.rank}.et.json"

    @property
    def nsys_report(self) -> Path:
        """nsys' report."""
        return self.root / "nsys" / self.folder / f"rank-{self.rank}.nsys-rep"

    @property
    def memory_snapshot(self) -> Path:
        """Memory snapshot of the window's end."""
        if self.memory_snapshot_path == DEFAULT_MEMORY_SNAPSHOT_PATH:
            return self.root / "memory" / self.folder / f"rank-{self.rank}.pickle"
        asked = self.root / Path(self.memory_snapshot_path).expanduser()
        named = asked.with_name(f"{asked.stem}_{self.rank}{asked.suffix}")
        # The user's path names no attempt, and a restart must not overwrite what the first one wrote.
        return unused(named)

    def oom_snapshot(self, number: int) -> Path:
        """Memory snapshot of this rank's n-th out-of-memory error, counted from 1."""
        return self.root / "memory" / self.folder / f"oom-rank-{self.rank}-{number}.pickle"

    @property
    def manifest(self) -> Path:
        """What was asked, what was captured, and why."""
        return self.root / "manifest" / self.folder / f"rank-{self.rank}.json"


def folder_name(window: Window, attempt: int) -> str:
    """`iter-10-12` for a first attempt, `iter-10-12.1` for the next."""
    return f"iter-{window}" + (f".{attempt}" if attempt else "")


def unused(path: Path) -> Path:
    """`path`, or `<stem>.1<suffix>`, `<stem>.2<suffix>`, … : the first name that is free."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return candidate
