"""A signal that reaches every process of a job, as torchrun and Slurm send it: the data loader's processes too."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.needs("megatron")]
pytest.importorskip("megatron.core")

from recipes.megatron import checkpoint_files as files  # noqa: E402

JOB = ("train.train_iters=100000", "logger.log_interval=1", "dataset.num_workers=2", "train.exit_signal_handler=true")
WINDOW = ("profiling.use_pytorch_profiler=true", "profiling.profile_step_start=2", "profiling.profile_step_end=90000")


def signalled(start, folder: Path, *settings: str) -> tuple[subprocess.Popen, str, str]:
    job = start(folder, *JOB, *WINDOW, f"checkpoint.save={folder / 'checkpoints'}", *settings)
    for line in job.stdout:
        if "iteration      4/100000" in line:
            break
    os.killpg(job.pid, signal.SIGTERM)
    return job, *job.communicate(timeout=120)


def test_with_the_data_loaders_handler_the_iteration_is_finished_and_a_checkpoint_saved(tmp_path, start):
    job, out, err = signalled(start, tmp_path, "train.exit_signal_handler_for_dataloader=true")
    assert job.returncode == 0, err
    assert f"training stops after iteration {files.latest_iteration(tmp_path / 'checkpoints') - 1}: SIGTERM" in out
    assert '"partial"' in (tmp_path / "profiles/manifest/iter-2-90000/rank-0.json").read_text()


def test_without_it_the_loaders_processes_die_and_the_partial_trace_alone_is_kept(tmp_path, start):
    job, _, err = signalled(start, tmp_path)
    assert job.returncode == 1
    assert "is killed by signal: Terminated" in err
    assert files.latest_iteration(tmp_path / "checkpoints") is None
    assert '"partial"' in (tmp_path / "profiles/manifest/iter-2-90000/rank-0.json").read_text()
    assert list((tmp_path / "profiles/torch/iter-2-90000").glob("rank-0.pt.trace.json.gz"))
