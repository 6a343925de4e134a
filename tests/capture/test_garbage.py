"""Python's garbage collections in the window are in the capture and in the manifest, and cost no signal."""

import gc
import signal
import sys

import pytest

from tests.capture.conftest import at


class Alarm(Exception):
    """What a handler of the training raises."""


def test_collections_in_the_window_are_ranges_and_totals(run):
    callbacks, hook = list(gc.callbacks), sys.unraisablehook
    run.train(run.config(4, 6), range(8), on_iteration=lambda iteration: gc.collect(2) if iteration in (3, 5, 6) else None)
    [folder] = run.folders()
    events = run.trace(folder)
    (step,) = (event for event in events if event["name"] == "ProfilerStep#5" and event["cat"] == "user_annotation")
    found = [event for event in events if event["name"] == "garbage-collection 2"]
    inside = [event for event in found if step["ts"] <= event["ts"] < step["ts"] + step["dur"]]
    totals = run.manifest(folder)["garbage_collection"]
    assert len(inside) >= 1
    assert totals["collections"][2] == len(found)
    assert totals["longest_ns"] > 0
    assert max(totals["duration_ns"]) >= totals["longest_ns"]
    assert (gc.callbacks, sys.unraisablehook) == (callbacks, hook)


def test_a_signal_during_a_collection_still_interrupts_the_training(run):
    def ring(number, frame):
        raise Alarm

    def collect() -> None:
        gc.collect()  # callbacks of other tests' weak references would drop it as well
        many = [[] for _ in range(300_000)]
        for one in many:
            one.append(many)
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        gc.collect()

    # Python drops what a handler raises inside a callback, also inside Hypothesis' own.
    others, gc.callbacks[:] = gc.callbacks[:], []
    previous = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(Alarm):
            run.train(run.config(4, 8), range(10), on_iteration=at(5, collect))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.callbacks[:] = others
    [folder] = run.folders()
    assert run.manifest(folder)["status"] == "partial"
