"""What a test run leaves behind: processes, and files outside of its caches. A port is held by a process."""

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import tempfile
import time
import uuid
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]

#: In the environment of every process that a test run starts, directly or not.
_VARIABLE = "TEST_RUN_ID"

#: Seconds that processes may take to end after the last test: daemons that notice that their parent is gone.
_PATIENCE_S = 20.0


class Leftovers:
    """Knows what was there before a test run, and so what the run left.

    Create it before anything is started.
    """

    def __init__(self) -> None:
        os.environ[_VARIABLE] = uuid.uuid4().hex
        self._mark = f"{_VARIABLE}={os.environ[_VARIABLE]}".encode()
        self._entries = _entries()

    def processes(self) -> list[str]:
        """Processes of this run that still exist after some seconds: process id and command line."""
        # These two live as long as pytest's own process, if that runs the tests.
        multiprocessing.forkserver._forkserver._stop()
        multiprocessing.resource_tracker._resource_tracker._stop()
        deadline = time.monotonic() + _PATIENCE_S
        while (found := self._running()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def files(self) -> list[Path]:
        """What appeared since the start where programs leave files: in temporary folders, the home folder, and the checkout."""
        return sorted(_entries() - self._entries)

    def _running(self) -> list[str]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            # Pytest's own process set the variable after it had started, so it is not among them. A zombie has no environment.
            if self._mark in environment:
                found.append(f"{folder.name} {command}")
        return found


def _entries() -> set[Path]:
    home = Path.home()
    folders = [
        Path("/tmp"),
        Path("/var/tmp"),
        Path("/dev/shm"),
        home,
        home / ".cache",
        home / ".config",
        home / ".local" / "share",
    ]
    inside = Path(tempfile.gettempdir()).resolve()
    # Hidden ones are caches.
    of_checkout = {entry for entry in _ROOT.iterdir() if not entry.name.startswith(".")}
    return of_checkout | {
        entry
        for folder in folders
        if folder.is_dir() and os.access(folder, os.R_OK) and not inside.is_relative_to(folder.resolve())
        for entry in folder.iterdir()
    }
