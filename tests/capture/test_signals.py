"""A signal that would kill a process unwinds it instead, and whoever handles it keeps it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from threading import Thread

import pytest

from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.capture.signals import exit_is_pending, raised_by_handler, signals_held, unwind_on
from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.capture.window import CaptureWindow

USR = signal.SIGUSR1


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.signal(USR, signal.SIG_DFL)
    yield
    signal.signal(USR, before)


def test_the_first_signal_unwinds_and_later_ones_do_not_end_the_writing() -> None:
    with unwind_on(USR) as unwinding:
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(USR)
        assert ended.value.code == 128 + USR
        assert unwinding.received
        signal.raise_signal(USR)
        with signals_held():
            signal.raise_signal(USR)
    assert signal.getsignal(USR) is signal.SIG_DFL
    assert not exit_is_pending()


def test_the_default_is_back_afterwards_also_when_it_is_entered_and_left_twice() -> None:
    unwinding = unwind_on(USR)
    for _ in range(2):
        with unwinding, unwinding:
            assert signal.getsignal(USR) is not signal.SIG_DFL
        assert signal.getsignal(USR) is signal.SIG_DFL
    assert not unwinding.received


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_an_installed_handler_is_replaced_only_on_request(handler) -> None:
    signal.signal(USR, handler)
    with unwind_on(USR):
        assert signal.getsignal(USR) is handler
    assert signal.getsignal(USR) is handler
    with unwind_on(USR, replace=True), pytest.raises(SystemExit):
        signal.raise_signal(USR)
    assert signal.getsignal(USR) is handler


def test_a_handler_that_is_installed_in_between_is_left_alone() -> None:
    with unwind_on(USR):
        signal.signal(USR, signal.SIG_IGN)
    assert signal.getsignal(USR) is signal.SIG_IGN


def test_another_thread_than_the_main_one_changes_nothing() -> None:
    seen: list[object] = []

    def enter() -> None:
        with unwind_on(USR, replace=True):
            seen.append(signal.getsignal(USR))

    thread = Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_a_process_that_the_training_forks_dies_of_the_signal() -> None:
    with unwind_on(USR):
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                signal.raise_signal(USR)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -USR


class _Handlers:
    def method(self, number: int, frame: object) -> None:
        raise RuntimeError("planted")

    def __call__(self, number: int, frame: object) -> None:
        raise RuntimeError("planted")


def _function(number: int, frame: object) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("handler", [_function, _Handlers().method, _Handlers()])
def test_what_a_handler_raises_is_told_from_what_fails_by_itself(handler) -> None:
    signal.signal(USR, handler)
    with pytest.raises(RuntimeError) as raised:
        signal.raise_signal(USR)
    assert raised_by_handler(raised.value)
    with pytest.raises(RuntimeError) as held, signals_held():
        signal.raise_signal(USR)
    assert raised_by_handler(held.value)
    with pytest.raises(RuntimeError) as own:
        raise RuntimeError("planted")
    assert not raised_by_handler(own.value)


@pytest.mark.parametrize(
    "number", [signal.SIGCHLD, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT]
)
def test_a_signal_with_a_handler_is_held(number) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda *_: seen.append(number))
    try:
        with signals_held():
            signal.raise_signal(number)
            assert not seen
        assert seen == [number]
    finally:
        signal.signal(number, before)


@pytest.fixture
def a_lost_worker():
    """What a data loader of PyTorch does when the system tells it that one of its processes died, by another signal than the
    system's: children of other tests die too."""

    def lost(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker is killed by signal: Terminated")

    signal.signal(USR, lost)
    return lambda: signal.raise_signal(USR)


@pytest.mark.parametrize(
    ("step", "status", "iterations"),
    [
        ("warm_up", "missed", None),
        ("start", "partial", []),
        ("iteration_range", "partial", [4]),
        ("phase_range", "partial", [4]),
        ("stop", "complete", [4, 5]),
    ],
)
def test_a_handler_that_raises_in_the_hook_ends_the_training_and_not_the_capture(
    run, monkeypatch, a_lost_worker, step, status, iterations
) -> None:
    real = getattr(TorchProfiler, step)

    def interrupted(self, *arguments):
        if step in ("warm_up", "start", "stop") or len(run.losses) == 5:
            a_lost_worker()
        return real(self, *arguments)

    monkeypatch.setattr(TorchProfiler, step, interrupted)
    with pytest.raises(RuntimeError, match="is killed by signal"):
        run.train(run.config(4, 6), range(9))
    manifest = run.manifest("iter-4-6")
    assert manifest["status"] == status
    assert status == "complete" or "is killed by signal" in manifest["reason"]
    if iterations is not None:
        assert run.iterations("iter-4-6") == (manifest["captured"] or {"iterations": []})["iterations"] == iterations


class _Destroyed:
    """Gets the signal while it is destroyed: Python drops what the handler raises there."""

    def __del__(self) -> None:
        signal.raise_signal(USR)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("window", "status"), [((2, 8), "partial"), ((20, 22), "missed")])
def test_an_exit_that_was_dropped_ends_the_training_before_its_next_iteration(run, window, status) -> None:
    with unwind_on(USR), pytest.raises(SystemExit) as ended:
        run.train(run.config(*window), range(9), on_iteration=lambda iteration: _Destroyed() if iteration == 4 else None)
    assert ended.value.code == 128 + USR
    assert len(run.losses) == 5, "iteration 4 was whole"
    manifest = run.manifest(f"iter-{window[0]}-{window[1]}")
    assert manifest["status"] == status
    assert f"the process exited (code {128 + USR}) after iteration 4" in manifest["reason"]
    assert status == "missed" or run.iterations("iter-2-8") == manifest["captured"]["iterations"] == [2, 3, 4]
    with ProfilingHook(None, rank=0) as hook, hook.iteration(0):
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exit_of_the_main_thread_leaves_other_threads_alone() -> None:
    done: list[int] = []

    def train() -> None:
        with ProfilingHook(None, rank=0) as hook, hook.iteration(0):
            done.append(0)

    with unwind_on(USR):
        _Destroyed()
        thread = Thread(target=train)
        thread.start()
        thread.join()
        assert done == [0]
        with pytest.raises(SystemExit), ProfilingHook(None, rank=0) as hook, hook.iteration(1):
            done.append(1)
    assert done == [0]


def test_an_exit_that_comes_when_an_iterations_range_has_just_opened_leaves_no_half_iteration(run, monkeypatch) -> None:
    real = TorchProfiler.iteration_range

    def opened(self, iteration):
        opening = real(self, iteration)
        opening.__enter__()
        if iteration == 5:
            signal.raise_signal(USR)
        return nullcontext()

    monkeypatch.setattr(TorchProfiler, "iteration_range", opened)
    with unwind_on(USR), pytest.raises(SystemExit):
        run.train(run.config(4, 8), range(9))
    manifest = run.manifest("iter-4-8")
    assert manifest["captured"]["iterations"] == [4]
    assert manifest["interrupted"] == [5]
    assert 5 not in run.iterations("iter-4-8")


def test_a_hook_that_fails_by_itself_says_why_in_the_manifest(run, monkeypatch) -> None:
    def fails(self, iteration, error):
        raise OSError("planted")

    monkeypatch.setattr(CaptureWindow, "iteration_ended", fails)
    run.train(run.config(4, 6), range(9))
    manifest = run.manifest("iter-4-6")
    assert (manifest["status"], manifest["reason"]) == ("failed", "OSError: planted")
