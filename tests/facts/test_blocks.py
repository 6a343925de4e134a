"""Questions about a capture have the same answers however many blocks its host events come in."""

import pytest

from bridge_profiling.traces import cache
from bridge_profiling.traces.discover import find_run
from tests.facts.ranks_in_hand import facts
from tests.planted.cases import CASES


def answers(tables):
    return {name: fact.table.to_pylist() for name, fact in facts(tables).items()}


@pytest.mark.parametrize("capture", ["host_sync_2_nsys", "checkpoint_2"])
def test_answers_do_not_depend_on_blocks(tmp_path, monkeypatch, capture):
    tables = cache.load(find_run(CASES[capture].folder).captures[0], cached=False)
    whole = answers(tables)
    monkeypatch.setattr(cache, "ROW_GROUP_ROWS", 97)
    cache.write(tables, tmp_path / "entry")
    assert len(list(cache.open_entry(tmp_path / "entry").blocks("host_events"))) > 10
    assert answers(cache.open_entry(tmp_path / "entry")) == whole
