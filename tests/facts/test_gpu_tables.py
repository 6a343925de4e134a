"""Our tables of a real training on an H100, next to torch's own and to plain SQL."""

import json
import lzma
from pathlib import Path

import pytest

from bridge_profiling.facts.operators import MEMORY
from bridge_profiling.run import Run

FOLDER = Path(__file__).parent / "gpu_tables"

#: torch adds this to cudaStreamIsCapturing, for device work that its trace does not hold.
UNTRACED_US = {"host-to-device": 20.289, "iteration_6": 20.289}


def test_device_time_and_memory_of_operators_and_ranges_are_those_of_torch_and_both_profilers_count_the_same(tmp_path, run_of):
    for kind in ("pt.trace.json", "sqlite"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"rank-0.{kind}").write_bytes(lzma.decompress((FOLDER / f"rank-0.{kind}.xz").read_bytes()))
    runs = [run_of(tmp_path / kind) for kind in ("pt.trace.json", "sqlite")]
    theirs = json.loads((FOLDER / "key_averages.json").read_text())
    rows = [row for category in ("operator", "annotation") for row in runs[0].facts.operators_by(category=category).to_pylist()]
    assert {row["name"] for row in rows} == set(theirs)
    for row in rows:
        count, own_us, total_us, *memory = theirs[row["name"]]
        total_us -= UNTRACED_US.get(row["name"], 0)
        ours = [row[name] for name in ("count", "device_self_ns", "device_total_ns", *MEMORY)]
        assert ours == [count, pytest.approx(1e3 * own_us, abs=20), pytest.approx(1e3 * total_us, abs=20), *memory], row["name"]
    # Both profilers, torch.profiler and nsys, count the same calls and kernels.
    calls, phases = (
        [{row["name"]: row for row in table(run).to_pylist() if not row["name"].startswith("cub::")} for run in runs]
        for table in (Run.operators, Run.phases)
    )
    by_kineto, by_nsys = ({name: row["count"] for name, row in of.items()} for of in calls)
    assert by_kineto == by_nsys
    assert phases[0].keys() == phases[1].keys()
    for name, row in phases[0].items():
        theirs = phases[1][name]
        assert theirs["kernel_count"] == row["kernel_count"]
        for column in ("device_ns", "backward_device_ns"):
            assert theirs[column] == (row[column] and pytest.approx(row[column], rel=0.01, abs=1000)), (name, column)
