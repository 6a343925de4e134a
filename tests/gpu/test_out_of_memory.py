"""A real out-of-memory error of CUDA: the training's own error, and a snapshot that says who asked and what was there."""

import pytest

from bridge_profiling.facts.memory_series import site
from bridge_profiling.traces import memory as memory_snapshot

pytestmark = [pytest.mark.needs("cuda", "megatron", "nemo_run"), pytest.mark.timeout(900)]


SNAPSHOT = "memory/iter-8-12/oom-rank-0-1.pickle"


@pytest.mark.parametrize("job", ["out-of-memory"], indirect=True)
def test_the_jobs_error_is_the_original_one_and_the_manifest_names_it_and_the_snapshot_which_can_be_read(job):
    assert job.returncode == 1, job.tail
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate" in job.output
    assert "in leak_all_memory" in job.output
    manifest = job.manifests[0]
    assert manifest["status"] == "partial"
    assert "OutOfMemoryError" in manifest["reason"]
    assert manifest["captured"]["iterations"] == [8, 9]
    written = {artifact["path"] for outcome in manifest["profilers"] for artifact in outcome["artifacts"]}
    assert {SNAPSHOT, "torch/iter-8-12/rank-0.pt.trace.json.gz"} <= written
    # The failed request, and who made it.
    tables = memory_snapshot.read(job.profiles / SNAPSHOT)
    (request,) = tables["out_of_memory"].to_pylist()
    assert request["requested_bytes"] == 1 << 30
    assert 0 <= request["free_bytes"] < 1 << 30
    assert request["time_ns"] is not None
    assert site(request["stack"]).startswith("leak_all_memory ")
    assert "recipes/megatron/train.py" in request["stack"]
    # And what filled the memory.
    live = [row for row in tables["allocations"].to_pylist() if row["freed_ns"] is None]
    leaked = sum(row["bytes"] for row in live if row["stack"] and site(row["stack"]).startswith("leak_all_memory "))
    assert leaked > 0.8 * sum(row["bytes"] for row in live)
    assert leaked > 30e9
