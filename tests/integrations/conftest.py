"""The process in which Megatron Bridge trains, and what its release offers."""

from __future__ import annotations

import pytest

from tests.integrations.bridge_environment import BridgeProcess


@pytest.fixture(scope="session")
def bridge():
    """Mark its tests `needs("bridge")`."""
    with BridgeProcess() as process:
        yield process


@pytest.fixture(scope="session")
def about(bridge):
    """What the release of Megatron Bridge under test offers: see `describe` in bridge_pretrain.py."""
    return bridge.ask(describe=True)
