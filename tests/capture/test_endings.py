"""How a process ends while a window is open: SIGTERM, SIGKILL, forks, profilers of its own. Each in a forked rank."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.files import choose_attempt
from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.config import Window
from tests.capture.conftest import Run
from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.integration

TERMINATED = -signal.SIGTERM

HANDLED, DEFAULT = "unwind_on._handle", "SIG_DFL"


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def disposition() -> str:
    handler = signal.getsignal(signal.SIGTERM)
    return handler.name if isinstance(handler, signal.Handlers) else handler.__qualname__


def opened(root: Path, **settings: object) -> ProfilingHook:
    config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=2, profile_step_end=6, on_demand=False)
    return ProfilingHook(config, rank=0, output_dir=root, **settings)


def train(hook: ProfilingHook, strike_in: int | None = None, strike: Callable[[], object] = terminate) -> None:
    """Nine iterations, each with a line of its number and who handles SIGTERM then."""
    for iteration in range(9):
        with hook.iteration(iteration):
            torch.ones(3).sum()
            print(iteration, disposition(), flush=True)
            if iteration == strike_in:
                strike()


# -- what happens in a rank --------------------------------------------------------------------------------------------


def terminated_in(root: Path, iteration: int) -> None:
    with opened(root) as hook:
        train(hook, iteration)


def terminated_twice(root: Path) -> None:
    with opened(root) as hook:
        train(hook, 4, lambda: (signal.raise_signal(signal.SIGTERM), terminate()))


def terminated_without_leaving_the_hook(root: Path) -> None:
    try:
        train(opened(root).__enter__(), 4)
    finally:
        # An interpreter that exits calls them, a forked rank does not.
        atexit._run_exitfuncs()


def terminated_while_the_window_closes(root: Path) -> None:
    stop = TorchProfiler.stop
    TorchProfiler.stop = lambda self, interrupted: (terminate(), stop(self, interrupted))[1]
    terminated_in(root, -1)


def terminated_after_the_window(root: Path) -> None:
    """The last window's trace is compressed while training goes on, so this waits for it."""

    def wait_and_terminate() -> None:
        for thread in threading.enumerate():
            if "writer" in thread.name:
                thread.join()
        terminate()

    with opened(root) as hook:
        train(hook, 7, wait_and_terminate)


def terminated_in_a_process_of_our_own(root: Path) -> None:
    with opened(root, owns_process=True) as hook:
        train(hook, 4)


def returns(number: int, frame: object) -> None:
    pass


def exits(number: int, frame: object) -> None:
    sys.exit(3)


def with_a_handler(root: Path, handler: object) -> None:
    signal.signal(signal.SIGTERM, handler)
    terminated_in(root, 4)


def killed_in(root: Path, iteration: int) -> None:
    with opened(root) as hook:
        train(hook, iteration, lambda: os._exit(9))


OURS = [DEFAULT, DEFAULT, HANDLED, HANDLED, HANDLED, HANDLED, DEFAULT, DEFAULT, DEFAULT]
INSIDE = "the process exited (code 143) after iteration 3, inside the window 2-6"


@pytest.mark.parametrize(
    ("scenario", "code", "handlers", "outcome", "reason"),
    [
        ((terminated_in, 4), TERMINATED, OURS[:5], ("partial", [2, 3]), INSIDE),
        ((terminated_twice,), TERMINATED, OURS[:5], ("partial", [2, 3]), INSIDE),
        (
            (terminated_without_leaving_the_hook,),
            TERMINATED,
            OURS[:5],
            ("partial", [2, 3]),
            INSIDE.replace("(code 143)", "without leaving the hook"),
        ),
        ((terminated_in_a_process_of_our_own,), 143, OURS[:5], ("partial", [2, 3]), INSIDE),
        ((terminated_while_the_window_closes,), TERMINATED, OURS[:6], ("complete", [2, 3, 4, 5]), None),
        # Outside of the window the signal has its default action.
        ((terminated_in, 0), TERMINATED, OURS[:1], ("missed", None), "the process ended before it reached iteration 2"),
        ((terminated_after_the_window,), TERMINATED, OURS[:8], ("complete", [2, 3, 4, 5]), None),
        # The user's own handlers stay.
        ((with_a_handler, returns), 0, ["returns"] * 9, ("complete", [2, 3, 4, 5]), None),
        ((with_a_handler, exits), 3, ["exits"] * 5, ("partial", [2, 3]), INSIDE.replace("143", "3")),
        ((with_a_handler, signal.SIG_IGN), 0, ["SIG_IGN"] * 9, ("complete", [2, 3, 4, 5]), None),
        # Nothing runs in a process that is killed: its last manifest is true.
        ((killed_in, 0), 9, OURS[:1], ("missed", None), "the process ended before it reached iteration 2"),
        ((killed_in, 4), 9, OURS[:5], ("failed", None), "the process died inside the window, before the capture was written"),
    ],
)
def test_a_process_that_ends_leaves_its_capture_and_a_true_manifest(tmp_path, scenario, code, handlers, outcome, reason):
    function, *arguments = scenario
    ended = run_ranks(function, tmp_path / "profiles", *arguments, folder=tmp_path)
    run = Run(tmp_path / "profiles")
    assert (ended.exit_codes, run.outcome("iter-2-6"), run.manifest("iter-2-6")["reason"]) == ([code], outcome, reason)
    assert ended.stdout.splitlines() == [f"{iteration} {handler}" for iteration, handler in enumerate(handlers)]
    assert run.manifest("iter-2-6")["interrupted"] == ([4] if outcome[0] == "partial" else [])
    assert "Traceback" not in ended.stderr


def test_an_interpreter_that_exits_with_an_open_window_writes_it_first(tmp_path):
    """It would crash with a live trace."""
    source = f"""
        import sys
        from tests.capture.test_endings import opened, train
        train(opened({str(tmp_path / "profiles")!r}).__enter__(), 4, lambda: sys.exit(3))
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 3, done.stderr
    assert Run(tmp_path / "profiles").outcome("iter-2-6") == ("partial", [2, 3])


def train_in_a_thread_and_break_off(root: Path) -> None:
    def loop() -> None:
        with opened(root) as hook:
            for iteration in range(5):
                with hook.iteration(iteration):
                    print(disposition())

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    loop()
    print(disposition(), flush=True)
    terminate()


def test_a_loop_in_another_thread_and_a_window_that_ends_early_leave_the_default(tmp_path):
    ended = run_ranks(train_in_a_thread_and_break_off, tmp_path / "profiles", folder=tmp_path)
    assert ended.exit_codes == [TERMINATED], ended.stderr
    assert ended.stdout.splitlines() == [DEFAULT] * 5 + OURS[:5] + [DEFAULT]
    assert Run(tmp_path / "profiles").outcome("iter-2-6.1") == ("partial", [2, 3, 4])


def fork_inside_the_window(root: Path) -> None:
    hook = opened(root)

    def fork() -> None:
        before = Run(root).manifest("iter-2-6")
        for end in (lambda: hook.__exit__(None, None, None), lambda: hook._close("the process exited"), terminate):
            child = os.fork()
            if not child:
                end()
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), Run(root).manifest("iter-2-6") == before)

    with hook:
        train(hook, 4, fork)


def test_a_process_that_the_training_forks_writes_nothing_and_dies_of_the_signal(tmp_path):
    ended = run_ranks(fork_inside_the_window, tmp_path / "profiles", folder=tmp_path)
    assert ended.exit_codes == [0], ended.stderr
    assert ended.stdout.splitlines()[5:8] == ["0 True", "0 True", f"{TERMINATED} True"]
    assert Run(tmp_path / "profiles").outcome("iter-2-6") == ("complete", [2, 3, 4, 5])


# -- ranges that outlive their recording ---------------------------------------------------------------------------------


def compute() -> None:
    for _ in range(50):
        torch.ones(3) + 1


def enter_ranges(hook: ProfilingHook, ranges: ExitStack, count: int = 3000) -> None:
    for number in range(count):
        ranges.enter_context(hook.range(f"ours {number}"))


def start_a_profiler_of_its_own(run: Run, theirs_to: Path) -> None:
    for _ in range(8):
        with ProfilingHook(run.config(1, 3), rank=0, output_dir=run.root) as hook:
            theirs = torch.profiler.profile()
            for iteration in range(4):
                with hook.iteration(iteration), ExitStack() as ranges:
                    enter_ranges(hook, ranges, 3000 if iteration == 1 else 1)
                    if iteration == 1:
                        theirs.start()
                    compute()
            theirs.stop()
    theirs.export_chrome_trace(str(theirs_to))


def test_ranges_that_are_open_when_the_training_starts_a_profiler_of_its_own_end_before_it(tmp_path, run):
    """torch writes their ends to freed memory otherwise, and the process crashes in one of these windows."""
    ended = run_ranks(start_a_profiler_of_its_own, run, tmp_path / "theirs.json", folder=tmp_path)
    assert ended.exit_codes == [0], ended.stderr
    names = {event["name"] for event in json.loads((tmp_path / "theirs.json").read_text())["traceEvents"]}
    assert "aten::add" in names
    assert not [name for name in names if name.startswith(("ours", "ProfilerStep#"))]
    reasons = [run.manifest(folder)["reason"] for folder in run.folders() if run.outcome(folder) == ("failed", None)]
    assert ["another profiler" in reason for reason in reasons] == [True] * 8


def keep_ranges_open(run: Run) -> None:
    ranges = ExitStack()
    with ProfilingHook(run.config(1, 2, profile_every=2, profile_at_most=8), rank=0, output_dir=run.root) as hook:
        for iteration in range(17):
            with hook.iteration(iteration):
                compute()
                if iteration % 2:
                    ranges.close()
                    enter_ranges(hook, ranges)
                compute()
    ranges.close()


def test_ranges_that_are_open_when_a_window_closes_end_with_it(tmp_path, run):
    """As above, with the next window's profiler in the other's place."""
    ended = run_ranks(keep_ranges_open, run, folder=tmp_path)
    assert ended.exit_codes == [0], ended.stderr
    assert [run.outcome(f"iter-{start}-{start + 1}") for start in range(1, 17, 2)] == [
        ("complete", [start]) for start in range(1, 17, 2)
    ]
    # The oldest window's ranges and the last one's: all of them are there, and whole.
    for folder in ("iter-1-2", "iter-15-16"):
        events = [one for one in run.trace(folder) if one["name"].startswith("ours ") and one["ph"] == "X"]
        assert {one["name"] for one in events} == {f"ours {number}" for number in range(3000)}
        assert all(one["args"].get("finished", True) for one in events)


# -- connected ranks -----------------------------------------------------------------------------------------------------


def choose(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    root = folder / f"node-{rank}"
    if rank == 0:
        (root / "torch" / "iter-1-2").mkdir(parents=True)
    (folder / f"attempt-{rank}").write_text(str(choose_attempt(root, Window(1, 2), rank)[0]))


def test_connected_ranks_take_rank_zeros_choice(tmp_path):
    """Rank 1 sees another directory, as on a node-local file system, and still writes to the same folder's name."""
    ended = run_ranks(choose, tmp_path, folder=tmp_path, ranks=2)
    assert ended.exit_codes == [0, 0], ended.stderr
    assert [(tmp_path / f"attempt-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
