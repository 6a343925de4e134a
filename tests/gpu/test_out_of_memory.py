"""A real out-of-memory error of CUDA: the training's own error, and a snapshot that says who asked and what was there."""

from __future__ import annotations

import pytest

from bridge_profiling.analysis.memory.series import site
from bridge_profiling.traces.memory import snapshot as memory_snapshot

pytestmark = [
    pytest.mark.needs("cuda", "megatron", "nemo_run"),
    pytest.mark.timeout(900),
    pytest.mark.parametrize("job", ["out-of-memory"], indirect=True),
]


def snapshot(job):
    """What the rank saw when the allocation failed."""
    return memory_snapshot.read(job.profiles / "memory" / "iter-8-12" / "oom-rank-0-1.pickle")


def test_the_jobs_error_is_the_original_one(job):
    assert job.returncode == 1, job.tail
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate" in job.output
    assert "in leak_all_memory" in job.output


def test_the_manifest_names_the_error_and_the_snapshot(job):
    manifest = job.manifests[0]
    assert manifest["status"] == "partial"
    assert "OutOfMemoryError" in manifest["reason"]
    assert manifest["captured"]["iterations"] == [8, 9]
    written = {artifact["path"] for outcome in manifest["profilers"] for artifact in outcome["artifacts"]}
    assert "memory/iter-8-12/oom-rank-0-1.pickle" in written
    assert "torch/iter-8-12/rank-0.pt.trace.json.gz" in written


def test_the_failed_request_and_who_made_it_can_be_read(job):
    (request,) = snapshot(job)["out_of_memory"].to_pylist()
    assert request["requested_bytes"] == 1 << 30
    assert 0 <= request["free_bytes"] < 1 << 30
    assert request["time_ns"] is not None
    assert site(request["stack"]).startswith("leak_all_memory ")
    assert "recipes/megatron/train.py" in request["stack"]


def test_what_filled_the_memory_can_be_read(job):
    allocations = snapshot(job)["allocations"]
    live = allocations.filter(allocations["freed_ns"].is_null()).to_pylist()
    leaked = sum(row["bytes"] for row in live if row["stack"] and site(row["stack"]).startswith("leak_all_memory "))
    assert leaked > 0.8 * sum(row["bytes"] for row in live)
    assert leaked > 30e9
