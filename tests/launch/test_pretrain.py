"""A rank's entry point: its command line, its exit codes, and how it ends."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("megatron.core")

from launch.pretrain import build_config, main, pretrain


def test_files_come_over_the_recipe_and_overrides_over_both(tmp_path):
    (tmp_path / "a.yaml").write_text("train:\n  train_iters: 30\n  eval_iters: 3\n")
    (tmp_path / "b.yaml").write_text("train:\n  train_iters: 31\n")
    config = build_config("gpt_tiny", [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")], ["train.micro_batch_size=1"])
    assert (config.train.train_iters, config.train.eval_iters, config.train.micro_batch_size) == (31, 3, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recipe gpt_tny", "unknown recipe 'gpt_tny'"),
        ("--recip gpt_tiny", "--recip"),
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


def test_one_rank_of_a_machine_reports_for_all(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train.train_iter=3"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.integration
def test_a_training_that_fails_raises_so_that_python_exits_with_1(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        main([f"logger.loss_file={tmp_path}/file/losses.jsonl"])


def test_sigterm_unwinds_the_training_and_ends_it_with_143(monkeypatch):
    def training(config, may_restart):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("recipes.megatron.train.pretrain", training)
    with pytest.raises(SystemExit) as ended:
        pretrain(build_config("gpt_tiny"))
    assert ended.value.code == 143
