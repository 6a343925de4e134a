"""A rank's entry point: its command line, its exit codes, and how it ends."""

from __future__ import annotations

import json
import os
import signal

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.capture.signals import unwind_on

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

from launch.pretrain import build_config, main, pretrain  # noqa: E402


def test_files_come_over_the_recipe_and_overrides_over_both(tmp_path):
    (tmp_path / "a.yaml").write_text("train:\n  train_iters: 30\n  eval_iters: 3\n")
    (tmp_path / "b.yaml").write_text("train:\n  train_iters: 31\n")
    config = build_config("gpt_tiny", [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")], ["train.micro_batch_size=1"])
    assert (config.train.train_iters, config.train.eval_iters, config.train.micro_batch_size) == (31, 3, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "gpt_tny"], "unknown recipe 'gpt_tny'"),
        (["--recip", "gpt_tiny"], "--recip"),
        (["--steps", "3"], "unrecognized arguments: --steps"),
        (["--config"], "--config: expected one argument"),
        (["--config", "/no/such.yaml"], "/no/such.yaml does not exist"),
        (["train.train_iter=3"], "Type train.train_iters=3"),
        (["train.train_iters=many"], "expected int, got many"),
        (["train_iters"], "is not of the form name=value"),
        (["train.global_batch_size=7"], "Type train.global_batch_size=8"),
        (["profiling.use_pytorch_profiler=true", "profiling.profile_step_end=40"], "exceeds train.train_iters=20"),
        (["profiling.use_pytorch_profiler=true", "profiling.use_nsys_profiler=true"], "both on"),
        (["profiling.profile_step_start=4", "profiling.profile_step_end=4"], "the window is empty"),
    ],
)
def test_a_wrong_request_gets_one_line_and_exit_code_2(capsys, monkeypatch, arguments, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_one_rank_of_a_machine_reports_for_all(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train.train_iter=3"]) == 2
    assert capsys.readouterr().err == ""


def test_called_as_a_function_it_raises():
    config = build_config("gpt_tiny", overrides=["train.train_iters=0"])
    with pytest.raises(ProfilingConfigError, match=r"train\.train_iters=0"):
        pretrain(config)


def test_two_ranks_train_with_the_arguments_as_nemo_run_delivers_them(tmp_path, start):
    ranks = start(
        tmp_path,
        "--recipe",
        "gpt_tiny",
        "'profiling.profile_ranks=[0,1]'",
        "profiling.use_pytorch_profiler=true",
        "profiling.profile_step_start=1",
        "profiling.profile_step_end=3",
        "train.train_iters=4",
        "",
        ranks=2,
    )
    out, err = ranks.communicate(timeout=240)
    assert ranks.returncode == 0, out + err
    assert "iteration 3/4 | loss 4." in out
    for rank in (0, 1):
        assert f"rank {rank}: capturing iterations 1 to 2" in out
        assert f"profiles/torch/iter-1-3/rank-{rank}.pt.trace.json.gz" in out
        manifest = json.loads((tmp_path / f"profiles/manifest/iter-1-3/rank-{rank}.json").read_text())
        assert manifest["coordinates"]["dp"] == [rank, 2]


def test_a_training_that_fails_exits_with_1_and_says_where(tmp_path, start):
    (tmp_path / "file").touch()
    rank = start(tmp_path, f"logger.loss_file={tmp_path}/file/losses.jsonl")
    _, err = rank.communicate(timeout=120)
    assert rank.returncode == 1
    assert "Traceback" in err


@pytest.mark.system
def test_sigterm_writes_the_partial_trace_even_when_it_comes_twice(tmp_path, start):
    rank = start(
        tmp_path,
        "train.train_iters=100000",
        "profiling.use_pytorch_profiler=true",
        "profiling.profile_step_start=2",
        "profiling.profile_step_end=90000",
    )
    for line in rank.stdout:
        if line.startswith("iteration") and " 5/100000" in line:
            break
    rank.send_signal(signal.SIGTERM)
    rank.send_signal(signal.SIGTERM)
    _, err = rank.communicate(timeout=120)
    assert rank.returncode == 143, err
    folder = tmp_path / "profiles"
    assert (folder / "torch/iter-2-90000/rank-0.pt.trace.json.gz").stat().st_size > 0
    assert "partial" in (folder / "manifest/iter-2-90000/rank-0.json").read_text()


def test_the_first_sigterm_unwinds_the_second_is_ignored_and_the_handler_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    written = []

    def training() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            written.append("trace")

    with pytest.raises(SystemExit) as caught, unwind_on(signal.SIGTERM, replace=True):
        training()
    assert (caught.value.code, written) == (143, ["trace"])
    assert signal.getsignal(signal.SIGTERM) is before
