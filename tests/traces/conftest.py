"""Writes small traces, and knows where the real captures lie."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.traces.kineto_files import document

WriteTrace = Callable[..., Path]


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """Writes a trace from events, or from text as it is, and gives its path."""

    def write(content: list[dict[str, Any]] | dict[str, Any] | str | bytes, name: str = "rank-3.json.gz", **keys: Any) -> Path:
        if isinstance(content, list):
            content = document(content, **keys)
        if isinstance(content, dict):
            content = json.dumps(content)
        raw = content.encode() if isinstance(content, str) else content
        path = tmp_path / name
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return write


@pytest.fixture(scope="session")
def captures() -> Path:
    """The real H200 captures."""
    named = os.environ.get("BRIDGE_PROFILING_CAPTURES")
    path = Path(named) if named else Path(__file__).parents[3] / "shared" / "captures"
    if not path.is_dir():
        pytest.skip(f"the real captures are not in {path}: BRIDGE_PROFILING_CAPTURES names their place")
    return path
