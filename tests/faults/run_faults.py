"""Trains gpt_tiny once for each fault, in forked ranks, and returns what the fault left.

Faults strike the real loop, the real profiler or the real file system.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.overrides import apply_overrides
from launch.pretrain import pretrain
from recipes.megatron.train import Loop
from recipes.models import gpt_tiny
from tests.capture.conftest import Run, raising

SETTINGS = {
    "torch": "profiling.use_pytorch_profiler=true",
    "nsys": "profiling.use_nsys_profiler=true",
    "memory": "profiling.record_memory_history=true",
}

#: The window is 2-5 and the fault strikes in iteration 3, unless its name says otherwise.
STRIKES_IN = 3

AGAIN = "a second run into the same directory"


@contextmanager
def in_iteration(strike: Callable[[], object]) -> Iterator[None]:
    """Call `strike` in the middle of iteration STRIKES_IN of the real loop."""
    step, iterations = Loop._step, iter(range(1000))

    def struck(self: Loop, *arguments: object) -> object:
        if next(iterations) == STRIKES_IN:
            strike()
        return step(self, *arguments)

    with mock.patch.object(Loop, "_step", struck):
        yield


@contextmanager
def small_disk(folder: Path, kilobytes: int = 24, *, read_only: bool = False) -> Iterator[None]:
    """A file system of its own in `folder`, which needs root; a read-only one cannot be written by root either."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        if read_only:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield
    finally:
        # Lazily: Kineto keeps a file open that it could not write to its end.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def while_stopping(strike: Callable[[], object]) -> AbstractContextManager[object]:
    """Call `strike` when the profiler has begun to write."""
    stop = TorchProfiler.stop
    return mock.patch.object(TorchProfiler, "stop", lambda self, interrupted: (strike(), stop(self, interrupted))[1])


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def interrupt() -> None:
    # It may be ignored, as in a background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kill(signal.SIGINT)


def faults(output_dir: Path) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """Every fault by its name, as a context manager around the run."""
    broken = raising(RuntimeError("the profiler broke"))
    return {
        "none": lambda: in_iteration(lambda: None),
        AGAIN: lambda: in_iteration(lambda: None),
        "an exception": lambda: in_iteration(raising(ValueError("injected"))),
        "out of memory (simulated)": lambda: in_iteration(raising(torch.OutOfMemoryError("injected"))),
        "SIGTERM": lambda: in_iteration(partial(kill, signal.SIGTERM)),
        "SIGTERM while the trace is written": lambda: while_stopping(partial(kill, signal.SIGTERM)),
        "Ctrl-C": lambda: in_iteration(interrupt),
        "the profiler fails to start": lambda: mock.patch.object(TorchProfiler, "start", broken),
        "the profiler fails to stop": lambda: mock.patch.object(TorchProfiler, "stop", broken),
        "the output directory is read-only": lambda: small_disk(output_dir, read_only=True),
        "the disk is full": lambda: small_disk(output_dir),
        "the output directory is replaced": lambda: in_iteration(lambda: (output_dir / "torch").write_text("in the way")),
    }


#: With two ranks profiled; this is what strikes rank 1.
RANK_FAULTS = {
    "an exception on rank 1 only": raising(ValueError("injected")),
    "rank 1 is killed (SIGKILL)": partial(kill, signal.SIGKILL),
}


def train(losses: Path, profiler: str | None, output_dir: Path) -> str:
    """Train; how the run ended."""
    config = gpt_tiny()
    window = ["profiling.profile_step_start=2", "profiling.profile_step_end=5", "profiling.profile_ranks=all"]
    asked = [SETTINGS[profiler], *window, f"profiling.output_dir={output_dir}"] if profiler else []
    apply_overrides(config, ["train.train_iters=6", f"logger.loss_file={losses}", *asked])
    try:
        pretrain(config)
    except BaseException as error:
        traceback.print_exc()
        return type(error).__name__
    return "goes on"


def strike_one_after_the_other(folder: Path, cases: Sequence[tuple[str, str]]) -> None:
    """Train once for each fault and profiler, and once without; results.json says what each left."""
    plain = folder / "unprofiled.jsonl"
    train(plain, None, folder)
    results = {}
    for fault, profiler in cases:
        output_dir = folder / profiler / ("none" if fault == AGAIN else fault)
        name, losses = "iter-2-5.1" if fault == AGAIN else "iter-2-5", folder / f"{profiler} {fault}.jsonl"
        with faults(output_dir)[fault]():
            ended = train(losses, profiler, output_dir)
            has_manifest = (output_dir / "manifest" / name).is_dir()
            left = [path.name for path in output_dir.rglob("*") if ".tmp" in path.name or path.name.startswith(".")]
            results[f"{fault}, {profiler}"] = {
                "ended": ended,
                "outcome": Run(output_dir).outcome(name) if has_manifest else None,
                "reason": has_manifest and Run(output_dir).manifest(name)["reason"],
                "half_written": left,
                "losses": losses.read_text().splitlines(),
            }
    results["unprofiled"] = {"losses": plain.read_text().splitlines()}
    (folder / "results.json").write_text(json.dumps(results))


def strike_a_rank(folder: Path, fault: str) -> None:
    """Train under this fault, in each rank; exit code 1 if the training fails."""
    rank = int(os.environ["RANK"])
    with in_iteration(RANK_FAULTS[fault] if rank == 1 else lambda: None):
        ending = train(folder / f"rank-{rank}.jsonl", "torch", folder / "profiles")
    sys.exit(ending != "goes on")
