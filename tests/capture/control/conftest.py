"""The status of a job, and requests to it."""

import os

import pytest

from bridge_profiling.capture.control.protocol import CaptureRequest, JobStatus

STATUS = JobStatus(
    run="run-1",
    launch="",
    job_id=None,
    host="elsewhere",
    pid=1,
    pid_space=None,
    poll_seconds=1.0,
    world_size=8,
    pipeline_ranks=[0, 4],
    profile_ranks=[0],
    profilers=["torch"],
    train_iters=1000,
    iteration=100,
    completed=100,
    fastest_ns=500_000_000,
    median_ns=600_000_000,
    cuda=True,
)


def requested(**request):
    return CaptureRequest(**{"iterations": 2, **request})


@pytest.fixture
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_", "BRIDGE_PROFILING")):
            monkeypatch.delenv(name)
