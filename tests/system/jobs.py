"""What system tests share: a job's environment, waiting for it, ending it, and reading what its ranks left."""

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from tests.frameworks.captured import iterations_in, read_trace

ROOT = Path(__file__).resolve().parents[2]

#: What would make a job believe that it is part of another, or change what it captures.
FOREIGN = ("BRIDGE_PROFILING", "LOCAL_RANK", "MASTER_", "NRL_", "PLANTED", "RANK", "SLURM", "TORCHELASTIC", "WORLD_SIZE")


def environment(nsys: Path | None = None, **more: str) -> dict[str, str]:
    """This process' environment for a job that belongs to no other, with this checkout, and with nsys where one is given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = {"PATH": f"{nsys.parent}:{os.environ['PATH']}"} if nsys else {}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | path | more


def ended_well(command: Iterable[object], *, timeout: float = 300, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def cli(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A command of bridge-profiling that must succeed."""
    return ended_well([sys.executable, "-m", "bridge_profiling.cli", *arguments], **options)


def wait_until(happened: Callable[[], object], seconds: float = 300, why: Callable[[], str] = str) -> None:
    """Poll until something has happened.

    Args:
        happened: what is polled.
        seconds: far more than a loaded machine takes.
        why: the message if it never happens.
    """
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, why()
        time.sleep(0.1)


def end_tree(process: subprocess.Popen) -> None:
    """Kill a process that still runs and all that it started: launchers and ranks have sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for running in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                running.kill()
    process.wait()


def manifests(folder: Path, window: str = "*") -> dict[int, dict]:
    """The manifests below a folder by rank."""
    found = [json.loads(path.read_text()) for path in folder.rglob(f"manifest/{window}/rank-*.json")]
    return {manifest["rank"]: manifest for manifest in found}


def by_rank(files: Iterable[Path], read: Callable[[Path], list[int]]) -> dict[int, list[int]]:
    """What is read from files that are named by rank."""
    return {int(re.search(r"rank-(\d+)", path.name)[1]): read(path) for path in files}


def trace_iterations(trace: Path) -> list[int]:
    """The iterations that a Kineto trace names."""
    return sorted(set(iterations_in(read_trace(trace)["traceEvents"])))


def nvtx_ranges(sqlite: Path) -> list[str]:
    """Names of the NVTX ranges in an export of nsys, in the order of their starts."""
    with contextlib.closing(sqlite3.connect(sqlite)) as connection:
        query = "SELECT coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId"
        return [name for (name,) in connection.execute(f"{query} WHERE eventType = 59 ORDER BY start") if name]


def nvtx_iterations(sqlite: Path) -> list[int]:
    """The iterations whose ranges an export of nsys holds."""
    return [int(match[1]) for name in nvtx_ranges(sqlite) if (match := re.fullmatch(r"iteration_(\d+)", name))]
