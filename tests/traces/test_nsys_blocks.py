"""Host events that are made in blocks are those that are made at once, and never in memory as a whole."""

import pyarrow as pa
import pytest

from bridge_profiling.traces import cache
from bridge_profiling.traces.discover import Capture
from bridge_profiling.traces.nsys import tables as nsys
from tests.traces.nsys_files import small_report


@pytest.mark.parametrize("rows", [1, 2])
def test_blocks_are_the_whole(tmp_path, monkeypatch, rows):
    path = small_report().write(tmp_path / "rank-0.sqlite")
    whole = nsys.read(path).host_events
    monkeypatch.setattr(nsys, "_BLOCK_ROWS", rows)
    tables = nsys.read(path)
    blocks = list(tables.blocks("host_events"))
    assert len(blocks) > 1
    assert pa.concat_tables(blocks).to_pylist() == whole.to_pylist()
    assert sorted(tables.tables) == sorted(nsys.read(path).tables)
    assert tables.host_events.to_pylist() == whole.to_pylist()

    kept = cache.load(Capture(path, "nsys", 0, "order"), directory=tmp_path / "cache")
    assert isinstance(kept.tables, cache.ParquetTables)
    assert kept.host_events.to_pylist() == whole.to_pylist()
