"""A signal that would kill a process unwinds it instead, and whoever handles it keeps it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from bridge_profiling.capture.signals import die_of, exit_on

USR = signal.SIGUSR1


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.signal(USR, signal.SIG_DFL)
    yield
    signal.signal(USR, before)


def test_the_first_signal_unwinds_and_the_second_would_kill() -> None:
    assert exit_on(USR)
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(USR)
    assert ended.value.code == 128 + USR
    assert signal.getsignal(USR) is signal.SIG_DFL


def test_the_default_is_back_afterwards() -> None:
    assert exit_on(USR)
    die_of(USR)
    assert signal.getsignal(USR) is signal.SIG_DFL


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_handler_that_is_there_before_is_left_alone(handler) -> None:
    signal.signal(USR, handler)
    assert not exit_on(USR)
    die_of(USR)
    assert signal.getsignal(USR) is handler


def test_a_handler_that_is_installed_in_between_is_left_alone() -> None:
    assert exit_on(USR)
    signal.signal(USR, signal.SIG_IGN)
    die_of(USR)
    assert signal.getsignal(USR) is signal.SIG_IGN
