"""Trainings whose threads and own profilers meet our window, each in a process that exits as Python does.

Run as a script: a process that has loaded torch forks one for each case, and prints its exit code and what its manifest says.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import profile

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook


def work() -> None:
    torch.ones(30, 30).matmul(torch.ones(30, 30)).sum().item()


def elsewhere(function: Callable[..., object], *arguments: object) -> None:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def loop(hook: ProfilingHook, iterations: Iterable[int], inside: Callable[[int], object] = lambda iteration: None) -> None:
    for iteration in iterations:
        with hook.iteration(iteration), hook.range("forward"):
            inside(iteration)
            work()


def hooked() -> ProfilingHook:
    config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=2, profile_step_end=4)
    return ProfilingHook(config, rank=0, output_dir="profiles")


def opened_elsewhere() -> None:
    with hooked() as hook:
        elsewhere(loop, hook, range(3))
        loop(hook, range(3, 8))


def ended_elsewhere() -> None:
    with hooked() as hook:
        loop(hook, range(3))
        elsewhere(loop, hook, range(3, 8))
        # Back in the thread that opened it: what is left of the recording goes.
        loop(hook, range(8, 10))
        assert not torch.autograd._profiler_enabled()


def a_thread_for_each_iteration() -> None:
    with hooked() as hook:
        for iteration in range(8):
            elsewhere(loop, hook, [iteration])


def a_range_across_threads() -> None:
    with hooked() as hook:
        loop(hook, range(8), lambda iteration: elsewhere(hook.range("there").__exit__, None, None, None))


def _profile(began: threading.Event, go_on: threading.Event) -> None:
    with profile() as theirs:
        began.set()
        go_on.wait()
        work()
    assert any(event.key == "aten::mm" for event in theirs.key_averages())
    theirs.export_chrome_trace(f"{threading.get_ident()}.json")
    Path("theirs").touch()


def _own_profiler(first: int, last: int) -> None:
    """A profiler in another thread, from inside one iteration to inside another."""
    began, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=_profile, args=(began, go_on))

    def inside(iteration: int) -> None:
        if iteration == first:
            thread.start()
            began.wait()
        if iteration == last:
            go_on.set()
            thread.join()

    with hooked() as hook:
        loop(hook, range(10), inside)
        assert not torch.autograd._profiler_enabled()
    assert Path("theirs").exists(), "the training's own profile is lost"


def own_profiler_in_the_window() -> None:
    _own_profiler(2, 2)


def own_profiler_across_the_window() -> None:
    _own_profiler(0, 6)


def a_stop_without_a_start() -> None:
    with hooked() as hook:
        loop(hook, range(8), lambda iteration: torch.autograd._disable_profiler() if iteration == 2 else None)


CASES = {
    # Status of the window and what its reason says.
    opened_elsewhere: ("failed", "opened in Thread-1 (loop) and ended in MainThread"),
    ended_elsewhere: ("failed", "opened in MainThread and ended in Thread-1 (loop)"),
    a_thread_for_each_iteration: ("failed", "opened in Thread-2 (loop) and started in Thread-3 (loop)"),
    a_range_across_threads: ("complete", ""),
    own_profiler_in_the_window: ("failed", "another profiler was started"),
    own_profiler_across_the_window: ("failed", "another profiler is already recording"),
    a_stop_without_a_start: ("failed", "other code of this process has ended the recording"),
}


def main() -> None:
    here, outcomes = Path.cwd(), {}
    for case in CASES:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            folder = here / case.__name__
            folder.mkdir()
            os.chdir(folder)
            case()
            return  # and exit as every script does
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        manifests = [json.loads(path.read_text()) for path in (here / case.__name__).glob("profiles/manifest/*/rank-0.json")]
        outcomes[case.__name__] = [code, *((one["status"], one["reason"]) for one in manifests)]
    Path("outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
