"""launch/experiment.py: a Script and a Partial train alike under NeMo-Run, and a wrong request is refused beforehand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytestmark = pytest.mark.needs("megatron", "nemo_run")

ROOT = Path(__file__).resolve().parents[2]


def experiment(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NEMORUN_HOME": str(home), "PATH": "/usr/bin:/bin"}  # no environment is activated
    command = [sys.executable, str(ROOT / "launch" / "experiment.py"), *arguments]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module", params=["script", pytest.param("partial", marks=pytest.mark.system)])
def finished(request, tmp_path_factory):
    """A run of each kind: two ranks under torchrun, the window 2-4 on both."""
    home = tmp_path_factory.mktemp(request.param)
    run = ["--task", request.param, "--steps", "2:4", "--ranks", "0,1", "--record-shapes", "--report", "train.train_iters=6"]
    losses = home / "losses.jsonl"
    return home, losses, experiment(home, *run, f"logger.loss_file={losses}")


def test_it_trains_and_shows_what_was_captured(finished):
    _, _, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert "window 2-4" in done.stdout
    assert "aten::mm" in done.stdout
    traces = [line for line in done.stdout.splitlines() if line.endswith(".pt.trace.json.gz")]
    shown = [line for line in traces if line.startswith("/")]
    assert [Path(line).name for line in shown] == [f"rank-{rank}.pt.trace.json.gz" for rank in (0, 1)]
    assert all(Path(line).is_file() for line in shown)


def test_the_progress_is_shown_while_it_runs(finished):
    _, _, done = finished
    assert "capturing iterations 2 to 3 with torch" in done.stdout + done.stderr
    assert "tokens/s" in done.stdout + done.stderr


def test_the_profilers_own_lines_are_in_the_log_and_not_shown(finished):
    home, _, done = finished
    logs = "".join(path.read_text() for path in home.rglob("combined.log"))
    assert "tokens/s" in logs
    assert all(line in done.stdout for line in re.findall(r"iteration +\d+/6 .*", logs))
    for said in ("profiler_start", "gpuGetDeviceCount"):
        assert said not in done.stdout + done.stderr
    # torch 2.13 to 2.15 print them; where a version does not, there is nothing to leave out.
    if torch.__version__.startswith(("2.13.", "2.14.", "2.15.")):
        assert logs.count("profiler_start") == 2


def test_the_report_is_made_after_it_and_its_path_is_the_last_line(finished):
    _, _, done = finished
    word, _, path = done.stdout.splitlines()[-1].partition(": ")
    assert word == "report"
    page = Path(path).read_text()
    assert "rank 0" in page
    assert Path(path).parent.name == "profiles"


def test_every_rank_was_asked_for_the_same_thing(finished):
    home, losses, _ = finished
    manifests = [json.loads(path.read_text()) for path in home.rglob("manifest/iter-2-4/rank-*.json")]
    assert sorted(manifest["rank"] for manifest in manifests) == [0, 1]
    for manifest in manifests:
        assert manifest["status"] == "complete"
        assert manifest["coordinates"]["dp"] == [manifest["rank"], 2]
        assert manifest["config"]["record_shapes"] is True
        assert manifest["config"]["profile_ranks"] == [0, 1]
    assert len(losses.read_text().splitlines()) == 6


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """Runs the command in this process, and makes sure that nothing was submitted."""
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    from launch.experiment import app

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 2, result.output
        assert not list(tmp_path.iterdir())
        return " ".join(result.output.split())

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "4"], "Type --steps 10:12"),
        (["--steps", "a:b"], "Type --steps 10:12"),
        (["--steps", "6:6"], "the window is empty"),
        (["--steps", "19:21"], "exceeds train.train_iters=20"),
        (["--ranks", "x"], "Type --ranks 0,1"),
        (["--ranks", "0,2"], "names 2, but the job has 2 ranks"),
        (["--ranks", ""], "not a list of ranks"),
        (["--recipe", "gpt_tny"], "Type gpt_tiny"),
        (["train.train_iter=5"], "Type train.train_iters=5"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--nproc-per-node", "3"], "train.global_batch_size=12"),
        (["--executor", "local"], "Type --executor local_torchrun"),
        (["--nodes", "2"], "Type --executor slurm"),
        (["--executor", "slurm"], "Type --account NAME"),
        (["--profiler", "nsys"], "nsys is not on this machine's PATH"),
        (["--profiler", "none", "--report"], "a report is about captures"),
        (["--profiler", "none", "--memory"], "--memory does not go with --profiler none"),
        (["profiling.use_nsys_profiler=true"], "Keep one of them"),
        (["--flag"], "No such option"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_submitted(refused, arguments, message):
    assert message in refused(*arguments)


@pytest.mark.system
def test_a_report_that_fails_is_reported_and_is_not_the_trainings_failure(tmp_path):
    (tmp_path / "profiles" / "report.html").mkdir(parents=True)  # where the page cannot be written
    options = ["--executor", "local", "--nproc-per-node", "1", "--env", f"BRIDGE_PROFILING_DIR={tmp_path}/profiles", "--report"]
    done = experiment(tmp_path, *options, "--steps", "2:4", "train.train_iters=5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("no report: its job failed")
    assert "window 2-4" in done.stdout


@pytest.mark.system
def test_a_failing_job_exits_with_1(tmp_path):
    (tmp_path / "blocker").write_text("")
    losses = f"logger.loss_file={tmp_path}/blocker/losses.jsonl"
    done = experiment(tmp_path, "--profiler", "none", "--executor", "local", "--nproc-per-node", "1", losses)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the job failed" in done.stderr


@pytest.fixture
def dry_run(monkeypatch, tmp_path, capfd):
    """Runs the command in this process with --dry-run; gives what it printed."""
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    from launch.experiment import app

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["--dry-run", *arguments])
        assert result.exit_code == 0, result.output
        assert not list(tmp_path.rglob("rank-*.json"))
        return result.output + capfd.readouterr().out

    return run


def test_a_dry_run_prints_what_would_run(dry_run):
    printed = dry_run("--steps", "2:4", "--ranks", "all")
    assert "launch/pretrain.py --recipe gpt_tiny" in printed
    assert "profiling.profile_ranks=all" in printed


def test_a_slurm_dry_run_shows_what_the_cluster_gets(dry_run):
    slurm = ["--executor", "slurm", "--account", "me", "--partition", "gpu", "--nodes", "2", "--nproc-per-node", "8"]
    printed = dry_run(*slurm, "--ranks", "0,15", "train.global_batch_size=32")
    assert "python launch/pretrain.py --recipe gpt_tiny" in printed
    assert "profiling.profile_ranks=[0,15]" in printed
    assert "/nemo_run/code" in printed
