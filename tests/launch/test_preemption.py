"""A signal that reaches every process of a job, as torchrun and Slurm send it: the data loader's processes too."""

from __future__ import annotations

import json
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


def inside_the_window(start, folder: Path, *settings: str) -> subprocess.Popen:
    job = start(folder, *JOB, *WINDOW, f"checkpoint.save={folder / 'checkpoints'}", *settings)
    for line in job.stdout:
        if "iteration      4/100000" in line:
            break
    return job


def test_with_the_data_loaders_handler_the_iteration_is_finished_and_a_checkpoint_saved(tmp_path, start):
    job = inside_the_window(start, tmp_path, "train.exit_signal_handler_for_dataloader=true")
    os.killpg(job.pid, signal.SIGTERM)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert f"training stops after iteration {files.latest_iteration(tmp_path / 'checkpoints') - 1}: SIGTERM" in out
    assert '"partial"' in (tmp_path / "profiles/manifest/iter-2-90000/rank-0.json").read_text()


def test_without_it_a_loaders_process_dies_and_the_partial_trace_alone_is_kept(start, tmp_path):
    """The loader's processes alone get the signal: whether the training notices before its iteration ends is luck otherwise."""
    job = inside_the_window(start, tmp_path)
    workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    assert len(workers) == 2
    for worker in workers:
        os.kill(int(worker), signal.SIGTERM)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1, err
    assert files.latest_iteration(tmp_path / "checkpoints") is None
    manifest = json.loads((tmp_path / "profiles/manifest/iter-2-90000/rank-0.json").read_text())
    # That the process died, or that its pipe is broken: which comes first is a matter of microseconds.
    assert (manifest["status"], manifest["reason"].partition(" raised ")[0]) == ("partial", "training")
    assert list((tmp_path / "profiles/torch/iter-2-90000").glob("rank-0.pt.trace.json.gz"))
