"""The everyday captures are complete, and their packed form gives back every event."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.analysis.attribution.host import GARBAGE
from tests.everyday.captures import CAPTURES, GROUPS, unpack
from tools.injected_captures.everyday import columns
from tools.injected_captures.everyday.table import FOR_DEVELOPMENT, cases


def _event(category: str, name: str, start: float, duration: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 7, "tid": 7, "ts": start, "dur": duration, "args": arguments,
    }  # fmt: skip


def test_columns_give_back_every_event_with_its_numbers() -> None:
    start = 5_223_372_036.0
    instant = {"ph": "i", "cat": "user", "name": "Iteration Start: PyTorch Profiler", "pid": "Traces", "tid": "Trace", "s": "g"}
    outer = _event("cpu_op", "aten::linear", start + 0.123, 17.249, {"External id": 12, "Input Dims": [[2, 3], []]})
    inner = _event("cpu_op", "aten::mm", start + 0.149, 17.222, {"External id": 13})
    kernel = _event("kernel", "gemm", start + 40.96, 1234.5, {"stream": 7, "correlation": 2**40, "bytes": -1})
    traces = {
        f"a/rank-{rank}.json": {
            "baseTimeNanoseconds": 1_764_000_000_000_000_000,
            "traceEvents": [
                event | {"ts": event["ts"] + 1e6 * rank} for event in (outer, inner, kernel, instant | {"ts": start})
            ],
        }
        for rank in range(2)
    }
    decoded = dict(columns.decode(columns.encode(traces)))
    assert list(decoded) == list(traces)
    for path, whole in traces.items():
        assert decoded[path].keys() == whole.keys()
        events = {event["name"]: event for event in decoded[path]["traceEvents"]}
        assert len(events) == len(whole["traceEvents"])
        for event in whole["traceEvents"]:
            found = events[event["name"]]
            assert found == event | {name: pytest.approx(event[name], abs=0.1001) for name in ("ts", "dur") if name in event}
        mm, linear = events["aten::mm"], events["aten::linear"]
        assert linear["ts"] <= mm["ts"]
        assert mm["ts"] + mm["dur"] <= linear["ts"] + linear["dur"]


@pytest.mark.integration
@pytest.mark.parametrize("group", GROUPS)
def test_each_group_has_the_captures_of_the_table(tmp_path: Path, group: str) -> None:
    unpack(group, tmp_path)
    captures = {name: capture for name, capture in CAPTURES.items() if capture.group == group}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(captures)
    for name, capture in captures.items():
        traces = [path.read_text(encoding="utf-8") for path in (tmp_path / name).rglob("rank-*.trace.json")]
        assert len(traces) == capture.world_size
        assert not capture.pause_alone or not any(re.search(GARBAGE, trace, re.IGNORECASE) for trace in traces)
        manifests = len(list((tmp_path / name).rglob("manifest/*/rank-*.json")))
        assert manifests == (capture.world_size if capture.recorder == "hook" else 0)


def test_each_case_is_captured_next_to_its_baseline() -> None:
    injected = {case.name for group, case in cases() if case.findings and group.name in GROUPS}
    assert injected == {name for name, capture in CAPTURES.items() if capture.findings}
    assert {name for name in injected if not CAPTURES[name].set_aside} == FOR_DEVELOPMENT & injected
    assert {CAPTURES[name].baseline for name in injected} <= set(CAPTURES)
    assert len(injected) >= 30
