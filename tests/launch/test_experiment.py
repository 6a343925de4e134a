"""Jobs under NeMo-Run: launch/experiment.py trains, and refuses a wrong request beforehand."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_profiling.cli.outcome import exit_code
from launch.shown_log import without_the_profilers_own_lines
from tests.system.jobs import manifests

pytest.importorskip("nemo_run")
pytest.importorskip("megatron.core")

from launch.experiment import app

SCRIPTS = Path(__file__).resolve().parents[2] / "launch"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A NEMORUN_HOME of its own, and no environment is activated."""
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path


def launched(script: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPTS / script, *arguments], cwd=home, capture_output=True, text=True)


@pytest.mark.integration
def test_two_ranks_train_and_their_captures_are_shown(home):
    losses = home / "losses.jsonl"
    window = ["--steps", "2:4", "--ranks", "0,1", "--record-shapes"]
    done = launched("experiment.py", home, *window, "train.train_iters=6", f"logger.loss_file={losses}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses.read_text().splitlines()) == 6
    # The table of what was captured, the paths of the traces, and what to type.
    assert "window 2-4" in done.stdout
    operators = re.findall(r" (\d) .* ms .* aten::", done.stdout)  # which of them are slowest, the machine's load decides
    assert set(operators) == {"0", "1"}
    lines = done.stdout.splitlines()
    shown = [line for line in lines if line.startswith("/") and line.endswith(".pt.trace.json.gz")]
    assert [Path(line).name for line in shown] == [f"rank-{rank}.pt.trace.json.gz" for rank in (0, 1)]
    assert all(Path(line).is_file() for line in shown)
    assert re.fullmatch(r"type: .*bridge-profiling report \S+/profiles", lines[-1])
    # The job's log, without the profiler's own lines, which torch 2.13 to 2.15 print.
    assert re.search(r"iteration +5/6 .* tokens/s", done.stdout)
    assert not re.search("profiler_start|gpuGetDeviceCount", done.stdout + done.stderr)
    # Every rank was asked for the same.
    for rank, manifest in manifests(home, "iter-2-4").items():
        assert (manifest["status"], manifest["coordinates"]["dp"]) == ("complete", [rank, 2])
        assert (manifest["config"]["record_shapes"], manifest["config"]["profile_ranks"]) == (True, [0, 1])


@pytest.fixture
def invoke(monkeypatch, home, capfd):
    """Runs the command in this process, where nothing is trained; gives what it printed."""
    monkeypatch.setenv("COLUMNS", "300")
    # NeMo-Run's packager runs git with this process's standard input, and pytest's own refuses to be read.
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def command(arguments: str, code: int) -> str:
        monkeypatch.setattr(sys, "argv", ["experiment.py", *arguments.split(" ")])
        assert exit_code(app) == code
        assert not list(home.rglob("*" if code else "rank-*.json"))
        return " ".join("".join(capfd.readouterr()).split())

    return command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 4", "Type --steps 10:12"),
        ("--ranks x", "Type --ranks 0,1"),
        ("--ranks 0,2", "--ranks names 2, but the job has 2 ranks"),
        ("--executor local", "Type --executor local_torchrun"),
        ("--nodes 2", "Type --executor slurm"),
        ("--env A", "--env A is not NAME=VALUE"),
        ("--profiler torch --profiler nsys", "Keep one of them"),
        ("--executor slurm", "Type --account NAME"),
        ("--profiler nsys", "nsys is not on this machine's PATH"),
        ("--profiler none --record-shapes", "without a profiler nothing is recorded"),
        ("--light --record-shapes", "--light and --record-shapes exclude each other"),
        ("--set nothing", "--set nothing is not FIELD=VALUE"),
        ("--set profile_step_start=3", "Type --steps A:B without --set"),
        ("--profiler torch --gpu-metrics", "Type --profiler nsys as well"),
        ("profiling.use_nsys_profiler=true", "Keep one of them"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_submitted(invoke, arguments, message):
    assert message in invoke(arguments, 2)


def test_a_dry_run_prints_what_would_run(invoke):
    recorded = "--profiler memory --with-stack --nvtx --set profile_every=4 --output-dir /captures"
    printed = invoke(f"--dry-run --steps 2:4 --ranks all --env A=1 --fault-tolerance {recorded}", 0)
    flags = ("record_memory_history", "pytorch_profiler_collect_callstack", "nvtx_ranges")
    settings = [f"profiling.{flag}=true" for flag in flags] + ["profiling.profile_every=4", "profiling.profile_ranks=all"]
    wanted = [*settings, "launch/pretrain.py --recipe gpt_tiny", "env A=1", "env BRIDGE_PROFILING_DIR=/captures"]
    assert [text for text in wanted if text not in printed] == []


MARK = "USDT:2026-11-23 09:03:51 1990:1990 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
NO_DRIVER = "ERROR:2026-11-23 09:03:51 1990:1990 DeviceProperties.cpp:56] gpuGetDeviceCount failed with code 35\n"
HIDDEN = (MARK, "profile/0 " + NO_DRIVER, "\x1b[32mprofile/0\x1b[0m [default1]:" + MARK.replace("start", "stop"))
#: The end of a line, which libkineto writes for itself, comes later.
CUT = (f"profile/0 [default0]:{MARK[:-1]}", "profile/0 [default0]:\n", f"profile/0 [default0]:{MARK[:-1]}[default1]:{MARK}")
SHOWN = (
    NO_DRIVER.replace("35", "2"),
    NO_DRIVER.replace("35", "352"),
    "profile/0 [default0]:ERROR:2026-11-23 09:03:51 1:1 output_json.cpp:468] Failed to open the trace file\n",
)


def test_lines_of_a_jobs_log_that_are_the_profilers_own_are_left_out_and_no_others(capsys):
    joined = (f"profile/0 [default0]:{MARK[:-1]}[default1]:iteration 2/6\n", f"{MARK[:-1]}iteration 3/6\n")
    with without_the_profilers_own_lines():
        for line in (*HIDDEN, *CUT, *SHOWN, *joined, "\n"):
            print(line, end="")
    print("and after", end="")
    assert capsys.readouterr().out == "".join(SHOWN) + "profile/0 [default1]:iteration 2/6\niteration 3/6\n\nand after"


@pytest.mark.system
def test_nemo_runs_own_command_line_trains_and_profiles(home):
    """The application of docs/how-to/recipes.md, with the names of recipes, executors and plugins."""
    page = (SCRIPTS.parent / "docs" / "how-to" / "recipes.md").read_text().partition("## NeMo-Run's own command line")[2]
    (home / "app.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    window = ["run.plugins.profile_step_start=2", "run.plugins.profile_step_end=3", "run.plugins.profile_ranks=[0,1]"]
    plugin = ["run.executor=local_torchrun", "run.plugins=pytorch_profiler", *window]
    command = [sys.executable, home / "app.py", "--yes", "--factory=gpt_tiny", *plugin]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    traces = sorted(path.name for path in home.glob("experiments/**/profiles/torch/iter-2-3/*.json.gz"))
    assert traces == ["rank-0.pt.trace.json.gz", "rank-1.pt.trace.json.gz"]
