"""Signals that would kill a process unwind it instead, and whoever handles them keeps them."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest

from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.capture.signals import SignalWatch, exit_is_pending, signals_held, unwind_on
from bridge_profiling.capture.torch_profiler import TorchProfiler
from tests.capture.conftest import at, raising

USR = signal.SIGUSR1


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.signal(USR, signal.SIG_DFL)
    yield
    signal.signal(USR, before)


def test_the_first_signal_unwinds_and_later_ones_do_not_end_the_writing() -> None:
    unwinding = unwind_on(USR)
    # Also when it is entered and left twice
    with unwinding, unwinding, unwinding:
        assert not unwinding.received
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(USR)
        assert (ended.value.code, unwinding.received) == (128 + USR, True)
        signal.raise_signal(USR)
        with signals_held():
            signal.raise_signal(USR)
    assert signal.getsignal(USR) is signal.SIG_DFL
    assert not exit_is_pending()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_an_installed_handler_is_replaced_only_on_request_and_one_installed_in_between_stays(handler) -> None:
    with unwind_on(USR):
        signal.signal(USR, handler)
    assert signal.getsignal(USR) is handler
    with unwind_on(USR):
        assert signal.getsignal(USR) is handler
    with unwind_on(USR, replace=True), pytest.raises(SystemExit):
        signal.raise_signal(USR)
    assert signal.getsignal(USR) is handler


@pytest.mark.parametrize(
    ("step", "status", "captured"),
    [("warm_up", "missed", None), ("start", "partial", []), ("phase_range", "partial", [4]), ("stop", "complete", [4, 5])],
)
def test_a_handler_that_raises_in_the_hook_ends_the_training_and_no_capture(run, monkeypatch, step, status, captured) -> None:
    """As a data loader of PyTorch does on SIGCHLD. By another signal here: children of other tests end too."""
    real = getattr(TorchProfiler, step)

    def interrupted(self, *arguments):
        if step in ("warm_up", "start", "stop") or len(run.losses) == 5:
            signal.raise_signal(USR)
        return real(self, *arguments)

    signal.signal(USR, raising(RuntimeError("worker is killed by signal")))
    monkeypatch.setattr(TorchProfiler, step, interrupted)
    with pytest.raises(RuntimeError, match="is killed by signal"):
        run.train(run.config(4, 6), range(9))
    assert run.outcome("iter-4-6") == (status, captured)
    assert status == "complete" or "is killed by signal" in run.manifest("iter-4-6")["reason"]


@pytest.mark.parametrize(
    ("arriving", "raised"),
    [
        ("CHLD CHLD", None),
        ("USR1 TERM", RuntimeError),
        ("USR1 INT TERM", KeyboardInterrupt),
        # An error would be caught by a training that goes on.
        ("INT USR1 TERM", KeyboardInterrupt),
        ("TERM INT TERM INT", KeyboardInterrupt),
    ],
)
def test_every_held_signal_is_delivered_once_in_order_also_after_a_handler_that_raises(arriving, raised) -> None:
    seen: list[str] = []

    def handle(number: int, frame: object) -> None:
        seen.append(signal.Signals(number).name.removeprefix("SIG"))
        # As a handler does that wants its signal once.
        signal.signal(number, signal.SIG_IGN)
        if number == USR:
            raise RuntimeError
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    numbers = [signal.Signals[f"SIG{name}"] for name in arriving.split()]
    before = {number: signal.signal(number, handle) for number in {*numbers}}
    try:
        with pytest.raises(raised) if raised else nullcontext(), signals_held(), signals_held():
            list(map(signal.raise_signal, numbers))
            assert not seen
        assert seen == list(dict.fromkeys(arriving.split()))
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_handler_that_raises_one_exception_for_every_signal_leaves_no_cycle_of_contexts() -> None:
    """contextlib follows them to their end."""
    error = TimeoutError()
    before = [signal.signal(number, raising(error)) for number in (signal.SIGALRM, USR)]
    try:
        with pytest.raises(TimeoutError), signals_held():
            list(map(signal.raise_signal, (signal.SIGALRM, USR)))
        assert error.__context__ is None
    finally:
        signal.signal(signal.SIGALRM, before[0])


@pytest.mark.parametrize("step", ["warm_up", "start", "phase_range", "stop"])
def test_an_iteration_that_is_run_again_after_a_signal_is_in_a_complete_capture(run, monkeypatch, step) -> None:
    """A time limit, whose handler resets itself, and then the launcher's signal."""
    real, arriving, caught, seen, todo = getattr(TorchProfiler, step), [signal.SIGALRM, USR], [], [], list(range(9))

    def interrupted(self, *arguments):
        while arriving and (step != "phase_range" or len(run.losses) == 5):
            signal.raise_signal(arriving.pop(0))
        return real(self, *arguments)

    def timed_out(limit, number, frame):
        signal.signal(number, signal.SIG_DFL)
        raise TimeoutError(limit)

    signal.signal(USR, lambda number, frame: seen.append(number))
    before = signal.signal(signal.SIGALRM, partial(timed_out, "a minute"))
    monkeypatch.setattr(TorchProfiler, step, interrupted)
    try:
        with ProfilingHook(run.config(4, 6), rank=0, output_dir=run.root) as hook:
            while todo:
                try:
                    with hook.iteration(todo[0]):
                        run.losses.append("")
                    todo.pop(0)
                except TimeoutError as error:
                    caught.append(error)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (len(caught), seen) == (1, [USR])
    assert run.outcome("iter-4-6") == ("complete", [4, 5])


class _Destroyed:
    """Gets the signal while it is destroyed: Python drops what the handler raises there."""

    def __del__(self) -> None:
        signal.raise_signal(USR)


def test_an_exit_before_the_closing_hook_holds_signals_loses_nothing(run, monkeypatch) -> None:
    """A peer fails, and the launcher's signal comes while its own exception leaves the hook."""

    def strike() -> None:
        def signalled():
            monkeypatch.undo()
            signal.raise_signal(USR)

        monkeypatch.setattr("bridge_profiling.capture.closing.signals_held", signalled)
        raise ValueError

    with unwind_on(USR), pytest.raises(SystemExit):
        run.train(run.config(2, 8), range(9), on_iteration=at(4, strike))
    assert run.outcome("iter-2-8") == ("partial", [2, 3])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("window", "outcome"), [((2, 8), ("partial", [2, 3, 4])), ((20, 22), ("missed", None))])
def test_an_exit_that_was_dropped_ends_the_training_before_its_next_iteration(run, window, outcome) -> None:
    with unwind_on(USR), pytest.raises(SystemExit) as ended:
        run.train(run.config(*window), range(9), on_iteration=at(4, _Destroyed))
    assert ended.value.code == 128 + USR
    assert len(run.losses) == 5, "iteration 4 was whole"
    [folder] = run.folders()
    assert run.outcome(folder) == outcome
    assert f"the process exited (code {128 + USR}) after iteration 4" in run.manifest(folder)["reason"]
    with ProfilingHook(None, rank=0) as hook, hook.iteration(0):
        pass


def test_collections_in_the_window_are_ranges_and_totals(run):
    callbacks = list(gc.callbacks)
    run.train(run.config(4, 6), range(8), on_iteration=lambda iteration: gc.collect(2) if iteration in (3, 5, 6) else None)
    [folder] = run.folders()
    events = run.trace(folder)
    (step,) = (event for event in events if event["name"] == "ProfilerStep#5" and event["cat"] == "user_annotation")
    found = [event for event in events if event["name"] == "garbage-collection 2"]
    inside = [event for event in found if step["ts"] <= event["ts"] < step["ts"] + step["dur"]]
    totals = run.manifest(folder)["garbage_collection"]
    assert inside
    assert totals["collections"][2] == len(found)
    assert max(totals["duration_ns"]) >= totals["longest_ns"] > 0
    assert gc.callbacks == callbacks


def test_the_thread_of_an_earlier_watch_takes_back_no_signal_that_a_later_one_has_received():
    watch, (reading, writing) = SignalWatch(USR, lambda: None), os.pipe()
    watch._received = True
    os.close(writing)
    watch._watch(reading)
    assert watch._received
