"""A signal that would kill a process unwinds it instead, and whoever handles it keeps it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from bridge_profiling.capture.signals import die_of, exit_on, signals_held

USR = signal.SIGUSR1


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.signal(USR, signal.SIG_DFL)
    yield
    signal.signal(USR, before)


def test_the_first_signal_unwinds_and_what_follows_does_not_end_the_writing() -> None:
    handler = exit_on(USR)
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(USR)
    assert ended.value.code == 128 + USR
    signal.raise_signal(USR)
    with signals_held():
        signal.raise_signal(USR)
    die_of(USR, handler)
    assert signal.getsignal(USR) is signal.SIG_DFL


def test_the_default_is_back_afterwards() -> None:
    die_of(USR, exit_on(USR))
    assert signal.getsignal(USR) is signal.SIG_DFL


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_handler_that_is_there_before_is_left_alone(handler) -> None:
    signal.signal(USR, handler)
    mine = exit_on(USR)
    assert mine is None
    die_of(USR, mine)
    assert signal.getsignal(USR) is handler


def test_a_handler_that_is_installed_in_between_is_left_alone() -> None:
    mine = exit_on(USR)
    signal.signal(USR, signal.SIG_IGN)
    die_of(USR, mine)
    assert signal.getsignal(USR) is signal.SIG_IGN
