"""A run without a readable capture: neither a page nor a merged trace of nothing replaces a good one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge_profiling.errors import TraceError
from bridge_profiling.run import Run


@pytest.mark.parametrize("write", [Run.report, Run.merge])
def test_a_run_of_nothing_replaces_no_file(tmp_path: Path, write: Callable[[Run, Path], object]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-0.json.gz").write_bytes(b"damaged")
    good = tmp_path / "good"
    good.write_text("good")
    with Run(tmp_path / "run") as run, pytest.raises(TraceError, match=r"rank-0\.json\.gz"):
        write(run, good)
    assert good.read_text() == "good"
