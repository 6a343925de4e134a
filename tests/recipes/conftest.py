"""Tests of recipes run as on a machine without GPUs, in a process that was started by no launcher."""

import pytest

from tests.forked_ranks import LAUNCHER_VARIABLES


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
