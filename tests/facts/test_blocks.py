"""Questions about a capture have the same answers however many blocks its host events come in."""

from pathlib import Path

import pytest

from bridge_profiling.traces import cache
from bridge_profiling.traces.discover import find_run
from tests.facts.ranks_in_hand import answer, facts, rank, span, work

_PLANTED = Path(__file__).parents[1] / "planted"


def answers(tables):
    return {name: fact.table.to_pylist() for name, fact in facts(tables).items()}


@pytest.mark.parametrize("capture", ["host_sync_2_nsys/nsys", "checkpoint_2"])
def test_answers_do_not_depend_on_blocks(tmp_path, monkeypatch, capture):
    tables = cache.load(find_run(_PLANTED / capture).captures[0], cached=False)
    whole = answers(tables)
    monkeypatch.setattr(cache, "ROW_GROUP_ROWS", 97)
    cache.write(tables, tmp_path / "entry")
    assert len(list(cache.open_entry(tmp_path / "entry").blocks("host_events"))) > 10
    assert answers(cache.open_entry(tmp_path / "entry")) == whole


def test_a_pause_in_an_operator_is_found_across_blocks(tmp_path, monkeypatch):
    calls = [span("aten::copy_", 100_000 * place, 100_000 * place + 50_000, "operator") for place in range(8)]
    stuck = span("aten::copy_", 1_000_000, 31_000_000, "operator")
    launch = span("cudaLaunchKernel", 30_000_000, 30_001_000, "runtime")
    device = [work("compute", 0, 10_000, 1), work("compute", 30_002_000, 30_012_000, 30_001_000)]
    tables = rank(host_events=[*calls, stuck, launch], device_events=device)
    pauses = [row for row in answer(tables, "idle_causes").to_pylist() if row["cause"] == "host_pause"]
    assert [row["lost_us"] for row in pauses] == [pytest.approx(29_000, rel=0.01)]
    monkeypatch.setattr(cache, "ROW_GROUP_ROWS", 2)
    cache.write(tables, tmp_path / "entry")
    assert answers(cache.open_entry(tmp_path / "entry")) == answers(tables)
