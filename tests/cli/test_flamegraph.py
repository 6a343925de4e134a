"""`bridge-profiling flamegraph` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Typed
from tests.cli.ranks import write


def test_it_writes_speedscope_or_folded_text_and_says_what_was_not_recorded(typed: Typed, folder: Path) -> None:
    write(folder / "run" / "rank-1.json.gz", 1)
    done = typed("flamegraph", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("flamegraph.speedscope.json: 4 stacks by host time. Open it at https://www.speedscope.app\n")
    assert "- ranks 0-1: no Python stacks were recorded" in done.stdout
    document = json.loads((folder / "flamegraph.speedscope.json").read_text())
    assert [profile["weights"] for profile in document["profiles"]] == [[1796, 4]] * 2
    done = typed("flamegraph", "run", "--folded", "--weight", "device", "--ranks", "1", "-q")
    assert (done.returncode, done.stdout) == (0, "")
    assert (folder / "flamegraph.folded.txt").read_text() == "rank 1;thread 1;ProfilerStep 500000\n"


def test_a_run_without_traces_leaves_no_file(typed: Typed, folder: Path) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "rank-0.json.gz").write_bytes(b"\x1f\x8bno gzip")
    assert typed("flamegraph", "broken").returncode == 1
    assert not (folder / "flamegraph.speedscope.json").exists()
