"""Runs the example of the documentation as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "monitor_loop.py"


def test_a_plain_loop_is_monitored_in_a_few_lines(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    path = tmp_path / "monitor.jsonl"
    done = subprocess.run([sys.executable, EXAMPLE, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    samples = [record for line in path.read_text().splitlines() if (record := json.loads(line))["kind"] == "sample"]
    last = samples[-1]
    assert last["training"]["iteration"] == 31
    assert last["training"]["samples_per_second"] > 0
    assert 0 < last["training"]["data_loading_ratio"] < 1
    assert last["counters"] == {"elements": 4096 * 64}
    if last["gpus"] is None:
        assert last["training"]["loss"] > 0
        assert last["training"]["allocated_bytes"] is None
