"""A rank's entry point: its command line, and its exit codes when it is wrong, stopped, killed or started again."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("megatron.core")

from launch.pretrain import build_config, main, pretrain
from recipes.megatron.checkpoint import latest_iteration
from tests.recipes.trainings import run_cases, window


def test_files_come_over_the_recipe_and_overrides_over_both(tmp_path):
    (tmp_path / "a.yaml").write_text("train:\n  train_iters: 30\n  eval_iters: 3\n")
    (tmp_path / "b.yaml").write_text("train:\n  train_iters: 31\n")
    config = build_config("gpt_tiny", [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")], ["train.micro_batch_size=1"])
    assert (config.train.train_iters, config.train.eval_iters, config.train.micro_batch_size) == (31, 3, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recipe gpt_tny", "unknown recipe 'gpt_tny'"),
        ("--config /no/such.yaml", "/no/such.yaml does not exist"),
        ("train.train_iter=3", "Type train.train_iters=3"),
    ],
)
def test_a_wrong_request_gets_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert (captured.out, line[:7]) == ("", "error: ")
    assert message in line


def test_sigterm_unwinds_the_training_and_ends_it_with_143(monkeypatch):
    def training(config, may_restart):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("recipes.megatron.train.pretrain", training)
    with pytest.raises(SystemExit) as ended:
        pretrain(build_config("gpt_tiny"))
    assert ended.value.code == 143


SCRIPT = str(Path(__file__).parents[2] / "launch" / "pretrain.py")
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node")


def start(folder: Path, *arguments: str, ranks: int | None = None) -> subprocess.Popen:
    """Start the script in a process of its own, from elsewhere, with no path to the checkout; or `ranks` of them."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    launcher = () if ranks is None else (*TORCHRUN, str(ranks))
    return subprocess.Popen(
        [sys.executable, *launcher, SCRIPT, *arguments],
        env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process group of its own, which a test that kills it can kill whole.
        start_new_session=True,
    )


ENDLESS = ("train.train_iters=100000", "logger.log_interval=1")


@pytest.mark.system
@pytest.mark.parametrize("ranks", [2, None])
def test_a_signal_lets_all_ranks_save_after_the_same_iteration_and_end_with_0(tmp_path, ranks):
    """To one of two ranks; or to every process, as torchrun and Slurm send it: the data loader's ignore it."""
    loaders = f"dataset.num_workers=2 {window(2, 90000)}"
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
    completed = latest_iteration(tmp_path / "checkpoints")
    assert f"training stops after iteration {completed - 1}: {name} was received" in out
    assert f"iteration {completed:6d}/100000" not in out
    if not ranks:
        assert '"partial"' in (tmp_path / "profiles/manifest/iter-2-90000/rank-0.json").read_text()


@pytest.mark.integration
def test_a_checkpoint_of_another_training_or_with_a_file_missing_is_refused_in_one_line(tmp_path, capsys):
    saved, damaged = tmp_path / "saved", tmp_path / "damaged"
    run_cases(tmp_path, {"short": f"train.train_iters=2 checkpoint.save={saved}"})
    shutil.copytree(saved, damaged, ignore=shutil.ignore_patterns("*.distcp"))
    lost = rf"the checkpoint {damaged}/iter_0000002 cannot be loaded.*No such file or directory.*older checkpoint"
    for folder, override, message in (
        (saved, "model.hidden_size=128", "this model has .*Type model.hidden_size=64 "),
        (saved, "model.normalization=RMSNorm", "Type model.normalization=LayerNorm, or name another"),
        (saved, "ddp.use_distributed_optimizer=true", "Type optimizer.use_distributed_optimizer=false"),
        (damaged, "train.eval_iters=1", lost),
    ):
        assert main(["train.train_iters=4", override, f"checkpoint.load={folder}"]) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if "Warning" not in line]
        assert re.search(f"^error: .*{message}", line)
