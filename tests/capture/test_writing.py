"""Writing a trace: what training waits for, what it does not, and signals that arrive meanwhile."""

import gzip
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from bridge_profiling.capture import torch_profiler
from bridge_profiling.capture.control.listener import Listener
from bridge_profiling.capture.signals import signals_held
from tests.capture.conftest import iterations_in


def test_training_goes_on_while_a_trace_is_compressed(run, monkeypatch):
    """Compression here ends only after iteration 5 has begun: a training that waited for it would wait for ever."""
    reached, compress = threading.Event(), torch_profiler._compress

    def held_up(*arguments):
        assert reached.wait(timeout=60), "training waited for the compression"
        compress(*arguments)

    monkeypatch.setattr(torch_profiler, "_compress", held_up)
    statuses = []

    def on_iteration(iteration):
        if iteration == 4:
            statuses.append(run.manifest("iter-1-3")["status"])
        if iteration == 5:
            reached.set()

    run.train(run.config(1, 3), range(7), on_iteration=on_iteration)
    assert statuses == ["failed"], "the manifest said more than was true before the trace was there"
    assert run.manifest("iter-1-3")["status"] == "complete"
    assert run.iterations("iter-1-3") == [1, 2]


def test_a_compression_that_fails_is_in_the_manifest(run, monkeypatch):
    def fails(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch_profiler, "_compress", fails)
    run.train(run.config(1, 3), range(5))
    manifest = run.manifest("iter-1-3")
    assert manifest["status"] == "failed"
    assert "No space left on device" in manifest["reason"]
    assert not list((run.root / "torch").rglob("*.*"))


@pytest.mark.parametrize("beside", [True, False], ids=["while training goes on", "at its end"])
def test_a_process_killed_while_it_compresses_leaves_the_whole_trace_and_tells_where(run, monkeypatch, beside):
    """What a launcher's SIGKILL would leave at that moment is looked at, instead of being left."""
    left = []

    def killed(raw, *arguments):
        manifest = run.manifest("iter-1-9")
        where = Path(manifest["reason"].partition("the whole trace is in ")[2])
        left.append((manifest["status"], where == raw, iterations_in(json.loads(where.read_text()))))
        compress(raw, *arguments)

    compress = torch_profiler._compress
    monkeypatch.setattr(torch_profiler, "_compress", killed)
    run.train(run.config(1, 9), range(12 if beside else 5))
    captured = list(range(1, 9 if beside else 5))
    assert left == [("failed", True, captured)]
    assert run.manifest("iter-1-9")["status"] == ("complete" if beside else "partial")
    assert run.iterations("iter-1-9") == captured
    assert len(list((run.root / "torch").rglob("*rank-0*"))) == 1


def test_the_trace_is_called_by_its_own_name(run):
    run.train(run.config(1, 2), range(3))
    name = run.trace("iter-1-2").get("traceName", "rank-0.pt.trace.json.gz")
    assert name.endswith("/rank-0.pt.trace.json.gz") or name == "rank-0.pt.trace.json.gz"


@pytest.mark.parametrize("kept", [0.3, 0.999])
def test_an_export_that_is_cut_off_is_refused(run, tmp_path, kept):
    run.train(run.config(1, 3), range(4))
    whole = gzip.decompress((run.root / "torch" / "iter-1-3" / "rank-0.pt.trace.json.gz").read_bytes())
    raw = tmp_path / "raw.json"
    raw.write_bytes(whole)
    torch_profiler._check_whole(raw)
    raw.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(torch_profiler.CaptureError, match="whole trace"):
        torch_profiler._check_whole(raw)


def test_a_signal_during_writing_is_delivered_after_it(run, monkeypatch):
    """Ctrl-C while the last iteration's trace is written: the trace is whole, and the interrupt arrives all the same."""
    stop = torch_profiler.TorchProfiler.stop

    def interrupted(self, cut):
        os.kill(os.getpid(), signal.SIGINT)
        return stop(self, cut)

    monkeypatch.setattr(torch_profiler.TorchProfiler, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train(run.config(1, 3), range(6))
    assert run.manifest("iter-1-3")["status"] == "complete"
    assert run.iterations("iter-1-3") == [1, 2]


def test_handlers_are_the_users_own_again_afterwards():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with signals_held():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_while_the_hook_closes_is_held_until_everything_is_written(run, monkeypatch):
    """Closing ends the listener too, which takes a while: a handler that raises there must not cost the capture."""
    end = Listener.stop

    def interrupted(self, ending):
        os.kill(os.getpid(), signal.SIGTERM)
        end(self, ending)

    def unwind(number, frame):
        raise SystemExit(128 + number)

    monkeypatch.setattr(Listener, "stop", interrupted)
    before = signal.signal(signal.SIGTERM, unwind)
    try:
        with pytest.raises(SystemExit):
            run.train(run.config(2, 9), range(4))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert run.iterations("iter-2-9") == [2, 3]
    assert run.manifest("iter-2-9")["status"] == "partial"
