"""What Megatron Bridge has trained, and what its release offers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.bridge_environment import train_every_case


@pytest.fixture(scope="session")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all trainings in Megatron Bridge: see bridge_pretrain.py. Mark its tests `needs("bridge")`."""
    folder = tmp_path_factory.mktemp("bridge")
    train_every_case(folder)
    return folder


@pytest.fixture(scope="session")
def about(bridge: Path) -> dict[str, Any]:
    """What the release of Megatron Bridge under test offers: see `describe` in bridge_pretrain.py."""
    return json.loads((bridge / "about.json").read_text())
