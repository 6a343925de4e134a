"""Jobs that are stopped, killed or restarted, as a launcher sees them: exit codes, messages, and what is resumed from."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

from launch.pretrain import main  # noqa: E402
from recipes.megatron import checkpoint_files as files  # noqa: E402

ENDLESS = ("train.train_iters=100000", "logger.log_interval=1")


def read_until(job: subprocess.Popen, text: str) -> None:
    for line in job.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}: {job.stderr.read()}")


def kill_while_it_saves(job: subprocess.Popen, root: Path) -> None:
    """Stop the job in the middle of writing a checkpoint that is not its first, look that it is, and kill it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (root / files.POINTER).exists() and list(root.glob(".iter_*.incomplete")):
            # The whole group, as Slurm does: megatron-core's writers are processes of their own.
            os.killpg(job.pid, signal.SIGSTOP)
            time.sleep(0.1)
            if list(root.glob(".iter_*.incomplete")):
                os.killpg(job.pid, signal.SIGKILL)
                return
            os.killpg(job.pid, signal.SIGCONT)
    raise AssertionError("it never began a second checkpoint")


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_job_killed_while_it_saves_resumes_from_the_checkpoint_before(tmp_path, start):
    root = tmp_path / "checkpoints"
    same_command = [*ENDLESS, f"checkpoint.save={root}", f"checkpoint.load={root}"]
    killed = start(tmp_path, *same_command, "checkpoint.save_interval=5")
    kill_while_it_saves(killed, root)
    out, _ = killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert f"no checkpoint under {root} yet: training starts from scratch" in out
    latest = files.latest_iteration(root)
    assert latest
    again = start(tmp_path, *same_command, f"train.exit_interval={latest + 5}")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert f"resuming at iteration {latest}, from the checkpoint under {root}" in out
    assert files.latest_iteration(root) == latest + 5
    assert not list(root.glob(".iter_*.incomplete"))


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_signal_to_one_rank_lets_all_of_them_save_after_the_same_iteration_and_end_with_0(tmp_path, start):
    root = tmp_path / "checkpoints"
    settings = ("train.exit_signal_handler=true", "train.exit_signal=SIGUSR1", f"checkpoint.save={root}")
    job = start(tmp_path, *ENDLESS, *settings, ranks=2)
    read_until(job, "iteration      4/100000")
    one_rank = psutil.Process(job.pid).children()[1]
    one_rank.send_signal(signal.SIGUSR1)
    one_rank.send_signal(signal.SIGUSR1)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    completed = files.latest_iteration(root)
    assert f"training stops after iteration {completed - 1}: SIGUSR1 was received" in out
    assert f"iteration {completed:6d}/100000" not in out


@pytest.mark.system
def test_sigterm_with_the_handler_on_finishes_the_iteration_saves_and_ends_with_0(tmp_path, start):
    root = tmp_path / "checkpoints"
    window = ("profiling.use_pytorch_profiler=true", "profiling.profile_step_start=2", "profiling.profile_step_end=90000")
    job = start(tmp_path, *ENDLESS, *window, "train.exit_signal_handler=true", f"checkpoint.save={root}")
    read_until(job, "iteration      4/100000")
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert f"training stops after iteration {files.latest_iteration(root) - 1}: SIGTERM was received" in out
    assert '"partial"' in (tmp_path / "profiles/manifest/iter-2-90000/rank-0.json").read_text()


@pytest.fixture(scope="module")
def alone():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory, alone):
    root = tmp_path_factory.mktemp("saved")
    assert main(["train.train_iters=2", f"checkpoint.save={root}"]) == 0
    return root


def refusal(capsys, *arguments: str) -> str:
    """The one line that a request which cannot be carried out gets, with exit code 2."""
    assert main(["train.train_iters=4", *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "Warning" not in line]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hidden_size=128", "written with model.hidden_size=64, and this run has 128;"),
        ("model.bf16=true", "Type model.bf16=false, or name another checkpoint.load"),
        ("train.global_batch_size=4", "Type train.global_batch_size=8"),
        ("ddp.use_distributed_optimizer=true", "Type optimizer.use_distributed_optimizer=false"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(capsys, saved, override, message):
    assert message in refusal(capsys, override, f"checkpoint.load={saved}")


def test_a_checkpoint_with_a_file_missing_is_refused(capsys, tmp_path, saved):
    root = tmp_path / "damaged"
    files.checkpoint_folder(root, 2).mkdir(parents=True)
    (root / files.POINTER).write_text("2")
    for file in files.checkpoint_folder(saved, 2).iterdir():
        if file.suffix != ".distcp":
            (files.checkpoint_folder(root, 2) / file.name).write_bytes(file.read_bytes())
    message = refusal(capsys, f"checkpoint.load={root}")
    assert f"the checkpoint {root}/iter_0000002 cannot be loaded" in message
    assert "No such file or directory" in message
    assert "older checkpoint" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.load=/x", "train.start_iteration=1"], "the checkpoint determines where to start"),
        (["checkpoint.save_interval=2"], "Type checkpoint.save=DIRECTORY as well"),
        (["checkpoint.save=/x", "checkpoint.save_interval=0"], "Type checkpoint.save_interval=null"),
        (["checkpoint.save=/x", "checkpoint.most_recent_k=0"], "Type checkpoint.most_recent_k=null"),
        (["checkpoint.save=/x", "optimizer.optimizer=sgd"], "Type optimizer.optimizer=adam"),
        (["train.exit_interval=0"], "Type train.exit_interval=null"),
        (["train.exit_duration_in_mins=-1"], "Type train.exit_duration_in_mins=null"),
        (["train.exit_signal=SIGKILL"], "SIGTERM"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(capsys, alone, overrides, message):
    assert message in refusal(capsys, *overrides)
