"""A process that trains by itself."""

from __future__ import annotations

import pytest

from tests.forked_ranks import LAUNCHER_VARIABLES


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process was started by no launcher, on a machine without GPUs."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
