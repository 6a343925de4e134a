"""SIGTERM in a plain loop: a process with an open window writes its capture first, and still dies of the signal."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.capture.conftest import iterations_in

PRELUDE = """
    import os, signal, sys, threading, torch
    from bridge_profiling import ProfilingConfig
    from bridge_profiling.capture import ProfilingHook

    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    def disposition():
        handler = signal.getsignal(signal.SIGTERM)
        return "default" if handler is signal.SIG_DFL else getattr(handler, "__qualname__", str(handler))

    def opened(**settings):
        config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=2, profile_step_end=6)
        return ProfilingHook(config, rank=0, output_dir=sys.argv[1], **settings)

    def train(hook, strike_in=None, strike=terminate, iterations=9):
        for iteration in range(iterations):
            with hook.iteration(iteration):
                torch.ones(3).sum()
                print(iteration, disposition(), flush=True)
                if iteration == strike_in:
                    strike()
    """


class Ended:
    """A process that has ended, and what it left."""

    def __init__(self, folder: Path, process: subprocess.CompletedProcess) -> None:
        self.code, self.error = process.returncode, process.stderr
        self.lines = process.stdout.splitlines()
        self.manifest = json.loads((folder / "manifest/iter-2-6/rank-0.json").read_text())
        trace = folder / "torch/iter-2-6/rank-0.pt.trace.json.gz"
        self.iterations = iterations_in(json.loads(gzip.decompress(trace.read_bytes()))) if trace.exists() else None


@pytest.fixture
def run_loop(tmp_path):
    def run(loop: str) -> Ended:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(loop))
        command = [sys.executable, str(script), str(tmp_path / "profiles")]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=240)
        return Ended(tmp_path / "profiles", done)

    return run


@pytest.mark.parametrize(
    "loop",
    [
        "with opened() as hook: train(hook, 4)",
        "with opened() as hook: train(hook, 4, lambda: (signal.raise_signal(signal.SIGTERM), terminate()))",
        "hook = opened().__enter__(); train(hook, 4)",
    ],
    ids=["once", "twice", "a hook that is never left"],
)
def test_inside_the_window_the_capture_is_written_and_the_process_dies_of_the_signal(run_loop, loop):
    ended = run_loop(loop)
    assert ended.code == -signal.SIGTERM, ended.error
    assert ended.iterations == ended.manifest["captured"]["iterations"] == [2, 3]
    assert ended.manifest["interrupted"] == [4]
    assert ended.manifest["status"] == "partial"
    assert ended.manifest["reason"].startswith("the process exited")
    assert ended.manifest["reason"].endswith("after iteration 3, inside the window 2-6")
    assert "Traceback" not in ended.error


@pytest.mark.parametrize(("strike_in", "status", "iterations"), [(0, "missed", None), (7, "complete", [2, 3, 4, 5])])
def test_outside_the_window_the_signal_has_its_default_action(run_loop, strike_in, status, iterations):
    """The last window's trace is compressed while training goes on, so this waits for it."""
    ended = run_loop(
        f"""
        def wait_and_terminate():
            for thread in threading.enumerate():
                if "writer" in thread.name:
                    thread.join()
            terminate()

        with opened() as hook:
            train(hook, {strike_in}, wait_and_terminate)
        """
    )
    assert ended.code == -signal.SIGTERM, ended.error
    assert ended.lines == [
        f"{iteration} {'unwind_on._handle' if 2 <= iteration < 6 else 'default'}" for iteration in range(strike_in + 1)
    ]
    assert (ended.manifest["status"], ended.iterations) == (status, iterations)


def test_a_signal_while_the_window_closes_leaves_a_complete_capture(run_loop):
    ended = run_loop(
        """
        from bridge_profiling.capture.torch_profiler import TorchProfiler
        stop = TorchProfiler.stop
        TorchProfiler.stop = lambda self, interrupted: (terminate(), stop(self, interrupted))[1]
        with opened() as hook:
            train(hook)
        """
    )
    assert ended.code == -signal.SIGTERM, ended.error
    assert (ended.manifest["status"], ended.iterations) == ("complete", [2, 3, 4, 5])
    assert ended.lines[-1].startswith("5 ")


@pytest.mark.parametrize(
    ("handler", "code", "captured"),
    [
        ("lambda number, frame: print('theirs', flush=True)", 0, [2, 3, 4, 5]),
        ("lambda number, frame: sys.exit(3)", 3, [2, 3]),
        ("signal.SIG_IGN", 0, [2, 3, 4, 5]),
    ],
    ids=["returns", "exits", "ignores"],
)
def test_a_handler_of_the_users_own_stays_in_place(run_loop, handler, code, captured):
    ended = run_loop(
        f"""
        theirs = {handler}
        signal.signal(signal.SIGTERM, theirs)
        with opened() as hook:
            train(hook, 4, lambda: (print(signal.getsignal(signal.SIGTERM) is theirs), terminate()))
        """
    )
    assert ended.code == code, ended.error
    assert "True" in ended.lines
    assert ended.iterations == ended.manifest["captured"]["iterations"] == captured


def test_a_process_that_exists_for_the_training_exits_with_143(run_loop):
    ended = run_loop("with opened(owns_process=True) as hook: train(hook, 4)")
    assert (ended.code, ended.manifest["status"], ended.iterations) == (143, "partial", [2, 3])


def test_a_loop_in_another_thread_and_a_window_that_ends_early_leave_the_default(run_loop):
    ended = run_loop(
        """
        def loop():
            with opened() as hook:
                train(hook, iterations=5)

        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
        loop()
        print("after", disposition(), flush=True)
        terminate()
        """
    )
    assert ended.code == -signal.SIGTERM, ended.error
    assert [line.split()[1] for line in ended.lines[:5]] == ["default"] * 5
    assert ended.lines[-1] == "after default"
    assert ended.manifest["status"] == "partial"
