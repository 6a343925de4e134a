"""The first screen after a profile: what each rank captured, and which operators took the host's time."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bridge_profiling.manifest import find_captures
from bridge_profiling.report.terminal import print_captures
from tests.traces.kineto_files import complete, document


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An output directory of one rank, with operators that nest."""
    events = [
        complete("cpu_op", "aten::linear", 0, 9000),
        complete("cpu_op", "aten::addmm", 1000, 6000),
        complete("cpu_op", "aten::addmm", 20000, 2000, tid=2),
        complete("user_annotation", "ProfilerStep#4", 0, 90000),
    ]
    trace = tmp_path / "torch" / "iter-4-5" / "rank-0.pt.trace.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(gzip.compress(json.dumps(document(events)).encode()))
    manifest = {
        "rank": 0,
        "status": "complete",
        "reason": None,
        "window": {"start": 4, "end": 5},
        "captured": {"iterations": [4]},
        "profilers": [{"name": "torch", "artifacts": [{"path": str(trace.relative_to(tmp_path)), "bytes": 1}]}],
        "durations_ns": {"iteration": [0, 4], "duration_ns": [1, 90_000_000]},
    }
    path = tmp_path / "manifest" / "iter-4-5" / "rank-0.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(manifest))
    return tmp_path


def test_operators_are_shown_by_the_time_that_is_their_own(run: Path) -> None:
    console = Console(record=True, width=120)
    print_captures(find_captures(run), console)
    lines = [line.split() for line in console.export_text().splitlines() if "aten::" in line]
    assert lines == [
        ["│", "0", "│", "8.00", "ms", "│", "2", "│", "aten::addmm", "│"],
        ["│", "0", "│", "3.00", "ms", "│", "1", "│", "aten::linear", "│"],
    ]


def test_mfu_is_shown_where_it_is_known_and_nothing_where_it_is_not(run: Path) -> None:
    path = run / "manifest" / "iter-4-5" / "rank-0.json"
    manifest = json.loads(path.read_text())
    durations = manifest["durations_ns"] = {"iteration": [0, 1, 2, 4, 7], "duration_ns": [9, 2, 2, 4, 2]}
    for mfu, shown in (([0.1, 0.4, 0.5, 0.2, 0.41], True), (None, False)):
        durations["mfu"] = mfu
        path.write_text(json.dumps(manifest))
        console = Console(record=True, width=120)
        print_captures(find_captures(run), console)
        text = console.export_text()
        # The profiled iteration, and the median of the others but the run's first: the profiler's own cost is no share.
        assert ("MFU" in text, "20.0%" in text, "41.0%" in text) == (shown, shown, shown)


def test_a_submit_host_without_the_analysis_extra_shows_the_rest_and_says_what_to_install(run: Path) -> None:
    script = f"""
import sys
sys.modules |= dict.fromkeys(("isal", "msgspec", "numpy", "pyarrow"))  # as where they are not installed
from pathlib import Path
from rich.console import Console
from bridge_profiling.report.terminal import print_captures
from bridge_profiling.manifest import find_captures
print_captures(find_captures(Path({str(run)!r})), Console(width=160))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "window 4-5" in done.stdout
    assert "complete" in done.stdout
    assert "pip install '.[analysis]'" in done.stdout


def test_a_damaged_trace_is_told_beside_its_rank(run: Path) -> None:
    next(run.rglob("*.pt.trace.json.gz")).write_bytes(b"")
    console = Console(record=True, width=300)
    print_captures(find_captures(run), console)
    assert "is empty: it holds no trace" in console.export_text()
