"""Each row of the table in docs/concepts/faults.md: what was captured is kept, the manifest is true, and no loss changes."""

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from bridge_profiling.capture.torch_profiler import TorchProfiler
from tests.capture.conftest import Run, at, raising

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "faults.md"

SETTINGS = {"torch": "use_pytorch_profiler", "nsys": "use_nsys_profiler", "memory": "record_memory_history"}

#: fault, profiler, how the training ends, iterations in the trace, status of the manifest, losses
ROWS = [
    tuple(line.strip("| ").split(" | ")) for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
][1:]
READ_ONLY, FULL, AGAIN = "the output directory is read-only", "the disk is full", "a second run into the same directory"

STRIKES = {
    "an exception": raising(ValueError("injected")),
    "out of memory (simulated)": raising(torch.OutOfMemoryError("injected")),
    "SIGTERM": lambda: signal.raise_signal(signal.SIGTERM),
    "Ctrl-C": lambda: signal.raise_signal(signal.SIGINT),
}
STOP = TorchProfiler.stop
BROKEN = raising(RuntimeError("the profiler broke"))
PATCHED = {
    "SIGTERM while the trace is written": (
        "stop",
        lambda self, interrupted: (STRIKES["SIGTERM"](), STOP(self, interrupted))[1],
    ),
    "the profiler fails to start": ("start", BROKEN),
    "the profiler fails to stop": ("stop", BROKEN),
}


@contextmanager
def small_disk(folder: Path, *, read_only: bool) -> Iterator[None]:
    """A file system of its own in `folder`, which needs root; a read-only one cannot be written by root either."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(folder)], check=True)
    try:
        if read_only:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield
    finally:
        # Lazily: Kineto keeps a file open that it could not write to its end.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def train(run: Run, profiler: str, strike: Callable[[], object]) -> str:
    """Six iterations with the window 2-5, struck in iteration 3; how it ended."""
    run.losses = []
    try:
        config = run.config(2, 5, **{"use_pytorch_profiler": False, SETTINGS[profiler]: True})
        run.train(config, range(6), on_iteration=at(3, strike), owns_process=True)
    except BaseException as error:
        return type(error).__name__
    return "goes on"


def marked(row: tuple[str, ...]):
    on_disk = [pytest.mark.integration, pytest.mark.needs("mount")] if row[0] in (READ_ONLY, FULL) else []
    return pytest.param(row, marks=on_disk, id=f"{row[0]}, {row[1]}")


@pytest.mark.parametrize("row", map(marked, ROWS))
def test_a_fault_leaves_what_was_captured_and_the_truth_about_it(run, monkeypatch, row):
    fault, profiler, ended, captured, status, losses = row
    run.train(None, range(6))
    plain, folder = run.losses, "iter-2-5"

    def replace() -> None:
        shutil.rmtree(run.root / "torch", ignore_errors=True)
        (run.root / "torch").write_text("in the way")

    strike = {**STRIKES, "the output directory is replaced": replace}.get(fault, lambda: None)
    assert fault in {"none", AGAIN, READ_ONLY, FULL, "the output directory is replaced", *STRIKES, *PATCHED}
    if fault == AGAIN:
        train(run, profiler, strike)
        folder = "iter-2-5.1"
    if fault in PATCHED:
        monkeypatch.setattr(TorchProfiler, *PATCHED[fault])
    # It may be ignored, as in a background job.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with small_disk(run.root, read_only=fault == READ_ONLY) if fault in (READ_ONLY, FULL) else nullcontext():
        assert train(run, profiler, strike) == ended
        signal.signal(signal.SIGINT, before)
        if status == "none, a line on stderr":
            assert not list(run.root.iterdir())
        else:
            found, iterations = run.outcome(folder)
            shown = "nothing" if iterations is None else ", ".join(map(str, iterations))
            assert (found, shown) == (status, captured)
            assert bool(run.manifest(folder)["reason"]) == (status != "complete")
        assert not [path for path in run.root.rglob("*") if ".tmp" in path.name or path.name.startswith(".")]
    assert losses == "identical"
    assert run.losses == plain[: 6 if ended == "goes on" else 5 if status == "complete" else 3]
