"""The files shared by a training and the supervisor of its nsys."""

import os
from dataclasses import replace

import pytest

from bridge_profiling.errors import CaptureError
from bridge_profiling.nsys.channel import CHANNEL_VARIABLE, Capture, Channel, Spec, Training

PATHS = {"nsys": ["nsys", "profile"], "command": ["python", "train.py"], "report": "report.nsys-rep"}
SPEC = Spec(rank=0, supervisor=1, notes=[], export_sqlite=False, captures=2, reports_with_range=False, **PATHS)


def test_captures_are_numbered_and_one_that_never_stopped_is_replaced(tmp_path):
    channel = Channel(tmp_path)
    channel.write(SPEC)
    first, second = Capture("m1", "r1"), Capture("m2", "r2")
    assert channel.announce(first) == channel.announce(second) == 1
    channel.write(replace(second, stopped=True), 1)
    assert channel.announce(first) == 2
    channel.write(replace(first, stopped=True), 2)
    with pytest.raises(CaptureError, match="make 2 captures and has made them"):
        channel.announce(first)


def test_a_process_that_the_training_started_has_no_channel(tmp_path):
    """A message that is damaged is none."""
    channel, environ = Channel(tmp_path), {CHANNEL_VARIABLE: str(tmp_path)}
    assert Channel.of_this_process({}) is None
    assert Channel.of_this_process(environ) == channel
    (tmp_path / "training.json").write_text(f'{{"pid": {os.getppid()}, "more": 2}}')
    assert Channel.of_this_process(environ) == channel
    for pid, expected in ((os.getpid(), channel), (os.getppid(), None)):
        channel.write(Training(pid))
        assert Channel.of_this_process(environ) == expected
