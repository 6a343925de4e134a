"""Jobs that are stopped, killed or restarted, as a launcher sees them: exit codes, messages, and what is resumed from."""

from __future__ import annotations

import os
import shutil
import signal

import psutil
import pytest

pytest.importorskip("megatron.core")

from launch.pretrain import main
from recipes.megatron import checkpoint_files as files
from tests.launch.conftest import start
from tests.recipes.trainings import run_cases, window

ENDLESS = ("train.train_iters=100000", "logger.log_interval=1")


@pytest.mark.system
@pytest.mark.parametrize("ranks", [2, None])
def test_a_signal_lets_all_ranks_save_after_the_same_iteration_and_end_with_0(tmp_path, ranks):
    """To one of two ranks; or to every process, as torchrun and Slurm send it: the data loader's ignore it."""
    loaders = f"train.exit_signal_handler_for_dataloader=true dataset.num_workers=2 {window(2, 90000)}"
    name, settings = ("SIGUSR1", "") if ranks else ("SIGTERM", loaders)
    settings += f" train.exit_signal_handler=true train.exit_signal={name} checkpoint.save={tmp_path}/checkpoints"
    job = start(tmp_path, *ENDLESS, *settings.split(), ranks=ranks)
    assert any("iteration      4/100000" in line for line in job.stdout), job.stderr.read()
    for _ in range(2):
        if ranks:
            psutil.Process(job.pid).children()[1].send_signal(signal.SIGUSR1)
        else:
            os.killpg(job.pid, signal.SIGTERM)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    completed = files.latest_iteration(tmp_path / "checkpoints")
    assert f"training stops after iteration {completed - 1}: {name} was received" in out
    assert f"iteration {completed:6d}/100000" not in out
    if not ranks:
        assert '"partial"' in (tmp_path / "profiles/manifest/iter-2-90000/rank-0.json").read_text()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_cases(folder, {"saved": f"train.train_iters=2 checkpoint.save={folder}/checkpoints"})
    return folder / "checkpoints"


@pytest.fixture
def refused(capsys):
    """The one line that a request which cannot be carried out gets, with exit code 2."""

    def refusal(*arguments: str) -> str:
        assert main(["train.train_iters=4", *arguments]) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if "Warning" not in line]
        assert line.startswith("error: ")
        return line

    return refusal


@pytest.mark.integration
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hidden_size=128", "written with model.hidden_size=64, and this run has 128;"),
        ("ddp.use_distributed_optimizer=true", "Type optimizer.use_distributed_optimizer=false"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(saved, refused, override, message):
    assert message in refused(override, f"checkpoint.load={saved}")


@pytest.mark.integration
def test_a_checkpoint_with_a_file_missing_is_refused(tmp_path, saved, refused):
    shutil.copytree(saved, tmp_path / "damaged", ignore=shutil.ignore_patterns("*.distcp"))
    message = refused(f"checkpoint.load={tmp_path}/damaged")
    assert f"the checkpoint {tmp_path}/damaged/iter_0000002 cannot be loaded" in message
    assert "No such file or directory" in message
    assert "older checkpoint" in message
