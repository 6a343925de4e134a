"""The everyday captures are complete, and packing loses nothing of them."""

from __future__ import annotations

import re

import pytest

from bridge_profiling.analysis.attribution.host import GARBAGE
from tests.everyday.captures import CAPTURES, FOLDER, GROUPS, unpack
from tools.injected_captures.everyday import columns
from tools.injected_captures.everyday.pack import LEFT_OUT
from tools.injected_captures.everyday.table import FOR_DEVELOPMENT, cases


@pytest.mark.integration
@pytest.mark.parametrize("group", GROUPS)
def test_each_group_has_the_captures_of_the_table(tmp_path, group):
    unpack(group, tmp_path)
    captures = {name: capture for name, capture in CAPTURES.items() if capture.group == group}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(captures)
    for name, capture in captures.items():
        traces = [path.read_text(encoding="utf-8") for path in (tmp_path / name).rglob("rank-*.trace.json")]
        assert len(traces) == capture.world_size
        assert not capture.pause_alone or not any(re.search(GARBAGE, trace, re.IGNORECASE) for trace in traces)
        manifests = len(list((tmp_path / name).rglob("manifest/*/rank-*.json")))
        assert manifests == (capture.world_size if capture.recorder == "hook" else 0)


@pytest.mark.integration
def test_packing_gives_back_every_event():
    traces = dict(columns.decode((FOLDER / "gpt_1.columns").read_bytes()))
    assert dict(columns.decode(columns.encode(traces))) == traces


def test_each_case_is_captured_next_to_its_baseline():
    injected = {case.name for group, case in cases() if case.findings and group.name in GROUPS} - LEFT_OUT
    assert injected == {name for name, capture in CAPTURES.items() if capture.findings}
    assert {name for name in injected if not CAPTURES[name].set_aside} == FOR_DEVELOPMENT & injected
    assert {CAPTURES[name].baseline for name in injected} <= set(CAPTURES)
    assert len(injected) >= 30
