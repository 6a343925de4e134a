"""This process's place among the ranks that measure together, and starting them on this machine when there is no launcher.

Imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.bench.failures import FAILED
from bridge_profiling.launch_env import LaunchEnv

#: Where ranks that were started here meet: a file, since a port that is free now may be taken a moment later.
STORE_VARIABLE = "BRIDGE_PROFILING_BENCH_STORE"

_POLL_S = 0.05

#: How long ranks may take to end after one has failed.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Place:
    """One process of several.

    Args:
        rank: global rank.
        size: number of ranks.
        local_rank: on its host.
        store: the file where the ranks meet; None where MASTER_ADDR and MASTER_PORT say where.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    store: Path | None = None


def place_from(environment: Mapping[str, str]) -> Place | None:
    """This process' place; None where no launcher says one.

    Args:
        environment: variables.

    Raises:
        ProfilingConfigError: a launcher says half of it.
    """
    LaunchEnv.check(environment)
    env, store = LaunchEnv.read(environment), environment.get(STORE_VARIABLE)
    if env.launcher == "none":
        return None
    return Place(env.rank, env.world_size, env.device_index, None if store is None else Path(store))


def start_here(arguments: Sequence[str], processes: int) -> int:
    """Start ranks on this machine and wait for them; when one fails, the others are ended.

    Args:
        arguments: of `python -m bridge_profiling.bench`.
        processes: how many.

    Returns:
        The exit code: of the first rank that failed, 0 when none did.
    """
    with tempfile.TemporaryDirectory(prefix="bridge_profiling-bench-", ignore_cleanup_errors=True) as folder:
        running = [_start(arguments, rank, processes, Path(folder)) for rank in range(processes)]
        try:
            failed = _first_failure(running)
            if failed is None:
                return 0
            # What it said last is why; the others fail because it did.
            print((Path(folder) / f"stderr-{failed}").read_text(errors="replace").rstrip(), file=sys.stderr)
            return running[failed].returncode if running[failed].returncode > 0 else FAILED
        finally:
            _end(running)


def _start(arguments: Sequence[str], rank: int, size: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        STORE_VARIABLE: str(folder / "store"),
        # As torchrun does: ranks of one machine share its processors.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [sys.executable, "-m", "bridge_profiling.bench", *arguments]
    with open(folder / f"stderr-{rank}", "wb") as said:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=said)


def _first_failure(running: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all; the rank that ended first with something else than 0."""
    while True:
        codes = [process.poll() for process in running]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(_POLL_S)


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _PATIENCE_S
    for process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
