"""The status of a job, and requests to it."""

from bridge_profiling.capture.control.messages import CaptureRequest, JobStatus

_PROCESS = {"run": "run-1", "launch": "", "job_id": None, "host": "elsewhere", "pid": 1, "pid_space": None, "cuda": True}
_PROFILED = {"profile_ranks": [0], "profilers": ["torch"], "poll_seconds": 1.0}
_TRAINING = {"world_size": 8, "pipeline_ranks": [0, 4], "train_iters": 1000}
_PROGRESS = {"iteration": 100, "completed": 100, "fastest_ns": 500_000_000, "median_ns": 600_000_000}
STATUS = JobStatus(**_PROCESS, **_PROFILED, **_TRAINING, **_PROGRESS)


def requested(**request):
    return CaptureRequest(**{"iterations": 2, **request})
