"""No fault of a profiler, of a directory or of the hook itself reaches the training, and the manifest says what happened.

Each row of the table in docs/concepts/manifest-and-faults.md: what was captured is kept, the manifest is true, and no loss
changes. Nor does training wait for more of the writing than it must.
"""

import json
import logging
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from bridge_profiling.capture import torch_profiler
from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.capture.torch_recording import observer_is_registered
from tests.capture.conftest import Run, at, raising
from tests.frameworks.captured import iterations_in

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "manifest-and-faults.md"

SETTINGS = {"torch": "use_pytorch_profiler", "nsys": "use_nsys_profiler", "memory": "record_memory_history"}

#: fault, profiler, how the training ends, iterations in the trace, status of the manifest, losses
_, _TABLE = PAGE.read_text(encoding="utf-8").split("## What a fault leaves")
ROWS = [tuple(line.strip("| ").split(" | ")) for line in _TABLE.splitlines() if line.startswith("| ")][1:]
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
    "SIGTERM while the trace is written": ("stop", lambda self, by: (STRIKES["SIGTERM"](), STOP(self, by))[1]),
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


# -- faults that the table does not have ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "failing_in"),
    [
        ("bridge_profiling.capture.torch_profiler.TorchProfiler.open", "open: "),
        ("bridge_profiling.capture.torch_profiler.TorchProfiler.warm_up", "warm up: "),
        ("bridge_profiling.capture.torch_profiler._plain_path", "warm up: "),
        ("torch.profiler._KinetoProfile", "warm up: "),
        ("bridge_profiling.capture.window.Capture.iteration_ended", ""),
    ],
)
def test_a_profiler_that_fails_leaves_the_losses_alone_no_files_and_no_observer(run, monkeypatch, caplog, function, failing_in):
    run.train(None, range(8))
    plain, run.losses = run.losses, []
    monkeypatch.setattr(function, raising(RuntimeError("it broke")))
    run.train(run.config(2, 5, pytorch_profiler_collect_chakra=True), range(8))
    assert run.losses == plain
    manifest, reason = run.manifest("iter-2-5"), f"{failing_in}RuntimeError: it broke"
    assert (*run.outcome("iter-2-5"), manifest["reason"], manifest["final"]) == ("failed", None, reason, True)
    assert "it broke. Training goes on." in caplog.text
    assert ("Traceback" in caplog.text) == (not failing_in), "only an error of the hook's own needs one"
    assert not list(run.root.rglob(".*"))
    assert not torch.autograd._profiler_enabled()
    assert not observer_is_registered()


@pytest.mark.parametrize(
    ("rank", "level", "printed"), [(1, logging.WARNING, True), (2, logging.WARNING, False), (1, logging.INFO, False)]
)
def test_a_training_without_logging_prints_where_its_first_profiled_rank_wrote(run, monkeypatch, capsys, rank, level, printed):
    monkeypatch.setattr(logging.getLogger("bridge_profiling"), "level", level)
    logging.getLogger("bridge_profiling.capture.profiler").manager._clear_cache()
    run.train(run.config(1, 4, profile_ranks=[2, 1]), range(5), rank=rank, world_size=4)
    where = f"{run.root}/torch/iter-1-4/rank-{rank}.pt.trace.json.gz"
    expected = f"bridge_profiling: rank {rank}: torch captured iterations 1 to 3 (complete): {where}\n"
    assert (expected in capsys.readouterr().err) == printed


@pytest.mark.parametrize(("iterations", "status"), [(12, "complete"), (5, "partial")])
def test_training_goes_on_while_a_trace_is_compressed_and_a_kill_then_leaves_it_whole(run, monkeypatch, iterations, status):
    """What a launcher's SIGKILL would leave at that moment, while training goes on and at its end, is read instead.

    Compression ends only after a later iteration has begun: a training that waited for it would wait for ever.
    """
    reached, compress, left = threading.Event(), torch_profiler._compress, []

    def held_up(raw, *arguments, **how):
        assert reached.wait(timeout=60), "training waited for the compression"
        manifest = run.manifest("iter-1-9")
        where = Path(manifest["reason"].partition("the whole trace is in ")[2])
        left.append((manifest["status"], where == raw, iterations_in(json.loads(where.read_text())["traceEvents"])))
        compress(raw, *arguments, **how)

    monkeypatch.setattr(torch_profiler, "_compress", held_up)
    run.train(run.config(1, 9), range(iterations), on_iteration=at(min(11, iterations - 1), reached.set))
    captured = list(range(1, min(iterations, 9)))
    assert left == [("failed", True, captured)]
    assert run.outcome("iter-1-9") == (status, captured)
    assert len(list((run.root / "torch").rglob("*rank-0*"))) == 1
