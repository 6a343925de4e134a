"""How a process ends while a window is open: SIGTERM, SIGKILL, forks, profilers of its own. Each in a forked rank."""

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.torch_profiler import TorchProfiler
from tests.capture.conftest import Run
from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.integration

TERMINATED = -signal.SIGTERM


def show(iteration: object = "") -> None:
    """Print who handles SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    print(iteration, handler.name if isinstance(handler, signal.Handlers) else handler.__qualname__, flush=True)


def exits(number, frame):
    sys.exit(3)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def die():
    os._exit(9)


def train(run: Run, how: dict) -> None:
    """Nine iterations; `strike` in one of them, or when the profiler stops."""
    strike_in, strike, stop = how["strike_in"], how.get("strike", terminate), TorchProfiler.stop
    signal.signal(signal.SIGTERM, how.get("handler", signal.SIG_DFL))
    if strike_in == "stop":
        TorchProfiler.stop = lambda self, interrupted: (strike(), stop(self, interrupted))[1]

    def on_iteration(iteration: int) -> None:
        show(iteration)
        if iteration == strike_in:
            strike()

    owns = how.get("owns_process", False)
    run.train(run.config(2, 6, on_demand=False), range(9), on_iteration=on_iteration, owns_process=owns)


DEFAULT, HANDLED = "SIG_DFL", "unwind_on._handle"
OURS = [DEFAULT] * 2 + [HANDLED] * 4 + [DEFAULT] * 3
ALL, HALF, UNREACHED = ("complete", [2, 3, 4, 5]), ("partial", [2, 3]), "the process ended before it reached iteration 2"
EXITED = "the process exited (code 143) after iteration 3, inside the window 2-6"
KILLED = "the process died inside the window, before the capture was written"


@pytest.mark.parametrize(
    ("how", "code", "handlers", "outcome", "reason"),
    [
        ({"strike_in": 4}, TERMINATED, OURS[:5], HALF, EXITED),
        ({"strike_in": 4, "owns_process": True}, 143, OURS[:5], HALF, EXITED),
        ({"strike_in": "stop"}, TERMINATED, OURS[:6], ALL, None),
        # Outside of the window the signal has its default action.
        ({"strike_in": 0}, TERMINATED, OURS[:1], ("missed", None), UNREACHED),
        # The user's own handler stays.
        ({"strike_in": 4, "handler": exits}, 3, ["exits"] * 5, HALF, EXITED.replace("143", "3")),
        # Nothing runs in a process that is killed: its last manifest is true.
        ({"strike_in": 0, "strike": die}, 9, OURS[:1], ("missed", None), UNREACHED),
        ({"strike_in": 4, "strike": die}, 9, OURS[:5], ("failed", None), KILLED),
    ],
)
def test_a_process_that_ends_leaves_its_capture_and_a_true_manifest(run, tmp_path, how, code, handlers, outcome, reason):
    ended = run_ranks(train, run, how, folder=tmp_path)
    manifest = run.manifest("iter-2-6")
    assert (ended.exit_codes, run.outcome("iter-2-6"), manifest["reason"]) == ([code], outcome, reason)
    assert ended.stdout.splitlines() == [f"{iteration} {handler}" for iteration, handler in enumerate(handlers)]
    assert manifest["interrupted"] == ([4] if outcome == HALF else [])
    # Those that could not write any more.
    assert manifest["final"] == (reason not in (UNREACHED, KILLED))
    assert "Traceback" not in ended.stderr


def test_a_forked_child_profiles_nothing_and_an_interpreter_that_exits_writes_the_open_window_first(run, tmp_path):
    """Forked while a profiler warms up, inside the window, and after it; the capture stays the parent's. Afterwards the parent
    exits with a live trace, with which it would crash."""
    source = f"""
import atexit, multiprocessing
from tests.capture.test_endings import *
run = Run(Path({str(run.root)!r}))

def ends(hook, iteration):
    atexit.register(print, "atexit of", iteration)
    sys.exit(iteration)

def continues(hook, iteration):
    for later in range(iteration + 1, 9):
        with hook.iteration(later), hook.range("phase"):
            torch.ones(3) + 1

def captures(hook, iteration):
    own = Run(run.root / str(iteration))
    own.train(own.config(2, 6, on_demand=False), range(9))
    print(own.outcome("iter-2-6"), flush=True)

def dies(hook, iteration):
    terminate()

def works():
    sys.exit(7)

with ProfilingHook(run.config(2, 6, pytorch_profiler_collect_chakra=True), rank=0, output_dir=run.root) as hook:
    for iteration in range(9):
        with hook.iteration(iteration), hook.range("phase"):
            torch.ones(3) + 1
            for act in {{1: [ends], 4: [ends, continues, captures, dies], 7: [ends]}}.get(iteration, []):
                if (child := os.fork()) == 0:
                    act(hook, iteration)
                    sys.exit(8)
                print(act.__name__, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            if iteration == 4:
                worker = multiprocessing.get_context("fork").Process(target=works)
                worker.start()
                worker.join()
                print(worker.exitcode, flush=True)
hook = ProfilingHook(run.config(2, 6, on_demand=False), rank=0, output_dir=run.root)
hook.__enter__()
for iteration in range(5):
    with hook.iteration(iteration):
        terminate() if iteration == 4 else None
"""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240
    )
    four = ["atexit of 4", "ends 4", "continues 8", str(ALL), "captures 8", "dies -15", "7"]
    expected = ["atexit of 1", "ends 1", *four, "atexit of 7", "ends 7"]
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (TERMINATED, expected), done.stderr
    assert run.outcome("iter-2-6") == ALL
    nodes = json.loads((run.root / "torch/iter-2-6/rank-0.et.json").read_text())["nodes"]
    assert len({one["id"] for one in nodes}) == len(nodes) > 10
    assert run.outcome("iter-2-6.1") == HALF
    assert run.manifest("iter-2-6.1")["reason"] == EXITED.replace("(code 143)", "without leaving the hook")
    assert not list(run.root.rglob(".*"))


def train_in_a_thread(run: Run, how: str) -> None:
    """As `train`, in another thread than the main one."""

    def on_iteration(iteration: int) -> None:
        if how == "a child" and iteration == 3:
            children.append(child := multiprocessing.Process(target=time.sleep, args=(600,)))
            child.start()
            watches.extend(one for one in threading.enumerate() if one.name == "bridge_profiling signals")
        if how == "a child" and iteration == 8:
            [watch], [child] = watches, children
            watch.join(60)
            print("our thread ended before the child:", not watch.is_alive(), child.is_alive())
            child.terminate()
            child.join()
            print("the child ended with", child.exitcode, flush=True)
        if how in ("a child", "exit in the export") or iteration != 4:
            return
        captures.set()
        for _ in range(0 if how == "exit" else 2):
            terminate()
        time.sleep(0.2)  # Long enough for the request to arrive in this iteration.

    captures, children, watches, stop = threading.Event(), [], [], TorchProfiler.stop
    if how == "exit in the export":
        TorchProfiler.stop = lambda self, interrupted: (captures.set(), time.sleep(1), stop(self, interrupted))[2]
    loop = threading.Thread(
        target=run.train, args=(run.config(2, 6), range(9)), kwargs={"on_iteration": on_iteration}, daemon=True
    )
    loop.start()
    if how.startswith("exit"):
        captures.wait()
        atexit._run_exitfuncs()
    else:
        loop.join()


SIGTERM_IN_A_THREAD = "the process received SIGTERM after iteration 4, inside the window 2-6"
EXIT_OF_MAIN = "the process exited without leaving the hook after iteration 4, inside the window 2-6"


@pytest.mark.parametrize(
    ("how", "code", "outcome", "reason"),
    [
        ("SIGTERM", TERMINATED, ("partial", [2, 3, 4]), SIGTERM_IN_A_THREAD),
        ("exit", 0, ("partial", [2, 3, 4]), EXIT_OF_MAIN),
        ("exit in the export", 0, ALL, None),
        ("a child", 0, ALL, None),
    ],
)
def test_a_loop_in_another_thread_writes_its_capture_before_the_process_ends(run, tmp_path, how, code, outcome, reason):
    """And a signal to a child that was forked meanwhile ends the child alone."""
    ended = run_ranks(train_in_a_thread, run, how, folder=tmp_path)
    assert (ended.exit_codes, run.outcome("iter-2-6"), run.manifest("iter-2-6")["reason"]) == ([code], outcome, reason)
    said = ["our thread ended before the child: True True", "the child ended with -15"]
    assert ended.stdout.splitlines() == (said if how == "a child" else [])


def open_ranges_across_recordings(run: Run) -> None:
    """Many, while a profiler of the training's own starts, or while our window closes."""
    for own in (True, False):
        root, ranges = run.root / str(own), ExitStack()
        with ProfilingHook(run.config(1, 2, profile_every=2, profile_at_most=8), rank=0, output_dir=root) as hook:
            for iteration in range(17):
                with hook.iteration(iteration):
                    theirs = torch.profiler.profile()
                    if iteration % 2:
                        ranges.close()
                        for number in range(3000):
                            ranges.enter_context(hook.range(f"ours {number}"))
                    if own and iteration % 2:
                        theirs.start()
                    for _ in range(50):
                        torch.ones(3) + 1
                    if own and iteration % 2:
                        theirs.stop()
                        theirs.export_chrome_trace(f"{iteration}.json")
        ranges.close()


def test_ranges_that_are_open_when_a_recording_ends_end_with_it(run, tmp_path):
    """torch writes their ends to freed memory otherwise, and the process crashes in one of these windows."""
    run_ranks(open_ranges_across_recordings, run, folder=tmp_path, check=True)
    interrupted, ours = (Run(run.root / own) for own in ("True", "False"))
    for start in range(1, 17, 2):
        folder = f"iter-{start}-{start + 1}"
        assert (interrupted.outcome(folder), ours.outcome(folder)) == (("failed", None), ("complete", [start]))
        assert "another profiler" in interrupted.manifest(folder)["reason"]
        names = {event["name"] for event in json.loads((tmp_path / f"{start}.json").read_text())["traceEvents"]}
        assert "aten::add" in names
        assert not [name for name in names if name.startswith(("ours", "ProfilerStep#"))]
        events = [one for one in ours.trace(folder) if one["name"].startswith("ours ") and one["ph"] == "X"]
        # All of them are there, and whole.
        assert {one["name"] for one in events} == {f"ours {number}" for number in range(3000)}
        assert all(one["args"].get("finished", True) for one in events)


def train_with_observers(run: Run, cases: list[tuple[int, int]]) -> None:
    """An ExecutionTraceObserver of the training's own, next to our Chakra trace of iterations 2 to 5."""
    # With it, every `torch.profiler.profile` has an observer.
    os.environ["ENABLE_PYTORCH_EXECUTION_TRACE"] = "1"
    config = run.config(2, 6, pytorch_profiler_collect_chakra=True, on_demand=False)
    for begins, ends in cases:
        root, theirs = run.root / f"{begins}-{ends}", torch.profiler.ExecutionTraceObserver()
        with ProfilingHook(config, rank=0, output_dir=root) as hook:
            for iteration in range(9):
                with hook.iteration(iteration), hook.range("phase"):
                    if iteration == begins:
                        theirs.register_callback(str(root / "theirs.json"))
                        theirs.start()
                    torch.ones(3) + 1
                    if iteration == ends:
                        theirs.stop()
                        theirs.unregister_callback()


def test_another_observer_of_the_process_keeps_its_trace_and_ours_says_why_it_has_none(run, tmp_path):
    """torch crashes when the one of two observers ends that it does not know, or a range that began under the other."""
    ours, gone = ("partial", [2, 3, 4, 5]), ("failed", None)
    expected = {(0, 8): ours, (1, 3): ours, (0, 4): ours, (3, 8): gone, (3, 3): gone, (0, 0): ALL, (6, 8): ALL}
    run_ranks(train_with_observers, run, list(expected), folder=tmp_path, check=True)
    for (begins, ends), outcome in expected.items():
        one = Run(run.root / f"{begins}-{ends}")
        assert one.outcome("iter-2-6") == outcome
        assert (one.root / "torch/iter-2-6/rank-0.et.json").exists() == (outcome == ALL)
        assert outcome == ALL or "an ExecutionTraceObserver of its own" in one.manifest("iter-2-6")["reason"]
        nodes = json.loads((one.root / "theirs.json").read_text())["nodes"]
        assert "aten::add" in {node["name"] for node in nodes}
