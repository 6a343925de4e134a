"""Ranks of a CPU training, forked from a process that has loaded torch and megatron-core already: loading takes each 10 s.

For tests of what is trained; a test of how a rank is started, told to stop or restarted takes a real launcher. The ranks'
environment is the one in which the first of them was asked for: variables that a test sets later do not reach them.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: What would make a process believe that it has peers, or write somewhere else.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "BRIDGE_PROFILING_DIR")

#: Loaded once, before the first rank is forked: the loop, and what it imports in its first iteration.
_LOADED = ["recipes.megatron.train", "recipes.catalog", "megatron.core.datasets.gpt_dataset", "torch.distributed.checkpoint"]

#: Many times what any of these trainings takes; a rank that waits for one that has died would wait for minutes.
_PATIENCE_S = 500


@dataclass(frozen=True)
class Ended:
    """Ranks that have ended: their exit codes, negative for a signal, and what all of them printed."""

    exit_codes: list[int]
    stdout: str
    stderr: str


def run_ranks(function: Callable[..., None], *arguments: object, folder: Path, ranks: int = 1, check: bool = False) -> Ended:
    """Call `function(*arguments)` in every rank, and wait for them all; when one fails the others get SIGTERM.

    Args:
        function: of a module's top level. With more than one rank, torch's default process group (gloo) is there already.
        arguments: can be pickled.
        folder: where the ranks start; their output is kept there.
        ranks: how many.
        check: that all of them end with 0.
    """
    context = _fork_server()
    attempt = len(list(folder.glob("*.stdout")))
    stdout, stderr, meeting = (folder / f"{attempt}.{kind}" for kind in ("stdout", "stderr", "meeting"))
    started = [
        context.Process(target=_rank, args=(function, arguments, rank, ranks, stdout, stderr, meeting)) for rank in range(ranks)
    ]
    for process in started:
        process.start()
    try:
        _wait(started)
    finally:
        for process in started:
            process.kill()
            process.join()
    ended = Ended([process.exitcode for process in started], stdout.read_text(), stderr.read_text())
    assert not check or not any(ended.exit_codes), ended.stdout + ended.stderr
    return ended


def _fork_server() -> multiprocessing.context.ForkServerContext:
    """Python's own server of forks; it lives as long as this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    with pytest.MonkeyPatch.context() as patch:
        # A thread pool that torch starts would not survive a fork.
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        for name in LAUNCHER_VARIABLES:
            patch.delenv(name, raising=False)
        multiprocessing.forkserver.ensure_running()
    return context


def _wait(ranks: list[multiprocessing.context.ForkServerProcess]) -> None:
    """Until all have ended, or one has not in time."""
    running = {process.sentinel: process for process in ranks}
    while running:
        ended = multiprocessing.connection.wait(running, timeout=_PATIENCE_S)
        assert ended, f"{len(running)} ranks are still there after {_PATIENCE_S} s"
        failed = [process for process in map(running.pop, ended) if process.exitcode]
        for process in running.values() if failed else ():
            process.terminate()


def _rank(
    function: Callable[..., None], arguments: tuple, rank: int, ranks: int, stdout: Path, stderr: Path, meeting: Path
) -> None:
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
        os.close(file)
    os.chdir(stdout.parent)
    # A rank's data loader forks its workers; Python would hand the server's start method down to them.
    multiprocessing.set_start_method("fork", force=True)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        import torch

        # They meet at a file: a port that was free may be taken by the time it is used.
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    function(*arguments)
