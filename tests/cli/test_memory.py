"""`bridge-profiling memory` as it is typed, on a real snapshot and on a trace without memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analysis.compared_runs import WrittenRun
from tests.traces.conftest import captures

__all__ = ["captures"]


def _memory(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "bridge_profiling.cli", "memory", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture
def snapshot(captures: Path, tmp_path: Path) -> Path:
    """A copy of the real snapshot, so that what is cached lies beside it."""
    source = captures / "memory" / "tp2_dp2" / "snapshot_0.pickle.xz"
    (tmp_path / source.name).write_bytes(source.read_bytes())
    return tmp_path / source.name


def test_the_peak_what_was_live_at_it_and_growth(snapshot: Path, tmp_path: Path) -> None:
    done = _memory(tmp_path, snapshot, "-o", "memory.html")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Rank 0 peaks at 5.61 GiB; at most 5.92 GiB reserved."
    assert "megatron/core/fusions/fused_softmax.py:335: 1.00 GiB" in lines[1]
    assert lines[2] == "It does not grow from one iteration to the next."
    picture = next(line for line in lines if "█" in line)
    assert "▃" in picture
    assert any("param_and_grad_buffer.py:803" in line for line in lines)
    page = (tmp_path / "memory.html").read_text()
    assert "Rank 0 peaks at 5.61 GiB" in page
    assert 'data-figure="over-time"' in page


def test_two_are_compared_site_by_site(snapshot: Path, tmp_path: Path) -> None:
    done = _memory(tmp_path, snapshot, snapshot, "--json")
    found = json.loads(done.stdout)
    assert [run["devices"][0]["peak_bytes"] for run in found["runs"]] == [found["runs"][0]["devices"][0]["peak_bytes"]] * 2
    assert sum(row["bytes_at_peak"] for row in found["runs"][0]["sites"]) == found["runs"][0]["devices"][0]["peak_bytes"]
    assert len(found["difference"]) > 50
    assert {row["change_bytes_at_peak"] for row in found["difference"]} == {0}


def test_a_capture_without_memory_says_what_to_set(tmp_path: Path) -> None:
    WrittenRun(ranks=1).write(tmp_path / "run")
    done = _memory(tmp_path, "run")
    assert done.returncode == 1
    assert "run records no memory. Profile with profiling.record_memory_history=true" in done.stderr
    assert done.stdout == ""


def test_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    done = _memory(tmp_path, "nowhere")
    assert done.returncode == 2
    assert "nowhere does not exist" in done.stderr
