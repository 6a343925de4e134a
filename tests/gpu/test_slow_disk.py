"""A disk that takes a minute for a trace: the other ranks wait for the one that writes, and nothing times out."""

import pytest

from tests.gpu.kernels import check_window

pytestmark = [pytest.mark.needs("gpus2", "megatron", "nemo_run"), pytest.mark.timeout(900)]


@pytest.mark.parametrize(("job", "reference"), [("slow-disk", "dp2")], indirect=True)
def test_training_waits_a_minute_once_and_goes_on_to_its_end_with_the_same_losses(job, reference):
    assert job.returncode == 0, job.tail
    for word in ("Watchdog caught collective operation timeout", "NCCL timeout", "heartbeat"):
        assert word not in job.output
    timed = job.manifests[0]["durations_ns"]
    durations = dict(zip(timed["iteration"], timed["duration_ns"], strict=True))
    # The rank writes when its window's last iteration is over; its next step then waits for nobody.
    assert job.seconds > 60
    assert all(duration < 30e9 for iteration, duration in durations.items() if iteration > 1)
    check_window(job)
    assert reference.returncode == 0, reference.tail
    assert job.losses == reference.losses, "to the last bit"
    assert len(job.losses) == 20
