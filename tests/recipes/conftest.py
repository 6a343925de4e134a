"""Tests of recipes run as on a machine without GPUs."""

import pytest


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
