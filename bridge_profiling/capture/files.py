"""Where a capture's files go, and how they appear there: under their final name only when they are whole."""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.config import DEFAULT_MEMORY_SNAPSHOT_PATH, OUTPUT_DIR_VARIABLE, ProfilingConfig, Window

DEFAULT_OUTPUT_DIR = "profiles"

#: What file systems say that have no hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def resolve_output_dir(config: ProfilingConfig, output_dir: str | os.PathLike[str] | None = None) -> Path:
    """The root of a capture's files: the caller's, else the config's, else BRIDGE_PROFILING_DIR, else ./profiles."""
    chosen = output_dir or config.output_dir or os.environ.get(OUTPUT_DIR_VARIABLE) or DEFAULT_OUTPUT_DIR
    return Path(chosen).expanduser().absolute()


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


def write_whole(path: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary file beside `path`, then give it its name.

    Args:
        path: the final name.
        write: called with the temporary path.

    Raises:
        OSError: the file cannot be written, or `write` left none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_json(path: Path, content: Mapping[str, object]) -> Path:
    """Write JSON that is never seen half-written."""
    return write_whole(path, lambda temporary: _dump(temporary, content))


def create_whole(path: Path, text: str) -> bool:
    """Create a file unless there is one: whole or not at all, also on a shared file system.

    Where there are no hard links (object stores mounted as file systems), for a moment it may be there and empty.

    Returns:
        Whether it was created.

    Raises:
        OSError: nothing can be written there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create(path, text)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _create(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _dump(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def unused(path: Path) -> Path:
    """`path`, or `<stem>.1<suffix>`, `<stem>.2<suffix>`, … : the first name that is free."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return candidate
