"""Trains gpt_tiny once for each fault, in one process, and writes what the fault left.

    torchrun … run_faults.py FOLDER 'rank 1 is killed (SIGKILL)'

Faults strike the real loop, the real profiler or the real file system.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from bridge_profiling.capture.nsys_profiler import NsysProfiler
from bridge_profiling.capture.torch_profiler import MemoryProfiler, TorchProfiler
from bridge_profiling.overrides import apply_overrides
from launch.pretrain import pretrain
from recipes.megatron.train import Loop
from recipes.models import gpt_tiny

PROFILERS = {
    "torch": ("profiling.use_pytorch_profiler=true", TorchProfiler),
    "nsys": ("profiling.use_nsys_profiler=true", NsysProfiler),
    "memory": ("profiling.record_memory_history=true", MemoryProfiler),
}

#: The window is 2-5 and the fault strikes in iteration 3, unless its name says otherwise.
STRIKES_IN = 3


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
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A file system of its own under `folder`; needs root."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        # Lazily: Kineto keeps a file open that it could not write to its end.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A file system that nobody can write, root neither."""
    with small_disk(folder, 100):
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield


def while_stopping(backend: type, strike: Callable[[], object]) -> object:
    """Call `strike` when the profiler has begun to write."""
    stop = backend.stop

    def struck(self: object, interrupted: list[int]) -> object:
        strike()
        return stop(self, interrupted)

    return mock.patch.object(backend, "stop", struck)


def fails(*arguments: object) -> None:
    raise RuntimeError("planted: the profiler broke")


def raises(error: BaseException) -> Callable[[], None]:
    def strike() -> None:
        raise error

    return strike


def faults(root: Path, profiler: str) -> dict[str, Callable[[], object]]:
    """Every fault by its name, as a context manager around the run."""
    process, backend = os.getpid(), PROFILERS[profiler][1]

    def output_replaced() -> None:
        (root / "the output directory is replaced" / profiler).write_text("in the way")

    return {
        "none": lambda: in_iteration(lambda: None),
        "a second run into the same directory": lambda: in_iteration(lambda: None),
        "an exception": lambda: in_iteration(raises(ValueError("planted"))),
        "out of memory (simulated)": lambda: in_iteration(raises(torch.OutOfMemoryError("planted"))),
        "SIGTERM": lambda: in_iteration(lambda: os.kill(process, signal.SIGTERM)),
        "SIGTERM while the trace is written": lambda: while_stopping(backend, lambda: os.kill(process, signal.SIGTERM)),
        "Ctrl-C": lambda: in_iteration(lambda: os.kill(process, signal.SIGINT)),
        "the profiler fails to start": lambda: mock.patch.object(backend, "start", fails),
        "the profiler fails to stop": lambda: mock.patch.object(backend, "stop", fails),
        "the output directory is read-only": lambda: read_only(root / "the output directory is read-only"),
        "the disk is full": lambda: small_disk(root / "the disk is full", 24),
        "the output directory is replaced": lambda: in_iteration(output_replaced),
    }


#: With two ranks profiled.
RANK_FAULTS: dict[str, Callable[[int], object]] = {
    "an exception on rank 1 only": lambda rank: in_iteration(raises(ValueError("planted")) if rank == 1 else lambda: None),
    "rank 1 is killed (SIGKILL)": lambda rank: in_iteration(
        (lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == 1 else lambda: None
    ),
}


def train(folder: Path, name: str, profiling: str | None, output_dir: Path) -> str:
    """Train; how the run ended."""
    config = gpt_tiny()
    window = ["profiling.profile_step_start=2", "profiling.profile_step_end=5", "profiling.profile_ranks=all"]
    asked = [profiling, *window, f"profiling.output_dir={output_dir}"] if profiling else []
    apply_overrides(config, ["train.train_iters=6", f"logger.loss_file={folder}/{name}.jsonl", *asked])
    try:
        pretrain(config)
    except BaseException as error:
        traceback.print_exc()
        return type(error).__name__
    return "trained"


def manifest_of(output_dir: Path, folder: str = "iter-2-5") -> object:
    """The manifest of rank 0, or None."""
    path = output_dir / "manifest" / folder / "rank-0.json"
    return json.loads(path.read_text()) if path.is_file() else None


def strike_one_after_the_other(folder: Path, profiler: str, names: Sequence[str]) -> None:
    """Train once for each fault; results.json says how each ended."""
    results = {"unprofiled": {"ended": train(folder, "unprofiled", None, folder), "manifest": None, "left": []}}
    struck = faults(folder, profiler)
    for name in names or struck:
        again = name == "a second run into the same directory"
        output_dir = folder / ("none" if again else name)
        with struck[name]():
            ended = train(folder, name, PROFILERS[profiler][0], output_dir)
            manifest = manifest_of(output_dir, "iter-2-5.1" if again else "iter-2-5")
            left = sorted(str(path.relative_to(output_dir)) for path in output_dir.rglob("*") if path.is_file())
        results[name] = {"ended": ended, "manifest": manifest, "left": left}
    (folder / "results.json").write_text(json.dumps(results))


def strike_a_rank(folder: Path, fault: str) -> None:
    """Train under this fault, in each rank; exit code 1 if the training fails."""
    rank = int(os.environ["RANK"])
    with RANK_FAULTS[fault](rank):
        ending = train(folder, f"rank-{rank}", PROFILERS["torch"][0], folder / "profiles")
    sys.exit(ending != "trained")


if __name__ == "__main__":
    strike_a_rank(Path(sys.argv[1]), sys.argv[2])
