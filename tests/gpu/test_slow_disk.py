"""A disk that takes a minute for a trace: the other ranks wait for the one that writes, and nothing times out."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.needs("gpus2", "megatron", "nemo_run"), pytest.mark.timeout(900)]

slow = pytest.mark.parametrize("job", ["slow-disk"], indirect=True)


@slow
def test_training_goes_on_to_its_end(job):
    assert job.returncode == 0, job.tail
    assert max(job.losses) == 19
    for word in ("Watchdog caught collective operation timeout", "NCCL timeout", "heartbeat"):
        assert word not in job.output


@slow
def test_the_minute_was_really_waited_for_and_only_once(job):
    timed = job.manifests[0]["durations_ns"]
    durations = dict(zip(timed["iteration"], timed["duration_ns"], strict=True))
    # The rank writes when its window's last iteration is over; its next step then waits for nobody.
    assert job.seconds > 60
    assert all(duration < 30e9 for iteration, duration in durations.items() if iteration > 1)


@pytest.mark.parametrize(("job", "reference"), [("slow-disk", "dp2")], indirect=True)
def test_losses_stay_the_same_to_the_last_bit(job, reference):
    assert reference.returncode == 0, reference.tail
    assert job.losses == reference.losses
    assert len(job.losses) == 20


@slow
def test_the_trace_is_complete_and_the_other_rank_wrote_none(job):
    assert list(job.manifests) == [0]
    assert job.manifests[0]["status"] == "complete", job.manifests[0]["reason"]
    assert job.tables(0, "kineto").iterations["iteration"].to_pylist() == [8, 9, 10, 11]
