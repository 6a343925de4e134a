"""Findings as annotations of the merged trace: tracks above the ranks they are about."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.analysis.findings import Event, Finding
from bridge_profiling.report.merged_trace import write_merged_trace
from bridge_profiling.run import Run
from tests.cli.test_analyze import write
from tests.report.summaries import finding

RunOf = Callable[..., Run]


@pytest.fixture
def merged(run_of: RunOf, tmp_path: Path) -> Callable[[list[Finding]], list[dict[str, Any]]]:
    """The events of two merged ranks with findings. Iterations begin at 0 and 1 ms, and last 0.9 ms."""
    for rank in (0, 1):
        write(tmp_path / "run" / f"rank-{rank}.json.gz", rank)
    run = run_of(tmp_path / "run")

    def merge(findings: list[Finding]) -> list[dict[str, Any]]:
        write_merged_trace(run.entries(), tmp_path / "all.json", findings=findings)
        return json.loads((tmp_path / "all.json").read_text())["traceEvents"]

    return merge


def _slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "finding"]


def test_a_finding_lies_where_its_event_does_and_says_what_to_change(merged, run_of: RunOf, tmp_path: Path) -> None:
    begins = run_of(tmp_path / "run").iterations().to_pylist()[0]["start_ns"]
    event = Event(1, "dataloader <b>", 0, begins + 200_000, 50.0)
    (found,) = _slices(merged([finding(ranks=[1], events=[event])]))
    assert (found["pid"], found["ts"], found["dur"]) == (1, 200.0, 50.0)
    assert found["name"] == "Data loading holds all ranks for 30 ms of each iteration"
    assert found["args"]["event"] == "dataloader <b>"
    assert "num_workers" in found["args"]["change"]


def test_an_event_that_stands_for_many_is_as_long_as_one_of_them(merged, run_of: RunOf, tmp_path: Path) -> None:
    begins = run_of(tmp_path / "run").iterations().to_pylist()[0]["start_ns"]
    (found,) = _slices(merged([finding(ranks=[0], events=[Event(0, "sync", 0, begins, 400.0, 4)])]))
    assert found["dur"] == 100.0


def test_a_finding_without_a_place_covers_the_iterations_of_the_ranks_to_blame(merged) -> None:
    found = _slices(merged([finding(ranks=[1], events=[])]))
    assert [(each["pid"], each["ts"], each["dur"]) for each in found] == [(1, 0.0, 900.0), (1, 1000.0, 900.0)]


def test_each_finding_has_a_track_of_its_own_above_the_threads_and_slices_never_overlap(
    merged, run_of: RunOf, tmp_path
) -> None:
    begins = run_of(tmp_path / "run").iterations().to_pylist()[0]["start_ns"]
    overlapping = [Event(0, "a", 0, begins + 100_000, 200.0), Event(0, "b", 0, begins + 200_000, 200.0)]
    events = merged([finding(ranks=[0], events=overlapping), finding(id="host_sync", ranks=[0])])
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    mine = _slices(events)
    assert {names[each["tid"]] for each in mine} == {"finding 1: data_loading", "finding 2: host_sync"}
    assert all(order[each["tid"]] < 0 for each in mine)
    first, second = (each for each in mine if names[each["tid"]].startswith("finding 1"))
    assert first["ts"] + first["dur"] <= second["ts"]
    assert second["ts"] + second["dur"] == 400.0


def test_without_findings_the_trace_is_as_it_was(merged) -> None:
    assert _slices(merged([])) == []


def test_merge_annotates_what_report_finds(run_of: RunOf, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank-0.json.gz", 0)
    command = [sys.executable, "-m", "bridge_profiling.cli", "merge", "run", "-o", "all.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    found = run_of(tmp_path / "run").findings()
    assert f"and {len(found)} findings" in done.stdout
    titles = {event["name"] for event in _slices(json.loads((tmp_path / "all.json").read_text())["traceEvents"])}
    assert titles == {each.title for each in found}
